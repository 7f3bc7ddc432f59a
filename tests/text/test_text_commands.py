"""Texts as classes on the command line: predict, evaluate, exports of a saved model, and the mistakes."""

import contextlib
import io
import json
import pathlib
import types

import keras
import numpy as np
import PIL.Image
import pytest

import keras_vit
from export.options import SourceOptions
from export.run import open_run
from export.saved_model.model_card import model_card
from export.source import Provenance, open_model
from export.tflite import __main__ as tflite
from keras_vit import UserError
from keras_vit.cli import parser
from keras_vit.files.keras_model import load_model
from keras_vit.text.classes import classes_of_options
from tests.support import FIXTURES, others_slow
from tests.text.towers import CLIP, SIGLIP, golden, logits_of, texts_of, with_tokenizer
from training import evaluate, predict
from training import finetune as finetuning
from training.checks import open_measured
from training.data.sources import DataOptions, open_source
from training.experiments.auto import zero_shot_accuracy
from training.options.evaluate import EvaluateOptions
from training.options.predict import PredictOptions
from training.prediction.arguments import with_images, with_run


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory):
    """Both kinds of towers with their tokenizers, and a folder of images by class."""
    place = tmp_path_factory.mktemp("texts")
    for name in (CLIP, SIGLIP):
        with_tokenizer(name, place / name)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("w11_w21", "w9"):
            (place / "data" / split / label).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 256, (20, 20, 3), np.uint8)
                PIL.Image.fromarray(pixels).save(place / "data" / split / label / f"{number}.png")
    return place


@pytest.fixture(autouse=True)
def _in_the_place(place, monkeypatch):
    monkeypatch.chdir(place)


def shares(file) -> dict[str, dict[str, float]]:
    """Image -> class -> probability."""
    rows = json.loads(file.read_text())
    return {row["picture"]: {each["class"]: each["probability"] for each in row["classes"]} for row in rows}


@pytest.mark.parametrize("name", [CLIP, SIGLIP])
def test_predict_names_images_by_texts_with_the_probabilities_of_the_model(name, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--threshold", "0"] if name == SIGLIP else []
    predict.main(["--checkpoint", name, "--output", str(out), *options, "--classes", "w11 w21", "w9", "data/test/w9"])
    model = keras_vit.zero_shot(name, ["w11 w21", "w9"])
    found = shares(out)
    pixels = [keras_vit.preprocessing_of(model)(PIL.Image.open(photo)) for photo in found]
    for each, logits in zip(found.values(), logits_of(model, np.stack(pixels)).astype(np.float64), strict=True):
        expected = 1 / (1 + np.exp(-logits)) if name == SIGLIP else np.exp(logits) / np.exp(logits).sum()
        assert each == pytest.approx(dict(zip(["w11 w21", "w9"], expected, strict=True)), abs=1e-5)
    assert f"predict --run {name} --classes 'w11 w21' w9" in capsys.readouterr().out  # and no run directory


def test_classes_and_templates_of_files_are_those_of_options(tmp_path):
    (tmp_path / "classes.txt").write_text("cat: a cat | a kitten\n\n dog \n")
    (tmp_path / "templates.txt").write_text("a photo of {}.\n{}\n")
    files = [str(tmp_path / "classes.txt")], [str(tmp_path / "templates.txt")]
    found = classes_of_options(*files)
    assert found.labels == ("cat", "dog")
    assert found.texts == (("a cat", "a kitten"), ("dog",))
    assert found.templates == ("a photo of {}.", "{}")
    assert len(classes_of_options(["cat"], ["clip"]).templates) == 80


@pytest.mark.parametrize("line", ["cat: a cat |", "cat:", ": a cat"])
def test_a_line_without_a_text_or_name_is_one_sentence(line, tmp_path):
    (tmp_path / "classes.txt").write_text(f"dog\n{line}\n")
    with pytest.raises(UserError, match="is empty or has an empty one"):
        classes_of_options([str(tmp_path / "classes.txt")], None)


def test_evaluate_makes_the_classes_of_the_data(tmp_path, capsys):
    evaluate.main(["--checkpoint", CLIP, "--data", "folder:data", "--classes", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "evaluation.json").read_text())
    model = keras_vit.zero_shot(CLIP, {"w11_w21": "w11 w21", "w9": "w9"})
    files = [f"data/test/{label}/{number}.png" for label in ("w11_w21", "w9") for number in range(3)]
    logits = logits_of(model, np.stack([keras_vit.preprocessing_of(model)(PIL.Image.open(file)) for file in files]))
    assert found["accuracy"] == pytest.approx(np.mean(np.argmax(logits, axis=1) == [0, 0, 0, 1, 1, 1]))
    assert f"finetune --checkpoint {CLIP} --zero-shot-head" in capsys.readouterr().out


def test_evaluate_takes_texts_whose_names_are_those_of_the_data(tmp_path):
    (tmp_path / "classes.txt").write_text("w11_w21: w5 | w6\nw9: w7\n")
    options = ["--checkpoint", CLIP, "--data", "folder:data", "--output", str(tmp_path / "out")]
    arguments = [*options, "--classes", str(tmp_path / "classes.txt"), "--templates", "w3 {}"]
    texts = open_measured(parser.parse(EvaluateOptions, arguments, prog="evaluate")).texts
    assert (texts.texts, texts.templates) == ((("w5", "w6"), ("w7",)), ("w3 {}",))
    with pytest.raises(UserError, match="only the data have w11_w21"):
        evaluate.main([*options, "--classes", "w9", "w8"])


@pytest.mark.parametrize("name", others_slow([CLIP, SIGLIP], SIGLIP))
def test_a_saved_model_of_texts_tells_exports_its_classes_and_their_kind(name, tmp_path):
    keras_vit.zero_shot(name, texts_of(name)).save(tmp_path / "texts.keras")
    options = SourceOptions(run=str(tmp_path / "texts.keras"))
    source = open_model(open_run(options), options)
    assert source.labels == tuple(texts_of(name))
    assert source.origin.multi_label == (name == SIGLIP)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--classes", "w2", "w2", "data/"], "names the class 'w2' twice"),
        (["--classes", "nowhere.txt", "data/"], "There is no file 'nowhere.txt'"),
        (["--classes", "w2", "data/", "--templates", "photo"], "A template must have {}"),
        (["--templates", "a {}", "--labels", "x", "--", "data"], "."),
        (["--classes", "w2", "--labels", "names.txt", "data/"], "--labels applies only to"),
        (["--classes", "w2", "data"], "data is taken as a class, so write ./data if it is meant"),
        (["--classes", "w2", "data/", "w3"], "There is no image 'w3'"),
        (["--classes", "w2", "24/7", "data/"], "There is no image '24/7'"),
        (["--classes", "w2", "names.txt", "data/"], "There is no file 'names.txt'"),
        (["--classes", "data/"], "Each class needs a text"),
        (["data", "--classes", "w2", "--num-heads", "4"], "leave --num-heads out"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(UserError, match=message):
        predict.main(["--checkpoint", CLIP, *arguments])


CLASSES, TEMPLATES, IMAGES, RUN = (("classes",), ("templates",), ("images",), ("run",))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--classes cat dog pictures/", {CLASSES: ("cat", "dog"), IMAGES: ("pictures/",)}),
        ("--classes cat dog ./dog", {CLASSES: ("cat", "dog"), IMAGES: ("./dog",)}),
        ("--classes cat a.png pictures/*", {CLASSES: ("cat",), IMAGES: ("a.png", "pictures/*")}),
        ("pictures/ --classes cat dog", {CLASSES: ("cat", "dog"), IMAGES: ("pictures/",)}),
        ("towers --classes cat pictures/", {CLASSES: ("cat",), IMAGES: ("pictures/",), RUN: "towers"}),
        ("--classes lists/c.txt pictures/", {CLASSES: ("lists/c.txt",), IMAGES: ("pictures/",)}),
        (
            "--classes cat --templates {}/{} a{}.png dog/ gs://b/c",
            {CLASSES: ("cat",), TEMPLATES: ("{}/{}", "a{}.png"), IMAGES: ("dog/", "gs://b/c")},
        ),
    ],
)
def test_what_is_a_class_and_what_an_image_depends_on_how_it_is_written(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("dog", "pictures"):  # where a class is called like a folder
        pathlib.Path(folder).mkdir()
        for name in (f"{folder}/a.png", "a.png"):
            pathlib.Path(name).touch()
    given = with_run(with_images(parser.read(PredictOptions, arguments.split(), prog="predict")))
    assert given == expected


SMALL = ("--image-size", "20", "--steps", "2", "--batch-size", "4", "--warmup-steps", "0")


def finetune(workdir, *options: str) -> keras.Model:
    """Fine-tune CLIP on the two classes for a few steps, and return the saved model."""
    finetuning.main(["--checkpoint", CLIP, "--data", "folder:data", "--workdir", str(workdir), *SMALL, *options])
    return load_model(workdir)


def test_finetuning_begins_with_the_texts_and_wise_ft_averages_with_them(handed_over, tmp_path):
    options = ("--zero-shot-head", "--templates", "w3 {}", "--wise-ft", "0.25")
    with contextlib.suppress(UserError):  # there is no run to go on with
        finetune(tmp_path, *options)
    [run] = handed_over
    model = run.make_model(2)
    start = keras_vit.zero_shot(CLIP, {"w11_w21": "w3 w11 w21", "w9": "w3 w9"})
    images = golden(CLIP)["images"]
    np.testing.assert_allclose(logits_of(model, images), logits_of(start, images), rtol=0, atol=1e-5)

    before = [np.array(variable) for variable in model.trainable_variables]
    averages = [keras.Variable(values + 8.0) for values in before[:3]]  # of the run, beside what was trained last
    for variable in model.trainable_variables:
        variable.assign(variable + 4.0)
    (wise_ft,) = run.callbacks
    wise_ft.set_model(types.SimpleNamespace(network=model, ema=averages))
    wise_ft.on_train_end()
    for number, found in enumerate([*averages, *model.trainable_variables[3:]]):
        np.testing.assert_allclose(np.array(found), before[number] + (2.0 if number < 3 else 1.0), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_of_texts_begins_with_them_goes_halfway_back_predicts_and_is_exported(tmp_path, capsys):
    start = keras_vit.zero_shot(CLIP, {"w11_w21": "w3 w11 w21", "w9": "w3 w9"})
    options = ("--zero-shot-head", "--templates", "w3 {}")
    still = finetune(tmp_path / "still", *options, "--learning-rate", "1e-12")
    images = golden(CLIP)["images"]
    np.testing.assert_allclose(logits_of(still, images), logits_of(start, images), rtol=0, atol=1e-5)
    trained = finetune(tmp_path / "trained", *options)
    half = finetune(tmp_path / "half", *options, "--wise-ft", "0.5")
    kernels = [np.asarray(model.get_layer("head").kernel) for model in (start, trained, half)]
    assert np.abs(kernels[1] - kernels[0]).max() > 1e-4
    for before, after, found in zip(start.weights, trained.weights, half.weights, strict=True):
        mean = (np.asarray(before) + np.asarray(after)) / 2
        np.testing.assert_allclose(np.asarray(found), mean, rtol=0, atol=1e-6)
    assert keras_vit.classes_of(trained) == ("w11_w21", "w9")
    capsys.readouterr()
    predict.main(["--run", str(tmp_path / "half"), "data/test/w9/0.png"])
    assert "w11_w21" in capsys.readouterr().out
    tflite.main(["--run", str(tmp_path / "half"), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    assert (tmp_path / "phone" / "model-float32.tflite").is_file()  # which the export has compared with the model


def test_mistakes_of_finetuning_with_texts_are_one_sentence(tmp_path):
    for options, message in (
        (("--templates", "a {}"), "--templates applies only to --zero-shot-head"),
        (("--zero-shot-head", "--channels", "1"), "leave it out"),
        (("--wise-ft", "1.5"), "--wise-ft must be in"),
        (("--wise-ft", "0.5", "--lora", "2"), "--wise-ft applies only to whole weights"),
    ):
        with pytest.raises(UserError, match=message):
            finetune(tmp_path / "wrong", *options)


def test_the_model_card_lists_the_texts_with_their_templates():
    model = keras_vit.zero_shot(CLIP, {"cat": ["w11", "w9"], "dog": "w21"}, ["a photo of {}.", "{}"])
    facts = {"dtype": "float32", "merge_tokens": 0, "num_images": 3, "threshold": None, "accuracy": None}
    card = model_card(model, ("cat", "dog"), Provenance(), {**facts, "max_abs_diff": 0.0}, [])
    for words in ("* `a photo of {}.`\n* `{}`\n", "| cat   | w11 \\| w9 |", "| dog   | w21"):
        assert words in card


@pytest.mark.slow
def test_auto_tells_what_the_names_of_the_classes_reach_without_training(capsys):
    source = open_source(DataOptions("folder:data"))
    accuracy = zero_shot_accuracy(CLIP, source)
    model = keras_vit.zero_shot(CLIP, {"w11_w21": "w11 w21", "w9": "w9"}, "a photo of a {}.")
    predicted = []
    for index in range(source.evaluation.num_examples):
        image = PIL.Image.open(io.BytesIO(source.evaluation.read(index)[0].numpy()))
        pixels = np.asarray(keras_vit.preprocessing_of(model)(image))[None]
        predicted.append(int(np.argmax(model(pixels))))
    labels = [int(source.evaluation.read(index)[1]) for index in range(source.evaluation.num_examples)]
    assert accuracy == np.mean(np.equal(predicted, labels))
    assert f"{accuracy:.1%} on 6 evaluation images" in capsys.readouterr().out
    assert zero_shot_accuracy(str(FIXTURES / "vit_token.npz"), source) is None
