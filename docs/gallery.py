r"""Renew the images of the gallery and of the worked example.

    python docs/gallery.py --photos photos --new new --run runs/photos --checkpoint downloads/dinov2-small \
        --stamps /usr/share/tuxpaint/stamps --grounds skimage/data

runs the commands of start/gallery.md in a temporary folder, and writes docs/images. It needs Chromium for screenshots.
photos: a folder of class folders, on which the run was trained; new: images that it has not seen, among them horse.png;
stamps and grounds: see docs/scenes.py.
"""

import argparse
import html
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import PIL.Image
import scenes

DOCS = pathlib.Path(__file__).resolve().parent
PUBLISHED = "hf:facebook/dinov2-small"
LARGEST = 80_000  # bytes of an image on the site
# Of each image: the file that its commands write, and the part of it in pixels: left, top, right, bottom.
SOURCES = {
    "explanation.jpg": ("new.html", (0, 470, 1000, 1332)),
    "report.jpg": ("report/report.html", (0, 0, 1000, 727)),
    "confusion.jpg": ("report/confusion.png", None),
    "segments.jpg": ("segments/predictions.html", (0, 1362, 1000, 2650)),
    "boxes.jpg": ("boxes.html", (0, 820, 1000, 1490)),
    "defects.jpg": ("defects.html", (0, 0, 1000, 810)),
    "similar.jpg": ("similar.html", (0, 0, 1000, 470)),
    "review.jpg": ("index/review/review.html", (0, 0, 1000, 890)),
    "attention.jpg": ("inside/maps.png", None),
    "heads.jpg": ("inside/heads_0.png", None),
    "curves.jpg": ("runs/demo/curves.png", None),
    "served.jpg": ("served.html", (0, 0, 1000, 830)),
    "cat-features.jpg": ("features.png", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("photos", "new", "run", "checkpoint", "stamps", "grounds"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    checkpoint = options.checkpoint
    if os.path.exists(checkpoint):
        checkpoint = os.path.abspath(checkpoint)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "runs").mkdir()
        places = {"photos": options.photos, "new": options.new, "runs/photos": options.run, "docs": DOCS}
        for place, given in places.items():
            (folder / place).symlink_to(os.path.abspath(given))
        scenes.make_scenes(pathlib.Path(options.stamps), pathlib.Path(options.grounds), folder)
        scenes.make_gravel(pathlib.Path(options.stamps), pathlib.Path(options.grounds), folder)
        for line in dict.fromkeys(code(DOCS / "start" / "gallery.md", "bash").splitlines()):
            run(line.replace(PUBLISHED, checkpoint), folder)
        draw_features(code(DOCS / "explain" / "paper.md", "py").replace(PUBLISHED, checkpoint), folder)
        for image in SOURCES:
            save(folder, image)


def code(page: pathlib.Path, language: str) -> str:
    """Return the blocks of code of a page in one language."""
    return "".join(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


def draw_features(script: str, folder: pathlib.Path) -> None:
    """Run the script of the paper's page, and put the photo beside what it drew."""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder, env=environment())
    both = PIL.Image.new("RGB", (728, 240), "white")
    for left, file in ((0, DOCS / "images" / "cat.jpg"), (368, folder / "features.png")):
        both.paste(PIL.Image.open(file).resize((360, 240)), (left, 0))
    both.save(folder / "features.png")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(DOCS.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run(line: str, folder: pathlib.Path) -> None:
    """Run a command; of a server, save its page as it is after an image was dropped on it."""
    _, *arguments = shlex.split(line)
    command = [sys.executable, "-m", "keras_vit", *arguments]
    if "--serve" not in arguments:
        subprocess.run(command, check=True, cwd=folder, env=environment())
        return
    server = subprocess.Popen(command, cwd=folder, env=environment())
    try:
        answer = html.escape(ask((folder / "new" / "horse.png").read_bytes()))
        page = ask().replace('title="Result" hidden', f'title="Result" srcdoc="{answer}"')
        (folder / "served.html").write_text(page)
    finally:
        server.terminate()
        server.wait()


def ask(image: bytes | None = None, minutes: int = 5) -> str:
    """Return what the server answers to an image, or its page, once it listens."""
    request = urllib.request.Request("http://127.0.0.1:8000/", image, {"X-Name": "horse.png"})
    for _ in range(60 * minutes):
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()
        except urllib.error.URLError:
            time.sleep(1)
    raise SystemExit(f"The server did not answer in {minutes} minutes.")


def save(folder: pathlib.Path, image: str) -> None:
    """Write an image of the site from the file that the commands wrote."""
    name, part = SOURCES[image]
    source = folder / name
    if source.suffix == ".html":
        source = screenshot(source, part[2:])
    photo = PIL.Image.open(source).convert("RGB")
    if part is not None:
        photo = photo.crop(part)
    photo.thumbnail((1000, 1000))
    for quality in (85, 75, 65, 50, 35):
        photo.save(DOCS / "images" / image, quality=quality, optimize=True)
        if (DOCS / "images" / image).stat().st_size <= LARGEST:
            break


def screenshot(page: pathlib.Path, size: tuple[int, int]) -> pathlib.Path:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Install Chromium for the screenshots.")
    file = page.with_suffix(".png")
    window = "--window-size={},{}".format(*size)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window, f"--screenshot={file}")
    subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True)
    return file


if __name__ == "__main__":
    main()
