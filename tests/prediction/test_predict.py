"""Classifying image files: the table, the files of results, the page, and the mistakes."""

import collections
import contextlib
import csv
import dataclasses
import functools
import html
import json
import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, inspection
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.browser import open_browser
from tests.support import TINY, TINY_IMAGE, Terminal, answering, encoded, randomize, serving
from training import predict as command
from training.data.dataset import decoded as decode_image
from training.options.predict import PredictOptions
from training.prediction import classifier as prediction
from training.prediction.arguments import find_images, parse_with_run
from training.prediction.classifier import open_classifier
from training.prediction.server import open_server

pytestmark = pytest.mark.usefixtures("models_read_once")
NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


@pytest.fixture(name="place", scope="module")
def _place(tiny_model, tmp_path_factory):
    """A model, its class names, a folder of images with one inside another, and a broken one."""
    place = tmp_path_factory.mktemp("predict")
    tiny_model.save(place / "model.keras")
    (place / "names.txt").write_text("\n".join(NAMES) + "\n")
    (place / "pictures" / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "more/c.webp", "more/.hidden.png"):
        PIL.Image.fromarray(rng.integers(0, 256, (20, 31, 3), np.uint8)).save(place / "pictures" / name)
    (place / "pictures" / "notes.txt").write_text("no image")
    (place / "folder.csv").mkdir()
    (place / "broken.png").write_bytes((place / "pictures" / "a.png").read_bytes()[:60])
    return place


@pytest.fixture(name="arguments")
def _arguments(place, monkeypatch) -> list[str]:
    monkeypatch.chdir(place)
    return ["--run", "model.keras", "--labels", "names.txt"]


@functools.cache
def expected(place: pathlib.Path, photo: str) -> list[tuple[str, float]]:
    """The five most likely classes, by the model and its preprocessing alone."""
    model = load_model(place / "model.keras")
    with PIL.Image.open(place / "pictures" / photo) as image:
        pixels = np.asarray(image)
    logits = np.asarray(model(np.asarray(keras_vit.preprocessing_of(model)(pixels))[None]))[0]
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return [(NAMES[number], shares[number]) for number in np.argsort(-shares)[:5]]


def test_files_that_are_called_images_and_are_none_are_named(place, arguments, tmp_path, capsys):
    shutil.copy(place / "pictures" / "a.png", tmp_path / "a.png")
    for name in ("empty.jpg", "page.jpeg", "scan.TIF", "phone.heic", "notes.txt"):
        (tmp_path / name).write_bytes(b"<html>404" if name == "page.jpeg" else b"")
    (tmp_path / "more").symlink_to(place / "pictures" / "more")
    (tmp_path / "lost.jpg").symlink_to(tmp_path / "nowhere")
    command.main([*arguments, str(tmp_path)])
    printed = capsys.readouterr().out
    for name, reason in (
        ("empty.jpg", ""), ("page.jpeg", ""), ("scan.TIF", ""), ("phone.heic", ""),
        ("more", "a link to a folder, which is not followed; give that folder"),
        ("lost.jpg", "no file, or a link to none; repair or"),
    ):  # fmt: skip
        assert f"Not classified: {tmp_path / name}: {reason}" in printed
    assert f"Ignored: 1 file in {tmp_path} that is not an image (1 .txt)." in printed
    assert "notes.txt" not in printed


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((*NAMES[:-1], "ant"), "names.txt names the class 'ant' twice; give each class a name of its own"),
        (NAMES[:3], "names.txt names 3 classes, but the model model.keras has 7; give a line for each class"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(names, words, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    with pytest.raises(UserError, match=words):
        command.main(["--run", "model.keras", "--labels", str(tmp_path / "names.txt"), "pictures"])


def test_the_five_most_likely_classes_of_each_image_are_printed(place, arguments, capsys):
    command.main([*arguments, "pictures"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| a", "| b", "| more"))]
    assert [row.split()[1] for row in rows] == ["a.png", "b.jpg", "more/c.webp"]  # relative to the folder
    cells = [cell.strip() for cell in rows[0].split("|")[2:7]]
    assert [cell.split()[0] for cell in cells] == [name for name, _ in expected(place, "a.png")]
    assert cells[0].split()[1] == f"{expected(place, 'a.png')[0][1]:.1%}"


def test_a_terminal_gets_as_many_classes_as_it_has_room_for(arguments, monkeypatch):
    for columns, count in ((60, 3), (20, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.redirect_stdout(Terminal()) as stream:
            command.main([*arguments, "pictures/a.png"])
        header = next(line for line in stream.getvalue().splitlines() if line.startswith("| image"))
        assert header.count("|") == 2 + count
        assert count == 1 or len(header) <= columns


def test_many_images_get_the_classes_of_few_and_start_a_process_for_each_batch(place, arguments, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    for number in range(prediction.BATCH + 1):
        PIL.Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(tmp_path / f"{number}.png")
    for number in range(prediction.BATCH + 1, 5 * prediction.BATCH):
        (tmp_path / f"{number}.png").symlink_to(tmp_path / "0.png")
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: started.append(args) or popen(*args, **named))
    some = [f"{tmp_path / str(number)}.png" for number in range(prediction.BATCH + 1)]
    found = []
    for photos, batches in (([str(tmp_path)], 5), (some, 2)):  # as a graph, and without
        command.main([*arguments, *photos, "--output", str(tmp_path / "found.json")])
        found.append({row["picture"]: row for row in json.loads((tmp_path / "found.json").read_text())})
        assert len(started) == batches + 1  # and one while TensorFlow starts
        started.clear()
    for traced, direct in ((found[0][name], row) for name, row in found[1].items()):
        assert [each["class"] for each in traced["classes"]] == [each["class"] for each in direct["classes"]]
        shares = [[each["probability"] for each in one["classes"]] for one in (traced, direct)]
        np.testing.assert_allclose(*shares, atol=1e-5)


def test_the_pixels_of_a_jpeg_are_those_of_training():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    file = encoded(pixels, "JPEG", quality=20)
    found = inspection.decode(file, "noise.jpg").pixels
    np.testing.assert_array_equal(found, decode_image(tf.constant(file)))
    as_in_vit_jax = inspection.decode(file, "noise.jpg", preprocessing=keras_vit.Preprocessing(40)).pixels
    assert np.any(found != as_in_vit_jax)  # the fast transform


def test_more_than_five_classes_of_an_image_are_said_to_be_more(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    run = Run.at(tmp_path / "run")
    run.start({"recipe": {"loss": "multi-label"}}, NAMES)
    for count, more in ((6, " … |"), (5, "% |")):
        model.get_layer("head").set_weights([np.zeros((12, 7)), np.where(np.arange(7) < count, 2.0, -2.0)])
        run.save_model(model)
        command.main(["--run", str(run.path), "pictures/a.png"])
        [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| pictures/a.png")]
        assert row.endswith(more)
        assert row.count("88.1%") == 5


def test_a_broken_image_is_named_and_the_others_are_classified(place, arguments, capsys):
    command.main([*arguments, "broken.png", "pictures/*.png", "--output", "found.json"])
    assert "Not classified: broken.png: not a readable image: " in capsys.readouterr().out
    broken, good = json.loads((place / "found.json").read_text())
    assert broken["picture"] == "broken.png"
    assert "is not a readable image" in broken["problem"]
    wanted = expected(place, "a.png")
    assert [entry["class"] for entry in good["classes"]] == [name for name, _ in wanted]
    np.testing.assert_allclose([entry["probability"] for entry in good["classes"]], [s for _, s in wanted], atol=1e-5)


def test_images_of_which_none_can_be_read_are_an_error(place, arguments, capsys):
    with pytest.raises(UserError, match="None of the images could be read"):
        command.main([*arguments, "broken.png", "--output", "none.html"])
    assert "Not classified: broken.png" in capsys.readouterr().out
    assert not (place / "none.html").exists()


def test_a_run_or_a_model_file_among_the_images_is_what_classifies_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a run").mkdir()
    pathlib.Path("a run/model.keras").touch()
    for given, run in (
        (["model.keras", "a.png"], "model.keras"),
        (["--output", "found.csv", "model.keras", "a.png"], "model.keras"),
        (["a run", "a.png", "--threshold", "0.1"], "a run"),
        (["--model", "a run", "a.png"], "a run"),
        (["a.png", "--model=model.keras"], "model.keras"),
    ):
        options = parse_with_run(PredictOptions, given, prog="predict", about=None)
        assert (options.run, options.images) == (run, ("a.png",))


@pytest.mark.parametrize("form", ["csv", "json", "html"])
def test_results_in_every_form_name_files_that_are_not_utf_8_and_broken_ones(form, place, arguments, tmp_path, capsys):
    for name in (b"/good\xff.png", b"/good\xfe.png"):
        shutil.copy(place / "pictures" / "a.png", os.fsencode(tmp_path) + name)
    shutil.copy(place / "broken.png", os.fsencode(tmp_path) + b"/bad\xff<b>.png")
    command.main([*arguments, str(tmp_path), "--output", f"odd.{form}"])
    text = html.unescape((place / f"odd.{form}").read_text(encoding="utf-8"))
    text = text.replace("\\\\", "\\")  # of JSON
    assert "good\\xff.png" in text
    assert "good\\xfe.png" in text
    assert "bad\\xff<b>.png is not a readable image" in text
    assert "Not classified: " in capsys.readouterr().out.encode("utf-8").decode()  # a terminal can show it


def test_pixels_of_classified_images_are_not_kept(place):
    classifier = open_classifier(Run.open(place / "model.keras"))
    files = [place / "pictures" / name for name in ("a.png", "b.jpg")]
    batch = [(file, *prediction.try_to_read(file, classifier.run.preprocessing)) for file in files]
    cards = prediction.classified(classifier, batch, with_images=True)
    fields = [getattr(card, field.name) for card in cards for field in dataclasses.fields(card)]
    assert not any(isinstance(field, np.ndarray) for field in fields)


def test_class_names_are_those_of_the_config_beside_a_checkpoint(place, tmp_path):
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    keras_vit.save_checkpoint(model, tmp_path / "named", layout="huggingface", labels=NAMES)
    assert open_classifier(Run.open(tmp_path / "named")).labels == NAMES
    keras_vit.save_checkpoint(model, tmp_path / "numbers", layout="huggingface")
    assert open_classifier(Run.open(tmp_path / "numbers")).labels == ()
    with pytest.raises(UserError, match="labels names 2 classes, but the model .* has 7"):
        keras_vit.save_checkpoint(model, tmp_path / "few", layout="huggingface", labels=("ant", "bee"))


def test_a_checkpoint_at_an_address_is_downloaded_and_classifies(place, arguments, tmp_path, monkeypatch, capsys):
    keras_vit.save_checkpoint(load_model("model.keras"), tmp_path / "x.npz", layout="npz")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    command.main([*arguments, "pictures/a.png"])
    table = capsys.readouterr().out
    with serving(tmp_path) as address:
        options = ["--num-heads", "3", "--image-size", "12", "30", "--labels", "names.txt"]
        command.main(["--run", f"{address}/x.npz", "pictures/a.png", *options])
    assert capsys.readouterr().out.partition("Next:")[0] == table.partition("Next:")[0]


@pytest.mark.parametrize(
    ("config", "num_classes"), [(dataclasses.replace(TINY, pre_norm=True, head_bias=False), 7), (TINY, None)]
)
def test_neither_the_projection_of_clip_nor_a_model_without_a_head_is_a_classifier(config, num_classes, tmp_path):
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=num_classes)
    model.save(tmp_path / "model.keras")
    for call in (lambda: open_classifier(Run.open(tmp_path / "model.keras")), lambda: keras_vit.predict(model, [])):
        with pytest.raises(UserError, match="has no head: it ends with features of shape"):
            call()


def test_results_are_written_as_csv_and_for_excel_where_it_is_asked_for(place, arguments):
    command.main([*arguments, "pictures/a.png", "--output", "found.csv"])
    with (place / "found.csv").open(newline="") as stream:
        [row] = csv.DictReader(stream)
    assert row.pop("picture") == "pictures/a.png"
    assert (row.pop("rejected"), row.pop("problem")) == ("False", "")
    names = [row[name] for name in ("class", "class_2", "class_3", "class_4", "class_5")]
    assert names == [name for name, _ in expected(place, "a.png")]
    shares = [float(row[f"probability{suffix}"]) for suffix in ("", "_2", "_3", "_4", "_5")]
    np.testing.assert_allclose(shares, [share for _, share in expected(place, "a.png")], atol=1e-5)
    assert len(row) == 10
    for options, starts in (([], "picture"), (["--excel"], "\ufeffpicture")):  # a byte order mark for Excel
        command.main([*arguments, "pictures", "broken.png", "--output", "found.csv", *options])
        lines = (place / "found.csv").read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith(starts)
        assert len(lines) == 5  # a row for each image, the broken one too
        assert lines[4].startswith("broken.png,,")
    with pytest.raises(UserError, match="--excel applies only to --output FILE.csv"):
        command.main([*arguments, "pictures", "--output", "found.json", "--excel"])


def test_a_calibrated_run_has_calibrated_probabilities(place, tmp_path):
    shutil.copy(place / "model.keras", tmp_path)
    shutil.copy(place / "names.txt", tmp_path / "labels.txt")
    image = inspection.read_images(place / "pictures" / "a.png", 1)
    cold = open_classifier(Run.open(tmp_path / "model.keras"))
    [before] = cold.classify(image)
    (tmp_path / "temperature.json").write_text(json.dumps({"temperature": 2.0}))
    [after] = open_classifier(Run.open(tmp_path / "model.keras")).classify(image)
    assert [name for name, _ in after.ranked.likeliest] == [name for name, _ in before.ranked.likeliest]
    logits = np.asarray(cold.run.model(np.asarray(cold.run.preprocessing(image[0].pixels))[None]))[0]
    shares = np.exp(logits / 2.0) / np.exp(logits / 2.0).sum()
    np.testing.assert_allclose([share for _, share in after.ranked.likeliest], np.sort(shares)[::-1][:5], rtol=1e-5)


def test_what_a_partly_copied_run_does_not_say_is_said(place, tmp_path, capsys):
    shutil.copy(place / "model.keras", tmp_path)
    open_classifier(Run.open(tmp_path / "model.keras"))
    assert capsys.readouterr().out == ""  # a file alone is no run
    open_classifier(Run.open(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path} has no labels.txt, so classes are shown by their numbers; copy it from the run, or give --labels.",
        f"{tmp_path} has no config.json, so each image is taken to have one class; copy it from the run, if it is "
        "there.",
    ]
    shutil.copy(place / "names.txt", tmp_path / "labels.txt")
    (tmp_path / "config.json").write_text("{}")
    open_classifier(Run.open(tmp_path))
    assert capsys.readouterr().out == ""


def test_an_image_below_the_threshold_is_rejected_in_every_form(place, arguments, capsys):
    best = {name: expected(place, name)[0][1] for name in ("a.png", "b.jpg")}
    low, high = sorted(best, key=best.__getitem__)
    threshold = str((best[low] + best[high]) / 2.0)
    for form in ("csv", "json", "html"):
        command.main(
            [*arguments, "pictures/a.png", "pictures/b.jpg", "--threshold", threshold, "--output", f"x.{form}"]
        )
    rejected = {row["picture"]: row["rejected"] for row in json.loads((place / "x.json").read_text())}
    assert rejected == {f"pictures/{low}": True, f"pictures/{high}": False}
    with (place / "x.csv").open(newline="") as stream:
        assert {row["picture"] for row in csv.DictReader(stream) if row["rejected"] == "True"} == {f"pictures/{low}"}
    assert (place / "x.html").read_text().count("<b>Rejected</b>: no class reaches") == 1
    assert f"pictures/{low} (rejected)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("explain", "title"), [("rollout", "attention rollout"), ("relevance", "relevance"), (None, "image")]
)
def test_a_page_shows_each_image_with_its_classes_and_map(place, arguments, explain, title):
    options = ["--explain", explain] if explain else []
    command.main([*arguments, "pictures", "--output", "found.html", *options])
    page = (place / "found.html").read_text()
    assert page.count("<article ") == 3
    assert page.count("<meter") == 15
    assert str(place) not in page
    assert page.count("<figcaption>") == 3 + 3 * bool(explain)
    assert page.count(f"<figcaption>{title}") == 3
    assert page.count('class="map"') == 3 * bool(explain)
    counts = collections.Counter(expected(place, name)[0][0] for name in ("a.png", "b.jpg", "more/c.webp"))
    assert f"<p>{len(counts)} class" in page
    assert all(f'<th scope="row">{name}</th><td>{count}</td>' in page for name, count in counts.items())


def test_a_map_lies_on_the_part_of_the_image_that_the_model_sees(place, tmp_path):
    cropping = keras_vit.Preprocessing((24, 24), resize="resize-small", crop_from=32)
    for name, preprocessing, left, top, width, height, frame in (
        ("cropped", cropping, 31.25, 12.5, 37.5, 75.0, True),
        ("padded", keras_vit.Preprocessing((12, 30), resize="pad"), 0.0, -100 / 9, 100.0, 400 / 3, False),
    ):
        config = dataclasses.replace(TINY, patch_size=6)
        model = randomize(keras_vit.build(config, preprocessing=preprocessing, num_classes=7))
        model.save(tmp_path / f"{name}.keras")
        classifier = open_classifier(Run.open(tmp_path / f"{name}.keras"), explain="rollout")
        sides = (64, 128) if name == "cropped" else (64, 213)
        photo = encoded(np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8))
        page = classifier.answer(photo, "x.png")
        numbers = re.search(r'style="left: ([-\d.]+)%; top: ([-\d.]+)%; width: ([\d.]+)%; height: ([\d.]+)%"', page)
        np.testing.assert_allclose(list(map(float, numbers.groups())), [left, top, width, height], atol=1.5)
        assert ("map cropped" in page) == frame


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Either name images or a folder"),
        (["pictures", "--serve"], "or use --serve, whose page takes"),
        (["nowhere"], "There is no image 'nowhere'"),
        (["pictures", "--output", "found.txt"], r"ends in .csv, .json, .html or .parquet, but is 'found.txt'"),
        (["pictures", "--output", "gone/found.csv"], "--output .*'gone/found.csv'"),
        (["pictures", "--output", "folder.csv"], "--output .*'folder.csv'"),
        (["pictures", "--threshold", "60"], "--threshold must be in \\[0, 1\\], but is 60"),
        (["pictures", "--explain", "rollout"], "--explain applies only to --output FILE.html"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(place, arguments, options, words):
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=words):
        command.main([*arguments, *options])
    assert sorted(place.rglob("*")) == before


def test_an_image_is_taken_once_and_a_folder_without_one_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    names = [str(file) for file in find_images(["pictures/a.png", "pictures"])]
    assert names == ["pictures/a.png", "pictures/b.jpg", "pictures/more/c.webp"]
    with pytest.raises(UserError, match=f"The folder '{tmp_path}' has no image of a supported format .JPEG, PNG"):
        find_images([str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_an_image_dropped_on_the_page_shows_its_classes_bars_and_map(place, width, tmp_path):
    classifier = open_classifier(Run.open(place / "model.keras"), str(place / "names.txt"), explain="rollout")
    with answering(open_server(classifier, 0)) as address, open_browser() as page:
        page.open(address, width)
        page.drop("#drop", place / "pictures" / "a.png")
        frame = "document.getElementById('result')"
        page.wait_for(f"!{frame}.hidden && {frame}.contentDocument.querySelector('meter') && {frame}.style.height")
        bars = page.evaluate(
            f"[...{frame}.contentDocument.querySelectorAll('meter')].map(bar => [bar.ariaLabel, bar.value])"
        )
        wanted = expected(place, "a.png")
        assert [name for name, _ in bars] == [name for name, _ in wanted]
        np.testing.assert_allclose([share for _, share in bars], [share for _, share in wanted], atol=1e-5)
        alts = page.evaluate(f"[...{frame}.contentDocument.images].map(image => [image.alt, image.naturalWidth > 0])")
        assert alts == [["a.png", True], ["", True], ["attention rollout", True]]
        # One scroll bar, and nothing beside the window.
        assert page.evaluate(f"{frame}.contentDocument.documentElement.scrollHeight <= {frame}.clientHeight")
        assert page.overflow() <= 0
        assert not page.problems
        page.choose("input", place / "broken.png")
        page.wait_for("document.getElementById('status').textContent.includes('broken.png is not a readable')")
        assert page.evaluate(f"{frame}.hidden")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_ordered_and_filtered_and_fits_the_window(place, arguments, width):
    command.main([*arguments, "pictures", "broken.png", "--output", "found.html", "--explain", "relevance"])
    sure = {name: expected(place, name)[0] for name in ("a.png", "b.jpg", "more/c.webp")}
    with open_browser() as page:
        page.open((place / "found.html").as_uri(), width)
        assert page.overflow() <= 0
        shown = "[...document.querySelectorAll('#images article:not([hidden]) h2')].map(name => name.textContent)"

        def choose(list_name: str, value: str) -> list[str]:
            page.evaluate(
                f"(list => {{ list.value = {json.dumps(value)}; list.dispatchEvent(new Event('change')); }})"
                f"(document.getElementById('{list_name}'))"
            )
            return [name.removeprefix("pictures/") for name in page.evaluate(shown)]

        assert choose("order", "sure") == sorted(sure, key=lambda name: -sure[name][1])
        assert choose("order", "unsure") == sorted(sure, key=lambda name: sure[name][1])
        assert choose("order", "name") == sorted(sure)
        first = sure["a.png"][0]
        assert choose("class", first) == [name for name in sorted(sure) if sure[name][0] == first]
        assert not page.problems


def test_rollout_of_a_resnet_is_refused_with_the_map_that_it_has(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = keras_vit.ResNetConfig((1, 1), 4, (8, 16), preactivation=True, num_groups=2)
    keras_vit.build(config, image_size=16, num_classes=3).save("resnet.keras")
    arguments = ["--run", "resnet.keras", str(place / "pictures" / "a.png"), "--output", "x.html", "--explain"]
    with pytest.raises(UserError) as refused:
        command.main([*arguments, "rollout"])
    expected = "resnet.keras has no attention to show by --explain rollout; give --explain relevance."
    assert str(refused.value) == expected


def test_a_page_of_several_batches_has_the_maps_of_all(place, arguments, tmp_path):
    count = prediction.BATCH + 2
    for number in range(count):
        shutil.copy(place / "pictures" / "a.png", tmp_path / f"{number}.png")
    command.main([*arguments, str(tmp_path), "--output", "several.html", "--explain", "rollout"])
    page = (place / "several.html").read_text()
    assert all(f">{number}.png<" in page for number in range(count))
    assert page.count("data:image/png") == count


def test_the_page_runs_the_model_as_a_graph(place, arguments, monkeypatch):
    opened = []

    def open_idle(classifier, _):
        opened.append(classifier)
        server = open_server(classifier, 0)
        server.run = server.close
        return server

    monkeypatch.setattr("training.prediction.server.open_server", open_idle)
    command.main([*arguments, "--serve"])
    assert expected(place, "a.png")[0][0] in opened[0].answer((place / "pictures" / "a.png").read_bytes(), "a.png")
    assert opened[0]._network.predict_function is not None


def test_a_pattern_in_a_folder_with_brackets_in_its_name_matches(place, tmp_path):
    folder = tmp_path / "new [1]" / "a"
    folder.mkdir(parents=True)
    shutil.copy(place / "pictures" / "a.png", folder)
    for pattern in ("new [1]/a/*.png", "new [1]/**/*.png", "new*/a/[ab].png"):
        assert find_images([str(tmp_path / pattern)]) == [folder / "a.png"]
