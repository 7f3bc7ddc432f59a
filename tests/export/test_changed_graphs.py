"""Models whose graph a user has changed: what is written of them computes what they do, or they are refused."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.files import fingerprint
from export.inference_model import inference_model
from export.options import SourceOptions
from export.run import open_run
from export.source import Provenance, open_model, random_images
from keras_vit import UserError
from keras_vit.checkpoints.load import changed_layer
from keras_vit.checkpoints.save import convert
from keras_vit.files.labels import LABELS
from keras_vit.images.files import Samples
from keras_vit.models.build import classifier_head, logits_model
from keras_vit.models.layers import gelu_erf
from tests.exports import exported_model, saved_model_of
from tests.support import TINY, TINY_IMAGE, TINY_STEM, others_slow, randomize
from training.loop.build import rebuilt

NAMES = ("ash", "birch", "cedar")


def _base(config=TINY, **options) -> keras.Model:
    return randomize(keras_vit.build(config, image_size=TINY_IMAGE, **{"num_classes": 3, **options}))


def _behind(*layers: keras.layers.Layer, place: str = "head") -> keras.Model:
    """The base with more layers behind its logits, or behind its pooling."""
    model = _base()
    x = model.get_layer(place).output
    for layer in layers:
        x = layer(x)
    return keras.Model(model.input, x if place == "head" else model.get_layer("head")(x))


def _with_pooling(pooling: Callable) -> keras.Model:
    """The base with another pooling of its tokens, and a head of the usual name."""
    model = _base()
    tokens = model.get_layer("Transformer.encoder_norm").output
    return randomize(keras.Model(model.input, keras.layers.Dense(3, name="head")(pooling(tokens))))


def _replaced(name: str, replacement: Callable, config=TINY) -> keras.Model:
    """A clone of the base in which one call is replaced: replacement(layer, inputs) -> outputs."""
    model = _base(config)

    def call(layer, *arguments, **options):
        return replacement(layer, *arguments) if layer.name == name else layer(*arguments, **options)

    return randomize(keras.models.clone_model(model, call_function=call))


def _set(name: str, attribute: str, value: object, config=TINY) -> keras.Model:
    model = _base(config)
    setattr(model.get_layer(name), attribute, value)
    return model


def _own_head(**options) -> keras.Model:
    model = _base(num_classes=0)
    return randomize(keras.Model(model.input, keras.layers.Dense(3, **options)(model.output)))


def _last_block_again(*, nested: bool) -> keras.Model:
    """The base with its last block a second time: the same layers, or a copy of them as an inner model."""
    model = _base()
    tokens, x = model.get_layer("Transformer.encoderblock_0").output, model.get_layer(BLOCK).output
    if nested:
        x = keras.models.clone_model(keras.Model(tokens, x))(x)
    else:
        again = {id(tokens): x}
        for layer in model.layers:
            if layer.name.startswith(BLOCK):
                inputs = keras.tree.map_structure(lambda tensor: again[id(tensor)], layer.input)
                takes_several = isinstance(inputs, list) and not isinstance(layer, keras.layers.Add)
                made = layer.output
                again[id(made)] = x = layer(*inputs) if takes_several else layer(inputs)
    for name in ("Transformer.encoder_norm", "pool", "head"):
        x = model.get_layer(name)(x)
    return randomize(keras.models.clone_model(keras.Model(model.input, x)))  # as it is when it is loaded


BLOCK = "Transformer.encoderblock_1"
CHANGES: dict[str, Callable[[], keras.Model]] = {
    "own mean of all tokens": lambda: _with_pooling(keras.layers.GlobalAveragePooling1D()),
    "a norm before the head": lambda: _behind(keras.layers.LayerNormalization(epsilon=1e-3), place="pool"),
    "a scaling behind the logits": lambda: _behind(keras.layers.Rescaling(0.1)),
    "a division of keras.ops": lambda: _behind(lambda logits: logits / 7.0),
    "a softmax": lambda: _behind(keras.layers.Softmax()),
    "a head with softmax": lambda: _own_head(name="head", activation="softmax"),
    "another activation": lambda: _set(f"{BLOCK}.MlpBlock_3.Dense_0", "activation", gelu_erf),
    "another epsilon": lambda: _set("Transformer.encoder_norm", "epsilon", 0.3),
    "no residual connection": lambda: _replaced(f"{BLOCK}.residual", lambda layer, inputs: inputs[1]),
    "the tokens squared": lambda: _replaced("patches", lambda layer, x: layer(x) ** 2),
    "the images scaled before the spec": lambda: _replaced("spec", lambda layer, x: layer(x / 127.5 - 1.0)),
    "a scaled query": lambda: _replaced(
        f"{BLOCK}.MultiHeadDotProductAttention_1.query", lambda layer, x: keras.ops.tanh(layer(x))
    ),
    "a shift of the last block's tokens": lambda: _replaced(
        f"{BLOCK}.LayerNorm_2", lambda layer, x: layer(keras.ops.roll(x, 1, axis=1))
    ),
    "the last block again": lambda: _last_block_again(nested=False),
    "a copy of the last block": lambda: _last_block_again(nested=True),
    "a pooling of a ResNet": lambda: _replaced(
        "pool", lambda layer, x: keras.layers.GlobalMaxPooling2D(name="largest")(x), TINY_STEM
    ),
}
# The outputs are those of the model that the config describes, so that nothing needs to be refused.
EQUAL: dict[str, Callable[[], keras.Model]] = {
    "a head of Keras": lambda: _own_head(name="head"),
    "a head of another name": lambda: _own_head(name="birds"),
    "a dropout before the head": lambda: _behind(keras.layers.Dropout(0.5), place="pool"),
}


@functools.cache
def changed(name: str) -> keras.Model:
    """A changed model, of which tests only read."""
    return (CHANGES | EQUAL)[name]()


REFUSED = ("a softmax", "a head with softmax", "the images scaled before the spec")
# Another layer, one more, another value, the same layers once more, and other inputs; the others take minutes.
FAST = ("own mean of all tokens", "a softmax", "another epsilon", "the last block again", REFUSED[-1])
ONE_OF_EACH = others_slow(CHANGES, *FAST)


def _agree(outputs: object, model: keras.Model, images: np.ndarray) -> None:
    np.testing.assert_allclose(outputs, model(images), rtol=1e-4, atol=1e-4)


def _images(model: keras.Model) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1.0, 1.0, (6, *model.input_shape[1:])).astype(np.float32)


@pytest.mark.parametrize("change", ONE_OF_EACH)
def test_a_changed_model_is_not_adapted_nor_written_as_another_one(change, tmp_path):
    model = changed(change)
    with pytest.raises(UserError, match="was changed after keras_vit built it: its layer '(.*)' differs") as caught:
        keras_vit.adapt(model)
    assert repr(changed_layer(model)) in str(caught.value)
    with pytest.raises(UserError, match="its layer .* differs .* save it with model.save|cannot express this ResNet"):
        keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz")
    assert not (tmp_path / "model.npz").exists()


@pytest.mark.parametrize("change", others_slow(EQUAL, "a head of another name", "a dropout before the head"))
def test_a_change_that_computes_the_same_is_adapted_and_written(change, tmp_path):
    model = changed(change)
    images = _images(model)
    _agree(keras_vit.adapt(model, image_size=TINY_IMAGE)(images), model, images)
    keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz")
    config = keras_vit.config_of(model)
    same = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=3)
    keras_vit.load_checkpoint(same, tmp_path / "model.npz")
    _agree(same(images), model, images)


def test_a_list_of_the_one_output_is_no_change():
    model = _base()
    assert changed_layer(keras.Model(model.inputs, model.outputs)) is None


@pytest.mark.parametrize("change", [*ONE_OF_EACH, *others_slow(EQUAL, "a head of another name")])
def test_the_model_of_an_export_computes_what_the_changed_one_does(change):
    model = changed(change)

    def exported() -> keras.Model:
        exported_model(model, NAMES, Samples((), np.zeros(0))).with_logits()
        return inference_model(logits_model(model), for_tensorflow=True)

    if change in REFUSED:
        with pytest.raises(UserError):
            exported()
        return
    images = _images(model)
    _agree(exported()(images), model, images)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["own mean of all tokens", "a scaled query", "a pooling of a ResNet"])
def test_a_saved_model_is_of_the_changed_model_in_a_file(change, tmp_path):
    model = changed(change)
    model.save(tmp_path / "mine.keras")
    (tmp_path / LABELS).write_text("\n".join(NAMES))
    options = SourceOptions(run=str(tmp_path / "mine.keras"), labels=str(tmp_path / LABELS))
    source = open_model(open_run(options), options)
    path, found = saved_model_of(source.model, NAMES, source.samples, tmp_path / "served", origin=source.origin)
    images, served = _images(model), tf.saved_model.load(str(path)).signatures
    _agree(served["image_tensor"](image=tf.constant(images))["logits"], model, images)
    assert found["max_abs_diff"] <= found["tolerance"]
    features = served["features"](image_bytes=tf.constant([source.samples.encoded[0]]))["features"]
    assert features.shape[1] == classifier_head(model).input.shape[1]


def test_a_changed_model_is_not_converted_and_loads_as_it_is(tmp_path):
    model = changed("own mean of all tokens")
    model.save(tmp_path / "mine.keras")
    images = _images(model)
    _agree(keras_vit.from_checkpoint(tmp_path / "mine.keras")(images), model, images)
    with pytest.raises(UserError, match="its layer 'global_average_pooling1d.*' differs"):
        keras_vit.from_checkpoint(tmp_path / "mine.keras", num_classes=5)
    with pytest.raises(UserError, match="its layer 'global_average_pooling1d.*' differs"):
        convert(tmp_path / "mine.keras", tmp_path / "mine.npz", "npz")
    with pytest.raises(UserError, match="its layer 'global_average_pooling1d.*' differs"):
        rebuilt(model)


def test_a_model_with_a_call_of_its_own_is_refused(tmp_path):
    class Threefold(keras.Model):
        def call(self, images, training=False):
            return 3.0 * super().call(images, training=training)

    base = _base()
    model = Threefold(base.input, base.output, name="threefold")
    with pytest.raises(UserError, match="its layer 'threefold' differs"):
        keras_vit.adapt(model)
    with pytest.raises(UserError, match="its layer 'threefold' differs"):
        keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz")
    with pytest.raises(UserError, match="of the class Threefold, whose call"):
        exported_model(model, NAMES, Samples((), np.zeros(0))).with_logits()


@pytest.mark.parametrize(
    ("layer", "attribute", "value"),
    [
        (f"{BLOCK}.LayerNorm_0", "call", lambda x: x),
        (f"{BLOCK}.MlpBlock_3.Dense_0", "bias", None),
        (f"{BLOCK}.MultiHeadDotProductAttention_1", "num_heads", 6),
        ("birds", "call", lambda images, **options: images),
    ],
)
def test_an_attribute_that_was_set_later_is_not_lost(layer, attribute, value):
    model = _base(name="birds")
    setattr(model if layer == "birds" else model.get_layer(layer), attribute, value)
    with pytest.raises(UserError, match=f"its layer '{layer}' differs"):
        keras_vit.adapt(model)


def test_a_model_around_one_of_ours_is_refused_by_exports_with_the_way_out():
    class Wrapper(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = _base()

        def call(self, images):
            return self.inner(images)

    class Doubled(Wrapper):
        def __init__(self):
            super().__init__()
            self.spec = self.inner.get_layer("spec")  # it need not have inputs

    for model, words in (
        (Wrapper(), "contains a model of keras_vit.*connect your own layers"),
        (Doubled(), "whose call"),
    ):
        with pytest.raises(UserError, match=words):
            exported_model(model, NAMES, Samples((), np.zeros(0))).with_logits()


def test_an_export_of_a_model_whose_input_and_output_have_names_has_those_of_the_signature():
    model = _base()
    named = keras.Model({"image": model.input}, {"scores": model.output})
    exported = exported_model(named, NAMES, Samples((), np.zeros(0))).with_logits().model
    images = _images(model)
    _agree(inference_model(exported, for_tensorflow=True)(images), model, images)


def test_probabilities_are_not_exported_as_logits(tmp_path):
    model = changed("a softmax")
    samples = random_images(keras_vit.preprocessing_of(model))
    with pytest.raises(UserError, match="ends with the softmax 'softmax.*', but its logits are needed"):
        saved_model_of(model, NAMES, samples, tmp_path / "served")
    hidden = _behind(keras.layers.Softmax(), keras.layers.Reshape((3,)))
    with pytest.raises(UserError, match="outputs probabilities, but an export takes logits"):
        saved_model_of(hidden, NAMES, samples, tmp_path / "served")


def test_a_model_around_one_of_ours_names_the_inner_one():
    inner = _base()
    whole = keras.Sequential([keras.Input(inner.input_shape[1:]), keras.layers.Rescaling(2.0), inner])
    with pytest.raises(UserError, match=r"give that one, model.get_layer\('model'\)"):
        keras_vit.adapt(whole)
    with pytest.raises(UserError, match="contains a model of keras_vit, but is none itself"):
        keras_vit.intermediates(whole, "logits")
    with pytest.raises(UserError, match="was not built by keras_vit; take one of keras_vit.build"):
        keras_vit.adapt(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))


def test_a_lambda_in_a_file_is_not_run_and_named(tmp_path):
    _behind(keras.layers.Lambda(lambda logits: 2.0 * logits)).save(tmp_path / "mine.keras")
    with pytest.raises(UserError, match=r"layer of its author's code, Lambda, which is not run from a file; replace"):
        keras_vit.from_checkpoint(tmp_path / "mine.keras")


def test_an_adapted_model_keeps_its_name_and_its_frozen_layers():
    model = _base(name="birds")
    model.trainable = False
    assert not keras_vit.adapt(model, image_size=(24, 30)).trainable_weights
    adapted = keras_vit.adapt(model, num_classes=5)
    assert adapted.name == "birds"
    assert {weight.path.split("/")[0] for weight in adapted.trainable_weights} == {"head"}


def test_a_new_temperature_is_not_another_model_but_another_layer_is():
    model = _base()
    own = fingerprint(model, NAMES, Provenance())
    assert fingerprint(model, NAMES, Provenance(temperature=1.7)) == own
    assert fingerprint(model, NAMES, Provenance(multi_label=True)) != own
    model.get_layer("Transformer.encoder_norm").epsilon = 0.3
    assert fingerprint(model, NAMES, Provenance()) != own
