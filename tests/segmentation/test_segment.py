"""The command: a head is trained, measured and used; runs go on, and are refused where they do not fit."""

import json
import pathlib

import keras
import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.segmentation import shapes
from tests.segmentation.shapes import LABELS
from tests.support import randomize
from training import segment
from training.segmentation.segmenter import open_segmenter

BACKBONE = keras_vit.ViTConfig(patch_size=8, hidden_size=24, num_layers=3, num_heads=3, mlp_dim=32)
SMALL = ["--image-size", "48", "48", "--batch-size", "4", "--steps", "4", "--warmup-steps", "0"]
QUERIES = ["--num-queries", "6", "--num-blocks", "1"]


@pytest.fixture(name="backbone", scope="module")
def _backbone(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("backbone") / "backbone.keras"
    randomize(keras_vit.build(BACKBONE, image_size=32, num_classes=3)).save(file)
    return str(file)


def fit(backbone: str, data: str, workdir: pathlib.Path, *more: str) -> None:
    segment.main(["fit", "--checkpoint", backbone, "--data", data, "--workdir", str(workdir), *more])


@pytest.mark.slow
def test_a_linear_head_is_trained_alone_and_measured(backbone, tmp_path, capsys):
    data, run = shapes.write_folder(tmp_path / "d", 14), tmp_path / "run"
    more = ["--head", "linear", *SMALL[:5], "--steps", "40", "--learning-rate", "0.02", "--blocks", "0", "-1"]
    fit(backbone, data, run, *more)
    report = json.loads((run / "segmentation.json").read_text())
    assert list(report["classes"]) == list(LABELS)
    assert report["pictures"] == 2
    assert report["pixel_accuracy"] > 0.5
    model, before = load_model(run), keras.models.load_model(backbone)
    name = "Transformer.encoderblock_0.MlpBlock_3.Dense_0"
    np.testing.assert_array_equal(model.get_layer(name).kernel, before.get_layer(name).kernel)
    saved = (run / "model.keras").read_bytes()
    fit(backbone, data, run, *more)
    assert (run / "model.keras").read_bytes() == saved
    assert "is finished: nothing to do" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), [("coco", "instance"), ("panoptic", "panoptic"), ("folder", "semantic")])
def test_queries_are_trained_measured_and_used(kind, task, backbone, tmp_path, capsys):
    data = getattr(shapes, f"write_{kind}")(tmp_path / "d", 11)
    run, found = tmp_path / "run", tmp_path / "found"
    fit(backbone, data, run, *SMALL, *QUERIES, "--task", task)
    model = load_model(run)
    assert keras_vit.task_of(model).task == task
    segment.main(["evaluate", "--run", str(run), "--data", data, "--output", str(tmp_path / "report")])
    one, other = (json.loads((folder / "segmentation.json").read_text()) for folder in (run, tmp_path / "report"))
    assert one == other
    assert one["task"] == task
    images = tmp_path / "d" / "images" if kind == "folder" else tmp_path / "d"
    segment.main(["predict", "--run", str(run), "--output", str(found), "--threshold", "0", str(images / "000.png")])
    mask = np.asarray(PIL.Image.open(found / "masks" / "000.png"))
    assert mask.shape == ((48, 48) if task == "semantic" else (48, 48, 3))
    names = {"semantic": {"labels.txt"}, "panoptic": {"masks.json"}, "instance": {"masks.json", "instances.json"}}
    assert {file.name for file in found.iterdir()} == {"masks", "predictions.html", *names[task]}
    assert "Next:" in capsys.readouterr().out
    assert "000.png" in (found / "predictions.html").read_text()


@pytest.mark.slow
def test_a_model_that_segments_is_trained_further_for_other_classes(backbone, tmp_path):
    fit(backbone, shapes.write_folder(tmp_path / "d", 11), tmp_path / "run", *SMALL, *QUERIES)
    data = shapes.write_coco(tmp_path / "c", 11)
    fit(str(tmp_path / "run"), data, tmp_path / "next", *SMALL, *QUERIES, "--task", "instance")
    assert load_model(tmp_path / "next").output["class_logits"].shape == (None, 6, 4)


def test_more_segments_than_queries_are_refused(backbone, tmp_path):
    data = shapes.write_coco(tmp_path / "d", 11)
    with pytest.raises(UserError, match="up to 3 segments, but there are 2 queries"):
        fit(backbone, data, tmp_path / "run", *SMALL, *QUERIES[2:], "--task", "instance", "--num-queries", "2")


def test_a_classifier_does_not_segment(backbone):
    with pytest.raises(UserError, match="does not segment images; train a model that does"):
        open_segmenter(Run.of_model(keras.models.load_model(backbone)))


def test_other_classes_are_not_measured(backbone, tmp_path):
    task = keras_vit.SegmentationConfig(2, 4, 1, 1)
    keras_vit.segmentation_model(keras.models.load_model(backbone), task).save(tmp_path / "model.keras")
    (tmp_path / "labels.txt").write_text("a\nb\n")
    data = shapes.write_folder(tmp_path / "d", 4)
    with pytest.raises(UserError, match="only the run has a, b and only the data have cross, disc, ground, square"):
        segment.main(["evaluate", "--run", str(tmp_path / "model.keras"), "--data", data, "--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--head", "linear", "--task", "instance"], "--task applies only to --head eomt"),
        (["--background", "ignore"], "--background applies only to --data coco:FILE or panoptic:FILE"),
        (["--lora", "4"], "--lora applies only to"),
        (["--inspect-every", "1"], "--inspect-every applies only to models of classes"),
    ],
)
def test_options_that_do_not_fit_are_refused(more, sentence):
    with pytest.raises(UserError, match=sentence):
        segment.main(["fit", "--checkpoint", "augreg:B_16", "--data", "tfds:x", "--workdir", "never", *more])


def test_an_unknown_head_or_job_is_refused(capsys):
    with pytest.raises(SystemExit):
        segment.main(["fit", "--checkpoint", "augreg:B_16", "--data", "tfds:x", "--workdir", "never", "--head", "conv"])
    assert "invalid choice 'conv'" in capsys.readouterr().err
    with pytest.raises(UserError, match="must be one of fit, evaluate, predict, but is 'export'"):
        segment.main(["export"])
