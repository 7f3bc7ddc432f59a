"""SavedModel and TFLite exports: equality with the model after loading, and errors if they differ."""

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import keras_vit
from export import parity
from export.saved_model import __main__ as saved_model
from export.saved_model import export as saved_model_export
from export.saved_model import model_card, signatures
from export.source import Provenance
from export.tflite import __main__ as tflite
from export.tflite import export as tflite_export
from export.tflite import tflite_file
from export.tflite.convert import to_tflite
from keras_vit import Preprocessing, UserError
from keras_vit.errors import ParityError
from keras_vit.files.labels import labels_text
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import output_folder
from keras_vit.images.files import Samples
from tests.exports import CONFIG, LABELS, SIZE, saved_model_of, tflite_of
from tests.support import randomize

NO_SAMPLES = "samples.npz has no sample images; train again"
REPORT = ("report.json", "report.md", "report.png")
CONFIGS = {
    "token": CONFIG,
    "gap": dataclasses.replace(CONFIG, classifier="gap", gelu="erf"),
    "map": dataclasses.replace(CONFIG, classifier="map", representation_size=9, dropout_rate=0.1),
}


@functools.cache
def build(name: str = "token", channels: int = 3) -> keras.Model:
    """A model, of which tests only read."""
    return randomize(keras_vit.build(CONFIGS[name], preprocessing=Preprocessing(SIZE, channels), num_classes=7))


@pytest.fixture(name="samples", scope="module")
def _samples() -> Samples:
    """Images in all four formats, of mixed sizes and channels."""
    rng = np.random.default_rng(4)
    encoded = []
    for number in range(9):
        shape = (10 + number, 25, (3, 1, 3, 4)[number % 4])
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        encoded.append((tf.io.encode_jpeg if number % 4 == 2 else tf.io.encode_png)(image).numpy())
    return Samples(tuple(encoded), np.arange(9) % 7)


@pytest.mark.slow  # `exported` compares one model in the same way
@pytest.mark.parametrize(("name", "channels"), [("gap", 1), ("map", 3)])
def test_a_saved_model_is_the_model(name, channels, samples, tmp_path):
    path, difference = saved_model_of(build(name, channels), LABELS, samples, tmp_path / "served")
    assert path == tmp_path / "served" / "1"
    assert difference["max_abs_diff"] <= 1e-4
    assert difference["num_images"] == 9
    assert (path / "assets" / "labels.txt").read_text(encoding="utf-8").split() == list(LABELS)
    assert [entry.name for entry in (tmp_path / "served").iterdir()] == ["1"]


@functools.cache
def converted(*, all_tokens: bool) -> bytes:
    """The model of `build()` in TFLite."""
    return to_tflite(build(), all_tokens=all_tokens)


@pytest.fixture(name="converted_once")
def _converted_once(monkeypatch):
    """For tests of what follows the conversion, which takes a second."""
    monkeypatch.setattr(tflite_export, "to_tflite", lambda *_, all_tokens, **__: converted(all_tokens=all_tokens))


@pytest.mark.usefixtures("converted_once")
def test_a_tflite_file_that_differs_is_not_kept(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "FLOAT_TOLERANCE", -1.0)
    with pytest.raises(ParityError, match="logits of the float32 TFLite file differ"):
        tflite_of(build(), LABELS, samples, tmp_path / "phone", ["float32"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_saved_model_with_other_logits_or_other_pixels_is_not_kept(samples, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(parity, "FLOAT_TOLERANCE", -1.0)
        with pytest.raises(ParityError, match="logits of the SavedModel differ from the model's by up to"):
            saved_model_of(build(), LABELS, samples, tmp_path / "served")
    decode_batch = signatures.decode_batch
    monkeypatch.setattr(signatures, "decode_batch", lambda *given: decode_batch(*given) + 0.1)
    with pytest.raises(ParityError, match="SavedModel's probabilities of encoded images differ from the model's by"):
        saved_model_of(build(), LABELS, samples, tmp_path / "served")
    assert list(tmp_path.iterdir()) == []


def test_tiny_probabilities_that_are_twice_as_large_are_no_rounding(samples):
    logits = np.linspace(-14.0, -12.0, 9, dtype=np.float32)[:, None]
    expected = parity.Reference(samples, Preprocessing(SIZE), [{"logits": row} for row in logits], multi_label=True)
    right = special.expit(logits.astype(np.float64) / 2.0)
    assert parity.probability_difference("probabilities", expected, 2.0, right) < 1e-9
    assert parity.probability_difference("probabilities", expected, 2.0, 2.0 * right, exact=False) < 0.01
    with pytest.raises(ParityError, match="probabilities differ from the model's by up to 1, more than 0.0014"):
        parity.probability_difference("probabilities", expected, 2.0, 2.0 * right)


@pytest.mark.usefixtures("converted_once")
def test_no_file_is_kept_when_the_8_bit_one_disagrees(samples, tmp_path, monkeypatch):
    run = tflite_file.run_samples

    def wrong(file, *given):
        sign = -1 if "int8" in file.name else 1
        return [{"logits": sign * outputs["logits"]} for outputs in run(file, *given)]

    monkeypatch.setattr(tflite_file, "run_samples", wrong)
    with pytest.raises(ParityError, match="int8-dynamic TFLite file disagrees with the model on [6-9] of 9 images"):
        tflite_of(build(), LABELS, samples, tmp_path / "a" / "phone", ["float32", "int8-dynamic"], max_disagreement=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("converted_once")
def test_a_file_that_ignores_its_image_is_not_kept_though_its_classes_agree(samples, tmp_path, monkeypatch):
    run, model = tflite_file.run_samples, build()
    head = model.get_layer("head")
    head.bias.assign([100.0, *np.zeros(head.units - 1)])  # one class for all images

    def nearly_same(file, *given):
        found = run(file, *given)
        return [{"logits": found[0]["logits"] + 0.01 * outputs["logits"]} for outputs in found]

    monkeypatch.setattr(tflite_file, "run_samples", nearly_same)
    with pytest.raises(ParityError, match="int8-dynamic TFLite file returns nearly the same logits for all 9 images"):
        tflite_of(model, LABELS, samples, tmp_path / "phone", ["int8-dynamic"])
    assert list(tmp_path.iterdir()) == []


def test_one_image_in_another_class_is_no_disagreement_and_nan_agrees_with_nothing():
    few = [(2, 1, True), (9, 1, True), (9, 2, False), (100, 2, True), (100, 3, False), (360, 7, True), (360, 8, False)]
    for num_images, disagreeing, kept in few:
        found = parity.Parity(0.1, 0.01, 1 - disagreeing / num_images, 1.0, num_images)
        words = f"disagrees with the model on {disagreeing} of {num_images} images"
        with contextlib.nullcontext() if kept else pytest.raises(ParityError, match=words):
            parity.require_agreement("file", found)
    with pytest.raises(ParityError, match="by up to nan"):
        parity.require_agreement("file", parity.Parity(np.nan, np.nan, 1.0, 1.0, 9))


def test_mcnemars_test_is_the_exact_binomial_one():
    # By hand: twice the smaller tail of n fair coins, such as 2 * (1 + 10 + 45) / 2**10 for 8 and 2.
    for lost, gained, p in ((0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 2, 112 / 1024), (3, 3, 1.0)):
        assert parity.mcnemar(lost, gained) == pytest.approx(p, rel=1e-12)


def _rows(logits: np.ndarray) -> list[parity.Outputs]:
    return [{"logits": row} for row in logits]


def test_an_artifact_is_compared_with_the_model_on_images_that_only_one_gets_right(samples):
    model, labels = build(), np.array([0, 1, 2, 3, 4, 5, 6, -1, -1])
    keras_classes, classes = [0, 1, 2, 3, 0, 0, 0, 1, 2], [1, 0, 0, 3, 4, 0, 1, 2, 2]
    samples = dataclasses.replace(samples, labels=labels)
    one_hot = np.eye(7, dtype=np.float32)
    expected = parity.Reference(samples, keras_vit.preprocessing_of(model), _rows(one_hot[keras_classes]))
    found = parity.compare(expected, one_hot[classes])
    assert (found.lost, found.gained, found.mcnemar_p) == (3, 1, pytest.approx(10 / 16))
    unlabeled = dataclasses.replace(expected, samples=dataclasses.replace(samples, labels=np.full(9, -1)))
    assert parity.compare(unlabeled, one_hot[classes]).mcnemar_p is None


def test_float_rounding_is_a_share_of_the_largest_logit(samples):
    """Logits of 40 are rounded forty times as coarsely as logits of 1; those below 1 are not held to less than 1e-4."""
    model = build()
    expected = parity.reference(model, parity.Reference(samples, keras_vit.preprocessing_of(model)))
    cases = ((40.0, 3e-3, True), (40.0, 5e-3, False), (0.01, 9e-5, True), (1.0, 2e-4, False), (1.0, np.nan, False))
    for largest, difference, kept in cases:
        logits = expected.logits * largest / np.abs(expected.logits).max()
        found = parity.compare(dataclasses.replace(expected, outputs=_rows(logits)), logits + difference)
        with contextlib.nullcontext() if kept else pytest.raises(ParityError, match="differ from the model's by up to"):
            parity.require_equal("file", found)


@pytest.mark.slow
def test_a_model_with_large_logits_is_exported(samples, tmp_path, monkeypatch):
    """As its own SavedModel, off by no more than rounding."""
    model, compare = build.__wrapped__(), parity.compare
    head = model.get_layer("head")
    head.set_weights([400 * weight for weight in head.get_weights()])
    rounding = 1 + 2e-5  # of some processor, and of some thousand terms
    monkeypatch.setattr(parity, "compare", lambda expected, logits: compare(expected, logits * rounding))
    _, found = saved_model_of(model, LABELS, samples, tmp_path)
    assert found["max_abs_diff"] > 1e-4


def test_two_exports_never_take_the_same_version(tmp_path, monkeypatch):
    """The number is chosen and taken in two steps; here, the other one comes in between every time."""
    listing, late = pathlib.Path.glob, [10, 11]

    def slow(path, pattern):
        entries = list(listing(path, pattern))
        if late:
            (path / str(late[0])).mkdir()
            (path / str(late.pop(0)) / "saved_model.pb").touch()
        return iter(entries)

    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "mine").touch()
    for number in ("2", "9"):
        (tmp_path / "served" / number).mkdir(parents=True)
    monkeypatch.setattr(pathlib.Path, "glob", slow)
    path = saved_model_export.put_as_next_version(tmp_path / "stage", tmp_path / "served")
    assert path.name == "12"
    assert [entry.name for entry in path.iterdir()] == ["mine"]
    assert (tmp_path / "served" / "11" / "saved_model.pb").is_file()


def test_a_file_of_another_size_than_its_weights_is_detected(tmp_path):
    file = tmp_path / "x.tflite"
    for size, weights, share, words in (
        (1000, 10**5, 1.0, "too few for"),
        (10**7, 10**7, 0.25, "quantized"),
    ):
        file.write_bytes(b"0" * size)
        with pytest.raises(ParityError, match=words):
            tflite_export.check_weights(file, weights, share)


def exports(samples: Samples, output: pathlib.Path, labels=LABELS):
    """Export a model in both ways."""
    yield lambda: saved_model_of(build(), labels, samples, output)
    yield lambda: tflite_of(build(), labels, samples, output, ["float32"])


def test_other_labels_and_a_file_in_the_place_of_the_output_are_refused(samples, tmp_path):
    (tmp_path / "x").write_text("mine")
    cases = [(each, "2 labels") for each in exports(samples, tmp_path / "y", ("a", "b"))]
    cases += [(each, "is a file") for each in exports(samples, tmp_path / "x")]
    for export, words in cases:
        with pytest.raises(UserError, match=words):
            export()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_output_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=f"{tmp_path} is not writable; --output accepts a directory"):
        output_folder(tmp_path / "a" / "b")


@pytest.mark.slow
def test_files_of_two_models_are_never_mixed(samples, tmp_path):
    model, phone = build(), tmp_path / "phone"
    tflite_of(model, LABELS, samples, phone, ["int8-dynamic"])
    before = {path.name: path.read_bytes() for path in phone.iterdir()}
    assert before.keys() == {"model-int8-dynamic.tflite", "labels.txt", "export.sha256", *REPORT}

    other = build.__wrapped__()
    other.get_layer("head").set_weights([2 * weight for weight in other.get_layer("head").get_weights()])
    config, preprocessing = keras_vit.config_of(model), keras_vit.preprocessing_of(model)
    padded = keras_vit.build(config, preprocessing=dataclasses.replace(preprocessing, resize="pad"), num_classes=7)
    padded.set_weights(model.get_weights())
    several = Provenance(multi_label=True)
    for given in ((other, LABELS), (model, LABELS[::-1]), (padded, LABELS), (model, LABELS, several)):
        with pytest.raises(UserError, match="phone already holds the export of another model .export.sha256"):
            tflite_of(*given[:2], samples, phone, ["float32"], origin=(*given, None)[2])
    assert {path.name: path.read_bytes() for path in phone.iterdir()} == before

    tflite_of(build(), LABELS, samples, phone, ["float32", "int8-dynamic"])
    assert {path.name for path in phone.iterdir()} == {*before, "model-float32.tflite"}


@pytest.mark.slow
def test_the_report_names_the_files_of_earlier_exports(samples, tmp_path):
    for kind, names in (("float32", ""), ("float16", "model-float32.tflite"), ("float32", "model-float16.tflite")):
        tflite_of(build(), LABELS, samples, tmp_path, [kind])
        lines = (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()
        expected = [f"From an earlier export of the same model, and not measured here: {names}."] if names else []
        assert [line for line in lines if "earlier export" in line] == expected


def test_samples_are_prepared_a_batch_at_a_time(samples):
    many = Samples(samples.encoded * 15, np.tile(samples.labels, 15))  # 135 = 64 + 64 + 7
    model = build()
    expected = parity.reference(model, parity.Reference(many, keras_vit.preprocessing_of(model)))
    assert [images.shape for _, images in expected.batches()] == [(n, *SIZE, 3) for n in (64, 64, 7)]
    images = np.concatenate([images for _, images in expected.batches()])
    np.testing.assert_allclose(expected.logits, model(images), atol=1e-5)
    assert sum((files for files, _ in expected.batches()), ()) == many.encoded


@pytest.fixture(name="finished_run", scope="module")
def _finished_run(samples, tmp_path_factory) -> pathlib.Path:
    """What a training command leaves, as far as an export reads it."""
    run = tmp_path_factory.mktemp("finished")
    build().save(run / "model.keras")
    (run / "labels.txt").write_text(labels_text(LABELS), encoding="utf-8")
    samples.save(run / "samples.npz")
    return run


@pytest.fixture(name="run")
def _run(finished_run, tmp_path) -> pathlib.Path:
    """A copy of a finished run."""
    return pathlib.Path(shutil.copytree(finished_run, tmp_path / "run"))


def with_byte_flipped(path: pathlib.Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def of_few_classes(path: pathlib.Path) -> None:
    keras_vit.build(CONFIG, preprocessing=Preprocessing(SIZE), num_classes=3).save(path)


def samples_of(ends: list[int], num_labels: int):
    """Write samples that do not fit each other: where the files end in five bytes, and fewer or more labels."""
    arrays = {"data": np.zeros(5, np.uint8), "ends": np.array(ends), "labels": np.zeros(num_labels, np.int64)}
    return lambda path: write_npz(path, arrays)


@pytest.mark.parametrize(
    ("command", "name", "damage", "words"),  # both commands open a run in the same way
    [
        (saved_model, "labels.txt", lambda path: path.write_bytes(b"caf\xe9\n"), "labels.txt cannot be read as UTF-8"),
        (tflite, "labels.txt", lambda path: path.write_text(""), "does not name its 7 classes"),
        (saved_model, "model.keras", lambda path: with_byte_flipped(path, 2), "cannot be read as a Keras model"),
        (tflite, "model.keras", lambda path: with_byte_flipped(path, 50_000), r"bad checksum of 'model.weights.h5'\)"),
        (tflite, "model.keras", lambda path: path.write_bytes(b""), "model.keras cannot be read as a Keras model"),
        (saved_model, "model.keras", of_few_classes, "there are 7 labels; model.keras and labels.txt must belong"),
        (tflite, "samples.npz", lambda path: path.write_bytes(path.read_bytes()[:1000]), "cannot be read as an .npz"),
        (saved_model, "samples.npz", lambda path: Samples((), np.zeros(0)).save(path), NO_SAMPLES),
        (tflite, "samples.npz", samples_of([2, 5], 1), NO_SAMPLES),
        (saved_model, "samples.npz", samples_of([2, 9], 2), NO_SAMPLES),
        (tflite, "samples.npz", lambda path: Samples((b"no image",), np.zeros(1)).save(path), "Image 0 of samples.npz"),
    ],
)
@pytest.mark.usefixtures("models_read_once")
def test_a_damaged_run_is_one_sentence_and_leaves_nothing(command, name, damage, words, run, tmp_path):
    damage(run / name)
    with pytest.raises(UserError, match=words) as caught:
        command.main(["--run", str(run), "--output", str(tmp_path / "exports" / "here")])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [run]


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_nothing(samples, tmp_path, monkeypatch):
    def full(module, path, signatures):
        path.mkdir(exist_ok=True)
        raise tf.errors.ResourceExhaustedError(None, None, f"{path}/variables; No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full)
    for export in exports(samples, tmp_path / "x"):
        with pytest.raises(OSError, match="No space left on device") as caught:
            export()
        assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_prints_its_table_and_nothing_else(run, tmp_path):
    (run / "config.json").write_text("{}")
    command = ["-m", "export.tflite", "--run", str(run), "--output", str(tmp_path / "phone")]
    command += ["--formats", "float32"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}  # set by JAX
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=root, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:3] == ["format", "MB", "max"]


def test_a_model_card_names_what_is_set_of_a_recipe():
    recipe = {"epochs": 3, "learning_rate": 0.002, "mixup": 0.0, "mixup_partner": "next", "flip": False, "steps": None}
    origin = Provenance(config={"settings": {"command": "pretrain", "recipe_name": "digits", "recipe": recipe}})
    facts = collections.defaultdict(float, merge_tokens=0, dtype="float32")
    card = model_card.model_card(build(), LABELS, origin, facts, [])
    assert re.search(r"\| Training +\| pretrain digits: epochs 3, learning rate 0.002 +\|", card)


def test_a_model_card_describes_the_preprocessing():
    for resize, crop_from, sentence in (
        ("stretch", None, "stretched to 16 x 24 (bilinear)"),
        ("crop", None, "center crop of this aspect ratio, resized to 16 x 24 (bilinear, antialiased)"),
        ("pad", None, "whole image in its aspect ratio, resized to 16 x 24, centered on white (bilinear, antialiased)"),
        ("resize-small", 30, "smaller side resized to 30, center crop to 16 x 24 (area)"),
    ):
        rule = keras_vit.Preprocessing((16, 24), resize=resize, crop_from=crop_from)
        assert rule.summary() == f"RGB, turned upright by the EXIF orientation, {sentence}, 0..255 to -1.0..1.0"
    of_imagenet = dataclasses.replace(rule, value_range=((-0.485 / 0.229, -2.0, -1.8), (2.2, 2.4, 2.6)))
    assert of_imagenet.summary().endswith(" to [-2.1179, -2.0, -1.8]..[2.2, 2.4, 2.6]")
