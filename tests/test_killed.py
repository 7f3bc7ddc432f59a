"""Commands that are killed again and again: the next run ends as an undisturbed one and leaves nothing half-written."""

import os
import pathlib
import random
import re
import subprocess
import sys
import time

import numpy as np
import PIL.Image
import pytest

import keras_vit
from tests.detection.test_fit import make_shapes
from tests.segmentation import shapes
from tests.support import randomize

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = keras_vit.ViTConfig(patch_size=8, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=32)
KILLS = 10
STEPS = ["--batch-size", "4", "--steps", "6", "--warmup-steps", "1", "--checkpoint-every", "2", "--deterministic"]
SIZE = ["--image-size", "48", "48"]
EXPORTED = ["--checkpoint", "model.keras", "--labels", "names.txt", "--images", "pictures"]
# OUT is the output of each; files of these endings are equal byte for byte.
COMMANDS = {
    "prepare": ["pictures", "OUT"],
    "embed": ["--run", "model.keras", "--data", "folder:pictures", "--output", "OUT"],
    "review": ["--index", "index", "--output", "OUT"],
    "segment fit": ["--checkpoint", "model.keras", "--data", "folder:masks", *SIZE, *STEPS, "--head", "linear"],
    "detect fit": ["--checkpoint", "model.keras", "--data", "csv:boxes/boxes.csv", "--image-size", "48", *STEPS],
    "saved-model": [*EXPORTED, "--output", "OUT"],
    "tflite": [*EXPORTED, "--formats", "float32", "--output", "OUT"],
}
EQUAL = (".parquet", ".png", ".jpg", ".tflite", "decisions.csv", "prepared.csv", "labels.txt",
         "segmentation.json", "detection.json")  # fmt: skip


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("killed")
    randomize(keras_vit.build(CONFIG, image_size=48, num_classes=2)).save(place / "model.keras")
    (place / "names.txt").write_text("ant\nbee\n")
    rng = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (place / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            image = PIL.Image.fromarray(rng.integers(0, 256, (60, 50, 3), np.uint8))
            image.save(place / "pictures" / name / f"{number}.{'bmp' if number % 2 else 'png'}")
    make_shapes(place / "boxes", 20)
    shapes.write_folder(place / "masks", 14)
    arguments = ["--run", "model.keras", "--data", "folder:pictures", "--output", "index"]
    assert started(place, "embed", arguments).wait() == 0
    return place


def started(place: pathlib.Path, command: str, arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    whole = [sys.executable, "-m", "keras_vit", *command.split(), *arguments]
    with (place / "log").open("ab") as log:
        return subprocess.Popen(whole, env=environment, cwd=place, stdout=log, stderr=log)


def ended(place: pathlib.Path, command: str, arguments: list[str]) -> None:
    assert started(place, command, arguments).wait() == 0, (place / "log").read_text(errors="replace")[-3000:]


def content(folder: pathlib.Path) -> dict[str, bytes]:
    """The files by name, with the content of those that are equal each time; TensorBoard's have the time in theirs, and
    report.png the name of the output.
    """
    files = (path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    return {
        re.sub(r"(step-\d+)-\w+", r"\1", str(path.relative_to(folder))): (  # a checksum with the id of the run
            path.read_bytes() if path.name.endswith(EQUAL) and path.name != "report.png" else b""
        )
        for path in files
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_ends_as_an_undisturbed_one(place, command):
    def arguments(output: str) -> list[str]:
        words = [output if word == "OUT" else word for word in COMMANDS[command]]
        return words if output in words else [*words, "--workdir", output]

    name, rng = command.replace(" ", "-"), random.Random(0)
    whole, parts = f"{name}-whole", f"{name}-parts"
    begin = time.monotonic()
    ended(place, command, arguments(whole))
    seconds = time.monotonic() - begin
    for _ in range(KILLS):
        process = started(place, command, arguments(parts))
        time.sleep(rng.uniform(0.3, 0.95) * seconds)
        if process.poll() is not None:
            break  # it went on where an earlier one had been killed, and is finished
        process.kill()
        process.wait()
    if not (command == "prepare" and (place / parts).exists()):  # which refuses to write a second time
        ended(place, command, arguments(parts))
    found, expected = content(place / parts), content(place / whole)
    if command == "saved-model":  # a version for each run that was killed after its export
        first = {file: data for file, data in expected.items() if file.startswith("1/")}
        for version in {pathlib.Path(file).parts[0] for file in found}:
            inside = {file: data for file, data in found.items() if file.startswith(f"{version}/")}
            assert {file.removeprefix(version): data for file, data in inside.items()} == {
                file.removeprefix("1"): data for file, data in first.items()
            }
    else:
        assert found == expected
    left = [path for path in place.rglob("*") if ".building" in path.name or ".tmp" in path.name]
    assert left == []
