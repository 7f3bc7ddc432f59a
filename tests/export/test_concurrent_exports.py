"""Exports of two processes into one directory at once."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, ViTConfig
from keras_vit.files.labels import labels_text
from keras_vit.images.files import Samples
from tests.support import randomize

SIZE = (12, 30)


@pytest.mark.slow
def test_two_processes_that_export_at_once_write_two_complete_versions(tmp_path):
    config = ViTConfig(patch_size=(4, 6), hidden_size=48, num_layers=1, num_heads=3, mlp_dim=64)
    model = randomize(keras_vit.build(config, preprocessing=Preprocessing(SIZE), num_classes=3))
    run = tmp_path / "run"
    run.mkdir()
    model.save(run / "model.keras")
    (run / "labels.txt").write_text(labels_text(("ant", "bee", "cod")), encoding="utf-8")
    images = np.random.default_rng(0).integers(0, 256, (4, *SIZE, 3), dtype=np.uint8)
    files = tuple(tf.io.encode_png(image).numpy() for image in images)
    Samples(files, np.array([0, 1, 2, 0])).save(run / "samples.npz")
    command = [sys.executable, "-m", "export.saved_model", "--run", str(run), "--output", str(tmp_path / "served")]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for _ in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-3000:]
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["1", "2"]
    expected = model.predict(model_input(model, images), verbose=0)
    contents = []
    for version in ("1", "2"):
        path = tmp_path / "served" / version
        contents.append({str(file.relative_to(path)) for file in path.rglob("*")})
        answer = tf.saved_model.load(path).signatures["image_tensor_uint8"](image=tf.constant(images))
        np.testing.assert_allclose(answer["logits"], expected, atol=1e-4)
    assert contents[0] == contents[1]
    assert {"saved_model.pb", "README.md", "report.json"} <= contents[0]


def model_input(model, images: np.ndarray) -> np.ndarray:
    return np.asarray(keras_vit.preprocessing_of(model).normalize(images))
