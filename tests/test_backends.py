"""keras_vit without TensorFlow: in a process of its own where it cannot be imported."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from tests.support import FIXTURES

_WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None  # importing it now raises ImportError
import dataclasses
import jax, keras, numpy as np
import keras_vit
import keras_vit.images.graph  # whose operations are TensorFlow's

assert keras.backend.backend() == "jax"
config = keras_vit.ViTConfig(patch_size=16, hidden_size=48, num_layers=1, num_heads=3, mlp_dim=96)
model = keras_vit.build(config, image_size=(64, 96), num_classes=5)
images = np.random.default_rng(0).uniform(-1, 1, (2, 64, 96, 3)).astype("float32")
"""

_TRAINED = """
assert model.output_shape == (None, 5)
golden = keras_vit.from_checkpoint(sys.argv[1])

def loss(trainable):
    non_trainable = [variable.value for variable in golden.non_trainable_variables]
    logits, _ = golden.stateless_call(trainable, non_trainable, np.load(sys.argv[2])["images"], training=True)
    return ((logits - 1.0) ** 2).mean(), logits

by_weight = jax.value_and_grad(loss, has_aux=True)
(_, logits), gradients = jax.jit(by_weight)([variable.value for variable in golden.trainable_variables])
assert all(np.isfinite(gradient).all() and np.any(gradient) for gradient in gradients)
np.save(sys.argv[3], logits)
assert keras_vit.preprocessing_of(golden)(np.zeros((40, 30, 1), "uint8")).shape == (32, 32, 3)
center = keras_vit.Preprocessing((8, 9), resize="resize-small", crop_from=12)
assert np.allclose(center(np.full((40, 30, 3), 255, "uint8")), 1.0, atol=1e-6)
"""

_INSPECTED = """
from keras_vit import inspection

dropping = dataclasses.replace(config, dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth_rate=0.3)
dropping = keras_vit.build(dropping, image_size=(64, 96), num_classes=5)
for layers in (model, dropping):
    layers.set_weights([np.random.default_rng(1).normal(0, 0.1, weight.shape) for weight in layers.weights])
found, again, expected = (inspection.features_and_gradients(m, images) for m in (dropping, dropping, model))
for one, other, same in zip(found, again, expected):
    assert np.array_equal(one, other) and np.array_equal(one, same) and np.any(one)

flash, one_operation = [], keras.ops.dot_product_attention
keras.ops.dot_product_attention = lambda *heads, flash_attention: (
    flash.append(flash_attention) or one_operation(*heads, flash_attention=flash_attention)
)
dropping(images)
expected = model(images)
assert flash == [False, False]  # Keras would choose a causal mask on a TPU, and no gradients for odd lengths on a GPU
dropping(images, training=True)
keras_vit.chunk_attention(model, 5)
np.testing.assert_allclose(model(images), expected, rtol=1e-4, atol=1e-4)
assert len(flash) == 2
"""

ENVIRONMENT = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


def test_jax_builds_runs_and_differentiates_with_tensorflow_blocked(tmp_path):
    paths = [FIXTURES / "vit_token.npz", FIXTURES / "vit_token.io.npz", tmp_path / "logits.npy"]
    code = _WITHOUT_TENSORFLOW + _TRAINED
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, env=ENVIRONMENT)
    recorded = np.load(paths[1])
    np.testing.assert_allclose(np.load(paths[2]), recorded["logits"], rtol=1e-5, atol=2e-5)
    here = keras_vit.from_checkpoint(paths[0])(recorded["images"])
    np.testing.assert_allclose(np.load(paths[2]), here, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inspection_and_every_kind_of_attention_run_on_jax_with_tensorflow_blocked():
    subprocess.run([sys.executable, "-c", _WITHOUT_TENSORFLOW + _INSPECTED], check=True, env=ENVIRONMENT)


def test_a_backend_on_which_no_model_can_be_built_is_refused_in_one_sentence(name_backend):
    name_backend("torch")
    with pytest.raises(UserError, match="TensorFlow and JAX backends of Keras, but this is torch"):
        keras_vit.build("testing", image_size=32)
    with pytest.raises(UserError, match="TensorFlow and JAX backends of Keras, but this is torch"):
        keras_vit.text_tower(FIXTURES / "tasks" / "hf_clip_two_towers")


# JAX compiles every operator anew for every shape.
@pytest.mark.slow
def test_golden_data_agree_on_jax_with_tensorflow_blocked():
    code = "import sys; sys.modules['tensorflow'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    file = str(pathlib.Path(__file__).parent / "models" / "test_parity.py")
    arguments = ["-q", "-p", "no:cacheprovider", file]
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
