"""Images of none of the classes: the scores, their choice and threshold, and what prediction and exports say."""

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
import PIL.Image
import pytest
import sklearn.datasets
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from sklearn.covariance import ledoit_wolf
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

import keras_vit
from export import parity
from export.onnx import __main__ as onnx
from export.options import SourceOptions, TFLiteOptions
from export.saved_model import __main__ as saved_model
from export.source import ExportedModel, Provenance
from export.tasks import Classification
from export.tflite.convert import to_tflite
from export.tflite.export import export_tflite
from export.tflite.flatbuffer import unpack
from export.tflite.quantize import quantize, quantize_static
from keras_vit import UserError
from keras_vit.images.files import SAMPLES, Samples
from keras_vit.inspection import Image
from keras_vit.run import TEMPERATURE, Run
from keras_vit.scores import KINDS, UNKNOWN, UnknownKind, features_and_logits, threshold_of
from tests.features.places import WIDER, digit_images
from tests.support import encoded, randomize
from training import evaluate, linear_probe, predict, unknown
from training.data.sources import open_source
from training.options.common import DataOptions
from training.outliers.fit_unknown import Outputs, auroc_of_left_out_classes, fit_score, outputs_of
from training.prediction import classifier as prediction

pytestmark = pytest.mark.usefixtures("models_read_once")

SHARED = pathlib.Path(os.environ.get("SHARED_DATA", pathlib.Path(__file__).parents[3] / "shared")) / "data" / "tfds"

DINOV2 = pathlib.Path(os.environ.get("KERAS_VIT_DINOV2", "missing"))


def made_outputs(rng: np.random.Generator, count: int, classes: int = 4, width: int = 12) -> Outputs:
    """Features around a center of each class, and logits that are the products with it."""
    centers = 5.0 * np.eye(classes, width)
    labels = np.arange(count) % classes
    features = (centers[labels] + rng.normal(size=(count, width))).astype(np.float32)
    return Outputs(features, (features @ centers.T).astype(np.float32), labels)


def test_all_scores_tell_far_images_and_knn_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    train, evaluation = made_outputs(rng, 400), made_outputs(rng, 100)
    far = -evaluation.features
    for kind in KINDS:
        scorer = fit_score(kind, train, 0)
        known = np.asarray(scorer.score(evaluation.features, evaluation.logits))
        other = np.asarray(scorer.score(far, -evaluation.logits))
        assert roc_auc_score(np.repeat([0, 1], 100), np.concatenate([known, other])) > 0.99, kind
        if kind == "knn":
            neighbors = NearestNeighbors(n_neighbors=5, metric="cosine").fit(train.features)
            np.testing.assert_allclose(known, neighbors.kneighbors(evaluation.features)[0][:, -1], atol=1e-5)
        if kind == "combined":
            parts = [fit_score(part, train, 0) for part in ("energy", "mahalanobis")]
            found = [
                (p.score(train.features, train.logits), p.score(evaluation.features, evaluation.logits)) for p in parts
            ]
            standardized = sum((np.asarray(new) - np.mean(own)) / np.std(own) for own, new in found)
            np.testing.assert_allclose(known, standardized, rtol=1e-3, atol=1e-3)
        if kind == "mahalanobis":
            centers = np.stack([train.features[train.labels == k].mean(axis=0) for k in range(4)])
            covariance = ledoit_wolf(train.features - centers[train.labels], assume_centered=True)[0]
            offsets = evaluation.features[:, None] - centers
            squared = np.einsum("nkd,de,nke->nk", offsets, np.linalg.inv(covariance), offsets)
            np.testing.assert_allclose(known, np.sqrt(squared.min(axis=1)), rtol=1e-3)


def test_left_out_classes_are_told_and_the_threshold_is_conformal():
    rng = np.random.default_rng(1)
    found = auroc_of_left_out_classes(made_outputs(rng, 400), made_outputs(rng, 200), 4, 0)
    assert min(found["knn"], found["mahalanobis"]) > 0.95
    assert 95 * (1 + 1e-6) < threshold_of(np.arange(1, 100), 0.05) == pytest.approx(95, rel=1e-4)  # not by rounding
    assert threshold_of(np.arange(5), 0.05) == pytest.approx(4, rel=1e-4)
    # Of ranks to 25, that of the new image counted.
    assert threshold_of(np.arange(1, 25), 0.1) == pytest.approx(23, rel=1e-4)


def test_the_threshold_of_rounded_weights_leaves_as_many_images_unknown_as_the_models():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=100)
    moved = 3.0 + 2.0 * scores + 0.1 * rng.normal(size=100)
    found = parity.matched_threshold(1.5, scores, moved)
    assert np.sum(moved > found) == np.sum(scores > 1.5)
    assert parity.matched_threshold(10.0, scores, scores + 1.0) == pytest.approx(11.0)


def digits_samples(count: int) -> Samples:
    labels = sklearn.datasets.load_digits().target[:count]
    return Samples(tuple(encoded(image[..., 0]) for image in digit_images(count)), labels)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory) -> pathlib.Path:
    """A run of handwritten digits with random weights, and its score."""
    folder = tmp_path_factory.mktemp("run")
    randomize(keras_vit.build(WIDER, image_size=8, channels=1, num_classes=10)).save(folder / "model.keras")
    (folder / "labels.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    (folder / "config.json").write_text(json.dumps({"settings": {"recipe": {"loss": "softmax"}}}))
    digits_samples(20).save(folder / SAMPLES)
    unknown.main(["--run", str(folder), "--data", "digits", "--images", "600", "--kind", "knn"])
    return folder


def test_a_share_of_known_images_is_unknown_and_prediction_says_so(run, tmp_path, capsys):
    report = json.loads((run / "unknown.json").read_text())
    assert report["kind"] == "knn"
    assert report["training_images"] == 600
    assert report["auroc_of_left_out_classes"].keys() == set(KINDS)
    scorer = Run.open(run).unknown
    assert scorer.arrays["bank"].shape == (600, 24)
    assert scorer.threshold == report["threshold"]
    photos = tmp_path / "pictures"
    photos.mkdir()
    (photos / "digit.png").write_bytes(digits_samples(1).encoded[0])
    PIL.Image.fromarray(np.tile(np.uint8([[255, 0], [0, 255]]), (4, 4))).save(photos / "checks.png")
    predict.main(["--run", str(run), str(photos), "--output", str(tmp_path / "out.json")])
    found = {pathlib.Path(each["picture"]).stem: each for each in json.loads((tmp_path / "out.json").read_text())}
    assert found["checks"]["unknown"]
    assert not found["digit"]["unknown"]
    assert "checks.png (unknown)" in capsys.readouterr().out


def test_an_evaluation_reports_the_auroc_of_left_out_classes(run, tmp_path, monkeypatch):
    monkeypatch.setattr("training.evaluation.report._is_drawn", lambda draw, path: False)
    evaluate.main(["--run", str(run), "--data", "digits", "--output", str(tmp_path)])
    expected = json.loads((run / "unknown.json").read_text())["auroc_of_left_out_classes"]
    assert json.loads((tmp_path / "evaluation.json").read_text())["unknown"] == {"score": "knn", **expected}
    assert f"AUROC of {expected['knn']:.4f}" in (tmp_path / "evaluation.md").read_text()


def exported_of(kind: UnknownKind, samples: Samples) -> ExportedModel:
    """A model with uneven channels before its head, and a score of a kind."""
    model = randomize(keras_vit.build(WIDER, image_size=8, channels=1, num_classes=10))
    norm = model.get_layer("Transformer.encoder_norm")
    scale, center = norm.get_weights()
    scale[::8] *= 50.0
    norm.set_weights([scale, center])
    data = parity.Reference(samples, keras_vit.preprocessing_of(model), np.zeros(0))
    network = features_and_logits(model)
    found = [network.predict_on_batch(images) for _, images in data.batches()]
    features, logits = (np.concatenate([each[name] for each in found]) for name in ("pre_logits", "logits"))
    scorer = dataclasses.replace(fit_score(kind, Outputs(features, logits, samples.labels), 0), threshold=3.0)
    return ExportedModel(model, tuple("0123456789"), samples, Provenance("a model"), scorer)


@pytest.mark.slow
def test_the_score_reads_the_features_as_they_are_and_stays_in_float32_in_eight_bits(tmp_path):
    exported = exported_of("combined", digits_samples(200))
    images = next(parity.Reference(digits_samples(4), exported.preprocessing, np.zeros(0)).batches())[1]
    file = tmp_path / "float.tflite"
    file.write_bytes(to_tflite(exported.model, all_tokens=True, unknown=exported.unknown))
    expected = exported.unknown.scores(exported.model, [images])
    inputs = [image[None] for image in images]
    for content in (quantize_static(file, inputs)[0], quantize(file, "int8-dynamic")):
        runner = Interpreter(model_content=content).get_signature_runner()
        found = np.concatenate([runner(image=image)["unknown_score"] for image in inputs])
        np.testing.assert_allclose(found, expected, atol=1.0)
        model = unpack(content)
        arrays = [array.nbytes for array in exported.unknown.arrays.values() if array.ndim == 2]
        sizes = [len(buffer.data) for buffer in model.buffers if buffer.data is not None]
        assert all(size in sizes for size in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_formats_have_the_score(kind, tmp_path):
    exported = exported_of(kind, digits_samples(40))
    formats = ("float32", "float16", "int8-dynamic", "int8-weights", "int4-weights", "int8")
    options = TFLiteOptions(SourceOptions("a model"), str(tmp_path / "phone"), formats, max_disagreement=1.0)
    export_tflite(Classification(exported), options, exported.samples)
    report = json.loads((tmp_path / "phone" / "report.json").read_text())
    for name in formats:
        assert report["formats"][name]["unknown_agreement"] >= 0.9, name
    assert report["formats"]["float32"]["unknown_max_abs_diff"] < 1e-4
    assert "unknown agreement" in (tmp_path / "phone" / "report.md").read_text()


@pytest.mark.slow
def test_exports_compute_the_same_score(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    for export, folder in ((saved_model, "saved"), (onnx, "onnx")):
        export.main(["--run", str(run), "--output", str(tmp_path / folder)])
    opened = Run.open(run)
    image = np.asarray(opened.preprocessing.normalize(np.full((3, 8, 8, 1), 100.0, np.float32)))
    expected = opened.unknown.scores(opened.model, [image])
    served = tf.saved_model.load(str(tmp_path / "saved" / "1")).signatures
    np.testing.assert_allclose(served["image_tensor"](image=tf.constant(image))["unknown_score"], expected, atol=1e-5)
    assert "unknown" in served["serving_default"].structured_outputs
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    np.testing.assert_allclose(session.run(["unknown_score"], {"image": image})[0], expected, atol=1e-5)
    threshold = float(session.get_modelmeta().custom_metadata_map["unknown_threshold"])
    assert threshold == pytest.approx(opened.unknown.threshold)
    report = json.loads((tmp_path / "onnx" / "report.json").read_text())
    assert report["formats"]["onnx"]["unknown_agreement"] == 1.0


def test_an_image_goes_through_the_model_once(run, monkeypatch):
    monkeypatch.setattr(prediction, "logits_model", None)  # what another pass would take
    classifier = prediction.open_classifier(Run.open(run))
    [card] = classifier.classify([Image("checks", np.tile(np.uint8([[255, 0], [0, 255]]), (4, 4))[..., None])])
    assert card.ranked.is_unknown


def test_the_score_of_another_model_and_a_damaged_one_are_refused(run, tmp_path):
    Run.open(run).model.save(tmp_path / "model.keras")
    shutil.copy(run / UNKNOWN, tmp_path)
    with pytest.raises(UserError, match="was fitted to another model"):
        _ = Run.open(tmp_path).unknown
    np.savez(tmp_path / UNKNOWN, kind=np.array(2))
    with pytest.raises(UserError, match="cannot be read as a score for unknown images"):
        _ = Run.open(tmp_path).unknown


def test_a_damaged_temperature_can_be_fitted_again(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / TEMPERATURE).write_text("{")
    evaluate.main(["--run", str(folder), "--data", "digits", "--calibrate"])
    assert Run.open(folder).temperature > 0.0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the prepared MNIST and Fashion-MNIST are not there")
@pytest.mark.skipif(not DINOV2.is_dir(), reason="KERAS_VIT_DINOV2 does not name a folder of DINOv2-S/14")
def test_fashion_is_unknown_to_a_probe_of_digits(tmp_path):
    """MNIST against Fashion-MNIST: AUROC of at least 0.95 for the score that left-out classes choose."""
    data = ["--data", "tfds:mnist", "--data-dir", str(SHARED), "--train-split", "train[:2000]"]
    data += ["--eval-split", "test[:1000]"]
    run = str(tmp_path / "run")
    options = ["--image-size", "56", "56", "--c", "0.1", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path)]
    linear_probe.main(["--checkpoint", str(DINOV2), *data, "--workdir", run, *options])
    unknown.main(["--run", run, *data])
    opened, scores = Run.open(run), []
    for name in ("mnist", "fashion_mnist"):
        split = open_source(DataOptions(f"tfds:{name}", str(SHARED), "train[:1%]", "test[:1000]")).evaluation
        found = outputs_of(opened, split, 10, 100)
        scores.append(np.asarray(opened.unknown.score(found.features, found.logits)))
    assert np.mean(scores[0] > opened.unknown.threshold) == pytest.approx(0.05, abs=0.01)
    assert roc_auc_score(np.repeat([0, 1], 1000), np.concatenate(scores)) >= 0.95
