"""keras-vit prepare: a clean folder of images, and what is said of each."""

import csv
import importlib
import io
import pathlib
import struct

import numpy as np
import PIL.Image
import pytest

from keras_vit import UserError
from keras_vit.images.formats import LARGEST_IMAGE, format_problem
from tests.support import encoded
from training import prepare as command
from training.preparation import TABLE

# Smooth colors: a JPEG changes them little. Height 12, width 20.
COLORS = np.stack([np.add.outer(np.arange(12) * 9, np.arange(20) * k) for k in (7, 2, 5)], axis=-1).astype(np.uint8)
IMAGE = PIL.Image.fromarray(COLORS)


def prepared(tmp_path: pathlib.Path, **files: bytes) -> dict[str, list[str]]:
    """Write the files into IN and prepare it -> name: (what was done, the new name, note)."""
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    command.main([str(tmp_path / "in"), str(tmp_path / "out")])
    with (tmp_path / "out" / TABLE).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows[0] == ["file", "done", "written", "note"]
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == {TABLE, *(row[2] for row in rows[1:] if row[2])}
    for name in written - {TABLE}:
        assert format_problem((tmp_path / "out" / name).read_bytes()) is None
    return {name: rest for name, *rest in rows[1:]}


def pixels(path: pathlib.Path) -> np.ndarray:
    with PIL.Image.open(path) as image:
        assert image.mode in ("L", "LA", "RGB", "RGBA")
        assert image.getexif().get(0x0112, 1) == 1
        return np.asarray(image)


def oriented(photo: PIL.Image.Image, orientation: int) -> PIL.Image.Exif:
    exif = photo.getexif()
    exif[0x0112] = orientation
    return exif


def test_images_that_need_no_change_are_copied_byte_for_byte(tmp_path):
    files = {
        "ant/a.JPG": encoded(IMAGE, "JPEG", exif=oriented(IMAGE, 1)),
        "ant/more/b.png": encoded(IMAGE.convert("LA"), "PNG"),
        "bee/c.jpeg": encoded(IMAGE.convert("L"), "JPEG", progressive=True),
    }
    table = prepared(tmp_path, **files)
    assert table == {name: ["kept", name, ""] for name in sorted(files)}
    assert all((tmp_path / place / name).read_bytes() == files[name] for name in files for place in ("in", "out"))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_all_orientations_are_turned_upright(orientation, tmp_path):
    sides = {"a.jpg": "JPEG", "b.png": "PNG", "c.webp": "WEBP", "d.tif": "TIFF", "e.avif": "AVIF"}
    options = {kind: {"exif": oriented(IMAGE, orientation)} for kind in sides.values()}
    options["WEBP"] |= {"lossless": True}
    # Pillow would write an AVIF that is turned by the file itself.
    files = {name: encoded(IMAGE, kind, **options[kind]) for name, kind in sides.items()}
    table = prepared(tmp_path, **files)
    for name in sides:
        with PIL.Image.open(tmp_path / "in" / name) as image:
            upright = np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB")).astype(int)
        difference = np.abs(pixels(tmp_path / "out" / table[name][1]) - upright)
        assert difference.max() <= (8 if table[name][1].endswith(".jpg") else 0), name
    assert table["a.jpg"] == ["turned", "a.jpg", "JPEG"]
    assert table["b.png"] == ["turned", "b.png", "PNG"]


def test_other_formats_are_converted_without_loss_unless_they_are_lossy(tmp_path):
    palette = IMAGE.quantize(9)
    clear = IMAGE.convert("RGBA")
    clear.putalpha(77)
    files = {
        "bmp.bmp": (encoded(palette, "BMP"), palette, "bmp.png"),
        "gif.gif": (encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]), palette, "gif.png"),
        "alpha.webp": (encoded(clear, "WEBP", lossless=True, exact=True), clear, "alpha.png"),
        "moving.webp": (encoded(IMAGE, "WEBP", save_all=True, append_images=[IMAGE.rotate(180)], lossless=True),
                        IMAGE, "moving.png"),
        "pages.tif": (encoded(IMAGE, "TIFF", save_all=True, append_images=[IMAGE] * 2), IMAGE, "pages.png"),
        "palette.png": (encoded(palette, "PNG"), palette, "palette.png"),
        "bits.png": (encoded(IMAGE.convert("1"), "PNG"), IMAGE.convert("1").convert("L"), "bits.png"),
        "net.ppm": (encoded(IMAGE, "PPM"), IMAGE, "net.png"),
        "inks.tiff": (encoded(IMAGE.convert("CMYK"), "TIFF"), IMAGE.convert("CMYK"), "inks.png"),
    }  # fmt: skip
    lossy = {
        "web.webp": (encoded(IMAGE, "WEBP"), "web.jpg"),
        "phone.avif": (encoded(IMAGE, "AVIF"), "phone.jpg"),
        "print.jpg": (encoded(IMAGE.convert("CMYK"), "JPEG"), "print.jpg"),
    }
    table = prepared(tmp_path, **{name: content for name, (content, *_) in (files | lossy).items()})
    for name, (_, expected, written) in files.items():
        assert table[name][:2] == ["converted", written], name
        found = pixels(tmp_path / "out" / written)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[found.shape[2] if found.ndim == 3 else 1]
        np.testing.assert_array_equal(found, np.asarray(expected.convert(mode)), name)
    for name, (content, written) in lossy.items():
        assert table[name][:2] == ["converted", written], name
        expected = np.asarray(PIL.Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
        assert np.abs(pixels(tmp_path / "out" / written) - expected).max() < 12, name
    assert table["pages.tif"][2] == "TIFF, the first of 3 pages"
    assert table["moving.webp"][2] == "WEBP, the first of 2 frames"
    assert table["gif.gif"][2] == "GIF, the first of 2 frames"


@pytest.mark.parametrize(("kind", "ending"), [("TIFF", "tif"), ("PNG", "png")])
def test_grays_of_16_bits_that_use_few_are_scaled(kind, ending, tmp_path):
    highest = {8: 200, 10: 1000, 12: 4000, 16: 65000}
    grays = {bits: np.linspace(0, most, 240).astype(np.uint16).reshape(12, 20) for bits, most in highest.items()}
    files = {f"{bits}.{ending}": encoded(PIL.Image.fromarray(gray), kind) for bits, gray in grays.items()}
    table = prepared(tmp_path, **files)
    for bits, gray in grays.items():
        said = "16 bits" if bits == 16 else f"16 bits, scaled since {bits} are used"
        assert table[f"{bits}.{ending}"] == ["converted", f"{bits}.png", f"{kind}, {said}"]
        np.testing.assert_array_equal(pixels(tmp_path / "out" / f"{bits}.png"), gray >> (bits - 8))


def tiff(values: np.ndarray, white_is_zero: bool = False) -> bytes:
    """An uncompressed TIFF of integers (h, w), signed or not, of any number of bits."""
    order = values.astype(values.dtype.newbyteorder("<"))
    fields = {256: values.shape[1], 257: values.shape[0], 258: 8 * values.itemsize, 259: 1, 262: int(not white_is_zero),
              273: 134, 277: 1, 278: values.shape[0], 279: values.nbytes,
              339: 2 if values.dtype.kind == "i" else 1}  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + order.tobytes()


@pytest.mark.parametrize(
    ("kind", "low", "high", "note"),
    [
        ("int8", -128, 127, "signed 8 bits, scaled from -128 to 127"),
        ("int16", -1024, 3071, "signed 16 bits, scaled from -1024 to 3071"),
        ("int32", -(2**31), 2**31 - 1, "signed 32 bits, scaled from -2147483648 to 2147483647"),
        ("uint32", 0, 2**32 - 1, "32 bits"),
        ("uint16", 0, 2**16 - 1, "16 bits"),
    ],
)
def test_integers_of_a_tiff_keep_their_order(kind, low, high, note, tmp_path):
    ramp = np.round(np.linspace(low, high, 240)).astype(kind).reshape(12, 20)
    table = prepared(tmp_path, **{"a.tif": tiff(ramp)})
    assert table["a.tif"] == ["converted", "a.png", f"TIFF, {note}"]
    found = pixels(tmp_path / "out" / "a.png").reshape(-1).astype(int)
    assert np.all(np.diff(found) >= 0)
    assert found[0] == 0
    assert found[-1] >= 249


def test_16_bits_whose_zero_is_white_are_inverted(tmp_path):
    ramp = np.arange(0, 64_000, 400, np.uint16).reshape(8, 20)
    prepared(tmp_path, **{"a.tif": tiff(ramp), "b.tif": tiff(65535 - ramp, white_is_zero=True)})
    np.testing.assert_array_equal(*(pixels(tmp_path / "out" / name) for name in ("a.png", "b.png")))


def test_fractions_are_read_from_0_to_1(tmp_path):
    share = np.linspace(0, 1, 240).astype(np.float32).reshape(12, 20)
    files = {"a.tif": share, "b.tif": 300 * share, "c.tif": share * np.nan}
    table = prepared(tmp_path, **{name: encoded(PIL.Image.fromarray(part), "TIFF") for name, part in files.items()})
    np.testing.assert_array_equal(pixels(tmp_path / "out" / "a.png"), np.round(255 * share))
    assert [table[name][0] for name in ("b.tif", "c.tif")] == ["broken", "broken"]
    assert table["b.tif"][2] == "fractions from 0 to 300, where 0 to 1 can be read"


def test_broken_files_and_copies_are_left_out_with_the_reason(tmp_path, capsys):
    whole = encoded(IMAGE, "PNG")
    files = {
        "ant/1.png": whole,
        "bee/2.png": whole,
        "bee/3.bmp": encoded(IMAGE, "BMP"),
        "bee/cut.png": whole[:-20],
        "bee/cut.jpg": encoded(IMAGE, "JPEG")[:-300],
        "bee/page.jpg": b"<html>404",
        "bee/notes.txt": b"BM is no image",
    }
    table = prepared(tmp_path, **files)
    assert table["bee/2.png"] == ["copy", "", "of ant/1.png"]
    assert table["bee/3.bmp"][:2] == ["converted", "bee/3.png"]
    assert [table[f"bee/{name}"][0] for name in ("cut.png", "cut.jpg", "page.jpg")] == ["broken"] * 3
    assert table["bee/page.jpg"][2] == "no image"
    assert "bee/notes.txt" not in table
    printed = capsys.readouterr().out
    assert "Ignored: 1 file in" in printed
    assert "Warning: 1 of the copies was in another folder" in printed
    assert "such as bee/2.png of ant/1.png" in printed
    assert "| left out: broken" in printed


def test_a_jpeg_that_pillow_shows_and_training_refuses_is_broken(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    whole = encoded(PIL.Image.fromarray(noise), "JPEG")
    middle = len(whole) // 2
    ended = whole[:middle] + b"\xff\xe0" + whole[middle + 2 :]
    with PIL.Image.open(io.BytesIO(ended)) as image:
        image.load()
    table = prepared(tmp_path, **{"a.jpg": whole, "b.jpg": ended})
    assert [table[name][0] for name in ("a.jpg", "b.jpg")] == ["kept", "broken"]


def test_names_stay_apart_and_fit_the_content(tmp_path):
    turned = IMAGE.rotate(180)
    files = {
        "a.png": (IMAGE, "PNG", "a.png"),
        "a.bmp": (IMAGE, "BMP", "a.bmp.png"),
        "b.bmp": (turned, "BMP", "b.png"),
        "b.gif": (IMAGE, "GIF", "b.gif.png"),
        "c": (IMAGE, "JPEG", "c.jpg"),
        "d.png": (turned, "JPEG", "d.jpg"),
    }
    table = prepared(tmp_path, **{name: encoded(photo, kind) for name, (photo, kind, _) in files.items()})
    assert {name: row[1] for name, row in table.items()} == {name: written for name, (*_, written) in files.items()}


def test_heic_is_converted_or_the_package_for_it_is_named(tmp_path, capsys):
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
    files = {"a.png": encoded(IMAGE, "PNG"), "b.heic": heic}
    try:
        pillow_heif = importlib.import_module("pillow_heif")
    except ImportError:
        assert prepared(tmp_path, **files)["b.heic"] == ["broken", "", "HEIC, which needs the package pillow-heif"]
        assert "pip install pillow-heif, remove" in capsys.readouterr().out
        return
    pillow_heif.register_heif_opener()
    files["b.heic"] = encoded(IMAGE, "HEIF")
    assert prepared(tmp_path, **files)["b.heic"] == ["converted", "b.jpg", "HEIC"]
    assert np.abs(pixels(tmp_path / "out" / "b.jpg") - COLORS.astype(int)).max() < 40


def test_a_folder_in_the_way_or_inside_the_other_is_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for output, words in (
        (tmp_path / "in", "OUT should be a new folder outside of .*in, but is .*in"),
        (tmp_path / "in" / "more" / "out", "OUT should be a new folder outside of .*in, but is .*out"),
        (tmp_path / "out", "in holds no image; give the folder with the images"),
    ):
        with pytest.raises(UserError, match=words):
            command.main([str(tmp_path / "in"), str(output)])
    (tmp_path / "in" / "a.jpg").write_text("no image")
    with pytest.raises(UserError, match="None of the images could be read"):
        command.main([str(tmp_path / "in"), str(tmp_path / "out")])
    assert "Broken: a.jpg (no image)." in capsys.readouterr().out
    with pytest.raises(UserError, match="There is no folder"):
        command.main([str(tmp_path / "inn"), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path):
    files = {"a.bmp": encoded(PIL.Image.new("1", (9460, 9460)), "BMP"), "b.png": encoded(IMAGE, "PNG")}
    words = f"it has 89,491,600 pixels, and at most {LARGEST_IMAGE:,} are read; make it smaller"
    assert prepared(tmp_path, **files)["a.bmp"] == ["broken", "", words]
