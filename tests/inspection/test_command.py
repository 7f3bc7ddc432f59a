"""`keras-vit inspect`: untrusted images, the HTML report, user errors, and inspection during training."""

import base64
import dataclasses
import functools
import html.parser
import io
import json
import pathlib
import re
import shutil
from collections.abc import Callable

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
import training.samples
from keras_vit import UserError, inspection
from keras_vit.images.files import Samples
from keras_vit.inspection import __main__ as command
from keras_vit.inspection import report
from keras_vit.inspection.plots import explanation
from keras_vit.inspection.report import html_report
from keras_vit.run import Run
from tests.images.test_opener import claiming
from tests.support import FIXTURES, TINY, TINY_IMAGE, encoded, others_slow, randomize
from training.loop.callbacks import InspectEpochs

RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (9, 14, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (9, 14), dtype=np.uint8)
FILES = {
    "color.png": encoded(COLOR), "alpha.png": encoded(np.dstack([COLOR, GRAY])), "gray.png": encoded(GRAY),
    "gray.bmp": encoded(GRAY, "BMP"), "deep.png": encoded(GRAY.astype(np.uint16) * 257),
    "photo.jpg": encoded(COLOR, "JPEG", quality=90),
}  # fmt: skip


def test_a_file_that_claims_too_many_pixels_is_one_sentence():
    with pytest.raises(UserError, match=r"^bad.png is not a readable image: it has 3,600,000,000 pixels, [^\n]*$"):
        inspection.decode(claiming(60_000, 60_000), "bad.png")


def test_a_broken_image_of_a_folder_is_named_and_the_others_are_inspected(tmp_path, capsys):
    (tmp_path / "ant").mkdir()
    for name in ("a.png", "c.png"):
        (tmp_path / "ant" / name).write_bytes(FILES["color.png"])
    (tmp_path / "ant" / "b.png").write_bytes(FILES["color.png"][:100])
    assert [image.name for image in inspection.read_images(tmp_path, 9)] == ["ant/a.png", "ant/c.png"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Not inspected: ant/b.png is not a readable image: ")
    with pytest.raises(UserError, match="^b.png is not a readable image"):
        inspection.read_images(tmp_path / "ant" / "b.png", 1)


def test_a_dark_image_and_one_of_one_color_on_white_are_named_in_a_warning(tmp_path, capfd):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "turned.jpg").write_bytes(encoded(COLOR, "JPEG", exif=exif))
    (tmp_path / "dark.png").write_bytes(encoded((np.arange(70) * 14).astype(np.uint16).reshape(7, 10)))
    (tmp_path / "clear.png").write_bytes(encoded(np.dstack([COLOR, 0 * GRAY])))
    (tmp_path / "red.png").write_bytes(encoded(0 * COLOR + np.uint8(255)))
    (tmp_path / "seen.png").write_bytes(FILES["alpha.png"])
    images = {image.name: image for image in inspection.read_images(tmp_path, 9)}
    assert images["turned.jpg"].pixels.shape == COLOR.transpose(1, 0, 2).shape
    printed = capfd.readouterr().out
    assert "dark.png has 16 bits and is nearly black, since its highest value is 966" in printed
    assert "clear.png has a single color; transparent images are put on white" in printed
    assert "red.png has a single color.\n" in printed
    assert not any(name in printed for name in ("turned", "seen"))


@pytest.mark.slow
def test_a_data_set_is_read_through_the_training_sides_command(tmp_path):
    images = inspection.read_images("digits", 3)
    assert [photo.pixels.shape for photo in images] == [(8, 8, 1)] * 3
    assert all(photo.label in "0123456789" for photo in images)
    training.samples.main(["--data", "digits", "--count", "3", "--output", str(tmp_path)])
    again = inspection.read_images(tmp_path / "samples.npz", 2, tuple("0123456789"))
    for one, other in zip(images, again, strict=False):
        assert np.array_equal(one.pixels, other.pixels)
        assert one.label == other.label


class Reader(html.parser.HTMLParser):
    """Collects what a page refers to, and sees that every element is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("img", "input", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(name="inspected", scope="module")
def _inspected(tiny_model) -> Callable[..., inspection.InspectionResult]:
    """Inspect the tiny model, once for the same figures."""
    images = [inspection.Image("<script>$x$ é 漢.png", COLOR, "<b>"), inspection.Image("b.png", COLOR)]
    labels = ["<img src=x>", *"abcdef"]

    @functools.cache
    def inspected(*figures: str) -> inspection.InspectionResult:
        return inspection.inspect(tiny_model, images, checkpoint="<title>$c$", labels=labels, figures=figures or None)

    return inspected


def test_html_report_is_complete_and_needs_no_network(inspected):
    result = inspected()
    text = html_report(result)
    reader = Reader(text)
    assert reader.open == []
    assert all(address.startswith("data:") for address in reader.addresses)
    assert not re.search(r"https?://|url\(|@import|<img src=x>|<b></small>", text)
    for word in ("<script>$x$ é 漢.png", "label: <b>", "<title>$c$", "<img src=x>", "head 2", "mistake"):
        assert word in reader.text
    for predictions in result.predictions:
        for label, probability in predictions.likeliest:
            assert label in reader.text
            assert probability < 0.001 or f"{probability:.1%}" in reader.text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    sheet = np.asarray(PIL.Image.open(io.BytesIO(_bytes(data["sheets"][0]))))
    assert sheet.shape[:2] == (2 * 3, (3 + 2) * 5)  # layers of 3 rows; heads, rollout and norms of 5 columns


def test_each_figure_says_what_it_shows_and_when_it_means_nothing(inspected):
    result = inspected()
    page = Reader(html_report(result)).text
    for figure in ("components", "positions", "distance", "renormalized", "rollout", "relevance", "norms", "attention"):
        assert explanation(figure, result) in page
    few = "This model has only 3 x 5 patches: too few values to mean much."
    assert explanation("rollout", result).endswith(few)
    assert few not in explanation("components", result)
    assert few not in explanation("rollout", dataclasses.replace(result, grid=(4, 5)))


def _bytes(address: str) -> bytes:
    return base64.b64decode(address.removeprefix("data:image/png;base64,"))


def test_every_figure_is_written_with_any_file_names(inspected, tmp_path):
    names = inspection.write(inspected(), tmp_path / "out")
    figures = {"figure_06_attention", "figure_07_inside", "figure_10_positions", "figure_11_distances"}
    figures |= {"filters", "maps", "heads_0", "heads_1"}
    assert set(names) == {"arrays.npz", "index.html", "measures.json", *(f"{figure}.png" for figure in figures)}
    for figure in figures:
        height, width, _ = tf.io.decode_image((tmp_path / "out" / f"{figure}.png").read_bytes()).shape
        assert height > 100
        assert width > 300
    assert np.load(tmp_path / "out" / "arrays.npz")["attention_distance"].shape == (2, 3)


def test_figures_that_an_earlier_report_left_are_removed_and_nothing_else(inspected, tmp_path):
    output = tmp_path / "out"
    inspection.write(inspected("filters"), output)
    mine = [tmp_path / "outside.png", output / "inner" / "file.png", output / "folder.png" / "x", output / "thesis.tex"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (output / "gone.png").write_bytes(b"of a model with more images")
    measures = json.loads((output / "measures.json").read_text())
    measures["files"] += ["gone.png", "thesis.tex", "..", ".", "", "../outside.png", str(mine[0]), "inner/file.png"]
    measures["files"] += ["inner", "folder.png", "a\0.png", "\ud800.png", "n" * 5000, 7, None, ["gone.png"]]
    (output / "measures.json").write_text(json.dumps(measures))
    names = inspection.write(inspected("filters"), output)
    assert {path.name for path in output.iterdir()} == {*names, "inner", "folder.png", "thesis.tex"}
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize("text", ["", '{"files": "heads_9.png"}', "[" * 100_000, "\xff"])
def test_measures_that_are_none_of_ours_stop_no_report(text, inspected, tmp_path):
    (tmp_path / "measures.json").write_text(text)
    (tmp_path / "heads_9.png").write_text("mine")
    assert "index.html" in inspection.write(inspected("filters"), tmp_path)
    assert (tmp_path / "heads_9.png").is_file()


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory) -> pathlib.Path:
    """A finished run directory of a tiny gray model."""
    run = tmp_path_factory.mktemp("run")
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, channels=1, num_classes=3)
    randomize(model).save(run / "model.keras")
    (run / "labels.txt").write_text("ant\nbee\ncat\n")
    Samples((FILES["gray.png"],) * 5, np.array([0, 1, 2, 0, 1])).save(run / "samples.npz")
    return run


def test_run_is_inspected_with_its_samples(run, tmp_path, capsys):
    output = tmp_path / "deep" / "inside"
    command.main(["--run", str(run), "--output", str(output), "--show", "2", "--figures", "rollout", "relevance"])
    assert {path.name for path in output.iterdir()} == {
        "arrays.npz", "figure_06_attention.png", "index.html", "maps.png", "measures.json",
    }  # fmt: skip
    measured = json.loads((output / "measures.json").read_text())
    assert measured["rollout"]["images"] == 5
    assert "label: bee" in (output / "index.html").read_text()
    printed = capsys.readouterr().out
    assert "Attention rollout over 5 images" in printed
    assert f"5 files in {output}; open {output / 'index.html'}.\nNext:\n" in printed


@pytest.fixture(name="results")
def _results(monkeypatch) -> list:
    """What the command would write."""
    results: list = []
    monkeypatch.setattr(report, "write", lambda result, output: results.append(result) or [])
    return results


@pytest.mark.parametrize("option", others_slow(["--run", "--checkpoint"], "--checkpoint"))
def test_a_calibrated_run_has_calibrated_probabilities(option, run, results, tmp_path):
    calibrated = tmp_path / "calibrated"
    shutil.copytree(run, calibrated)
    (calibrated / "temperature.json").write_text('{"temperature": 4.0}')
    labels = [] if option == "--run" else ["--labels", str(run / "labels.txt")]
    for place in (run, calibrated):
        images = [] if option == "--run" else ["--images", str(run / "samples.npz")]
        command.main(["--output", str(tmp_path / "out"), option, str(place), "--figures", "rollout", *labels, *images])
    shares = [dict(result.predictions[0].likeliest) for result in results]
    before, after = (np.array([found[name] for name in sorted(found)]) for found in shares)
    np.testing.assert_allclose(np.diff(np.log(after)), np.diff(np.log(before)) / 4.0, rtol=1e-4)


def test_mistakes_come_first_and_images_have_the_names_of_their_files(results, tmp_path):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, channels=1, num_classes=3))
    model.save(tmp_path / "model.keras")
    (tmp_path / "labels.txt").write_text("ant\nbee\ncat\n")
    rng = np.random.default_rng(0)
    images = tuple(encoded(rng.integers(0, 256, (12, 30), np.uint8)) for _ in range(6))
    pixels = [np.asarray(PIL.Image.open(io.BytesIO(image)))[..., None] for image in images]
    found = np.asarray(model(np.stack([keras_vit.preprocessing_of(model)(image) for image in pixels]))).argmax(-1)
    labels = np.where(np.arange(6) < 3, found, (found + 1) % 3)  # the last three are wrong
    names = tuple(f"ant/{n} é.png" for n in range(6))
    Samples(images, labels, names).save(tmp_path / "samples.npz")
    command.main(["--run", str(tmp_path), "--output", str(tmp_path / "out"), "--show", "4", "--figures", "rollout"])
    seen = results[0].images
    assert {image.name for image in seen[:2]} < set(names[3:])
    assert [image.name for image in seen[2:]] == list(names[:2])


def test_a_mistake_is_one_sentence_and_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    good = ["--run", str(run), "--output", "out"]
    vit = ["--checkpoint", str(FIXTURES / "vit_token.npz"), "--output", "out"]
    bit = ["--checkpoint", str(FIXTURES / "hf_bit"), "--output", "out", "--images", str(run / "samples.npz")]
    mistakes = {
        "There is no file, folder or official checkpoint 'nowhere'": ["--run", "nowhere", "--output", "out"],
        "vit_token.npz has no images of its own; give --images": vit,
        "There is no image or folder 'cat.png'; --images accepts": [*vit, "--images", "cat.png"],
        "file is not a readable image: ": [*vit, "--images", "file"],
        "No image of the folder 'empty' can be read: it has none": [*vit, "--images", "empty"],
        "of this model must be one of filters, relevance, but is 'attention'": [*bit, "--figures", "attention"],
        r"layers must be numbers from -2 to 1, but are \[0, 7\]": [*good, "--layers", "0", "7"],
        r"heads must be numbers from -3 to 2, but are \[3\]": [*good, "--heads", "3"],
        "--count must be at least 1, but is 0": [*good, "--count", "0"],
        "--num-heads has no effect on a run": [*good, "--num-heads", "3"],
        "file is a file; --output accepts a directory": ["--run", str(run), "--output", "file/out"],
    }
    for words, arguments in mistakes.items():
        with pytest.raises(UserError, match=words) as caught:
            command.main(arguments)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def shown_in_tensorboard(run: pathlib.Path) -> set[tuple[int, str]]:
    """Step and tag of every image."""
    return {
        (event.step, value.tag)
        for file in (run / "tensorboard" / "inspection").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }


@pytest.mark.slow
def test_inspection_during_training_writes_figures_and_changes_no_weight(run, tmp_path):
    for name in ("labels.txt", "samples.npz"):
        shutil.copy(run / name, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    images = np.random.default_rng(1).uniform(-1, 1, (8, *TINY_IMAGE, 1)).astype(np.float32)
    trained = []
    for enabled in (False, True):
        keras.utils.set_random_seed(5)
        model = keras_vit.build(TINY, image_size=TINY_IMAGE, channels=1, num_classes=3)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callbacks = [InspectEpochs(lambda model=model: model, Run.at(tmp_path), every=2, shown=1)] if enabled else []
        model.fit(images, np.arange(8) % 3, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        trained.append(model.get_weights())
    assert all(np.array_equal(one, other) for one, other in zip(*trained, strict=True))
    assert [path.name for path in (tmp_path / "inspection").iterdir()] == ["epoch_0002"]
    written = {path.name for path in (tmp_path / "inspection" / "epoch_0002").iterdir()}
    assert {"figure_07_inside.png", "index.html"} <= written
    images_of_epoch = {(2, name.removesuffix(".png")) for name in written if name.endswith(".png")}
    assert shown_in_tensorboard(tmp_path) == images_of_epoch

    shutil.rmtree(tmp_path / "tensorboard")
    InspectEpochs(lambda: model, Run.at(tmp_path), every=2)
    assert shown_in_tensorboard(tmp_path) == images_of_epoch
