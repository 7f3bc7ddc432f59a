"""The forms of a model for training on CPUs and for export, of models that a user extended."""

import keras
import numpy as np
import pytest

import keras_vit
from export.inference_model import inference_model
from tests.support import TINY, TINY_IMAGE, randomize
from training.loop.devices.kernels import with_cpu_kernels

FORMS = {
    "cpu": with_cpu_kernels,
    "export": inference_model,
    "export for onnx": lambda model: inference_model(model, for_onnx=True),
    "export for tensorflow": lambda model: inference_model(model, for_tensorflow=True),
}


@pytest.fixture(name="extended", scope="module")
def _extended() -> keras.Model:
    """A user's head with a layer and operations of Keras, on the features of a model; its patches have LoRA."""
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=0)
    model.get_layer("embedding").enable_lora(2)
    hidden = keras.layers.Dense(9, "relu", name="mine")(model.output)
    output = keras.ops.softmax(keras.layers.Dense(4)(hidden) * 2.0)
    return randomize(keras.Model(model.input, output))


@pytest.mark.parametrize("form", FORMS)
def test_a_users_head_and_adapters_stay_in_every_form(form, extended, tiny_images):
    rebuilt = FORMS[form](extended)
    assert [layer.name for layer in rebuilt.layers] == [layer.name for layer in extended.layers]
    np.testing.assert_allclose(rebuilt(tiny_images), extended(tiny_images), rtol=1e-4, atol=1e-5)


def test_the_form_for_a_cpu_shares_its_weights_with_the_model(extended):
    rebuilt = with_cpu_kernels(extended)
    assert {id(weight) for weight in rebuilt.weights} == {id(weight) for weight in extended.weights}
