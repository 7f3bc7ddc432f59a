"""Defects on made parts: found, located, exported; and the definitions of PatchCore."""

import json
import pathlib

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from sklearn.metrics import pairwise_distances, roc_auc_score
from sklearn.neighbors import NearestNeighbors

import keras_vit
from keras_vit import UserError
from keras_vit.models.patch_memory import PatchMemory, distances_to
from tests.support import randomize
from training import anomaly
from training.outliers.anomaly import k_center, open_anomaly_detector

pytestmark = pytest.mark.usefixtures("models_read_once")

BACKBONE = keras_vit.ViTConfig(patch_size=4, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=32)
SIZE = (32, 24)


def make_parts(folder: pathlib.Path, count: int, *, defects: bool) -> list[np.ndarray]:
    """Parts of two stripes with noise, and the masks of the squares that are pasted on them."""
    rng = np.random.default_rng(1 if defects else 0)
    folder.mkdir()
    masks = []
    for number in range(count):
        part = np.where(np.arange(24) % 12 < 6, 200.0, 60.0) + rng.normal(0, 4, SIZE)
        mask = np.zeros(SIZE, bool)
        if defects:
            top, left = rng.integers(0, 24), rng.integers(0, 16)
            mask[top : top + 8, left : left + 8] = True
            part[mask] = rng.uniform(0, 255, 64)
        PIL.Image.fromarray(np.clip(part, 0, 255).astype(np.uint8)).save(folder / f"{number:02d}.png")
        masks.append(mask)
    return masks


def test_defects_are_found_and_located_and_the_saved_model_says_the_same(tmp_path, capsys):
    make_parts(tmp_path / "good", 20, defects=False)
    masks = make_parts(tmp_path / "bad", 6, defects=True)
    model = randomize(keras_vit.build(BACKBONE, image_size=SIZE, channels=1, num_classes=3))
    model.save(tmp_path / "backbone.keras")
    run = str(tmp_path / "run")
    options = ["--data", f"folder:{tmp_path / 'good'}", "--workdir", run, "--false-alarms", "0.004"]
    anomaly.main(["fit", "--run", str(tmp_path / "backbone.keras"), *options])
    facts = json.loads((tmp_path / "run" / "anomaly.json").read_text())
    assert facts["good_pictures"] == 16
    assert facts["patches_in_memory"] == round(0.1 * 16 * 48)
    assert "4 held-out parts are too few for 0.4% false alarms" in capsys.readouterr().out
    for name in ("page.html", "table.csv"):
        anomaly.main(["predict", "--run", run, str(tmp_path / "bad"), "--output", str(tmp_path / name)])
    assert capsys.readouterr().out.count(" defect ") == 12
    assert (tmp_path / "page.html").read_text().count("<img") == 12
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 7

    files = sorted((tmp_path / "bad").iterdir())
    served = tf.saved_model.load(str(tmp_path / "run" / "saved_model" / "1")).signatures["serving_default"]
    found = served(image_bytes=tf.constant([file.read_bytes() for file in files]))
    assert found["defect"].numpy().all()
    assert roc_auc_score(np.stack(masks).ravel(), found["map"].numpy().ravel()) > 0.85
    pixels = np.stack([np.asarray(PIL.Image.open(file), np.float32) for file in files])[..., None]
    expected = open_anomaly_detector(run).model.predict_on_batch(pixels / 127.5 - 1.0)
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4)


def test_the_score_of_an_image_is_that_of_the_paper():
    """Equation 7, term by term in NumPy."""
    rng = np.random.default_rng(0)
    memory, patches = rng.normal(size=(30, 5)).astype(np.float32), rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    layer = PatchMemory(30, (12, 16))
    layer.build(patches.shape)
    layer.set_weights([memory])
    found = layer(patches)
    for image, score in zip(patches.reshape(2, 12, 5), np.asarray(found["score"]), strict=True):
        distances = np.linalg.norm(image[:, None] - memory, axis=-1)
        worst = np.argmax(distances.min(axis=1))
        match = np.argmin(distances[worst])
        around = np.argsort(np.linalg.norm(memory - memory[match], axis=-1))[:9]
        exponentials = np.exp(distances[worst, around])
        weight = 1.0 - np.exp(distances[worst, match]) / exponentials.sum()
        assert score == pytest.approx(weight * distances[worst, match], rel=1e-4)


def test_the_coreset_and_the_distances_are_those_of_the_paper():
    """Algorithm 1 with all distances, and equation 6, by scikit-learn."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(90, 7)).astype(np.float32)
    found = k_center(vectors, 20, seed=5)
    between, chosen = pairwise_distances(vectors.astype(np.float64)), [found[0]]
    while len(chosen) < 20:
        chosen.append(np.argmax(between[:, chosen].min(axis=1)))
    np.testing.assert_array_equal(found, chosen)
    patches = rng.normal(size=(6, 7)).astype(np.float32)
    distances, nearest = NearestNeighbors(n_neighbors=1).fit(vectors[found]).kneighbors(patches)
    between_both = np.asarray(distances_to(patches, vectors[found]))
    np.testing.assert_allclose(between_both.min(axis=1), distances[:, 0], rtol=1e-4)
    np.testing.assert_array_equal(between_both.argmin(axis=1), nearest[:, 0])


def test_equal_vectors_are_each_chosen_once():
    assert sorted(k_center(np.ones((6, 3)), 6, seed=0).tolist()) == [0, 1, 2, 3, 4, 5]


def test_a_folder_of_too_few_parts_is_refused(tmp_path):
    make_parts(tmp_path / "good", 3, defects=False)
    keras_vit.build(BACKBONE, image_size=SIZE, channels=1, num_classes=3).save(tmp_path / "b.keras")
    with pytest.raises(UserError, match="has 3 images; give at least 5"):
        options = ["--data", str(tmp_path / "good"), "--workdir", str(tmp_path / "r")]
        anomaly.main(["fit", "--run", str(tmp_path / "b.keras"), *options])
