"""What users of Keras expect from a model: arguments of `build`, dtypes, one intermediate, preprocessing as a layer."""

import concurrent.futures
import dataclasses
import warnings

import keras
import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import Preprocessing, UserError
from keras_vit.models.build import dtype_policy, logits_model
from keras_vit.models.image_model import _with_checked_range
from keras_vit.models.patch_memory import local_features
from tests.support import FIXTURES, TINY, TINY_IMAGE, TINY_STEM, randomize

ONE_BLOCK = dataclasses.replace(TINY, num_layers=1)


def tiny(**options) -> keras.Model:
    return keras_vit.build(ONE_BLOCK, **{"image_size": TINY_IMAGE, "num_classes": 3, **options})


@pytest.fixture(name="model", scope="module")
def _model() -> keras.Model:
    """With random weights, for tests that change nothing of it."""
    return randomize(tiny())


def test_drop_rates_are_arguments_of_build():
    model = tiny(dropout_rate=0.1, attention_dropout_rate=0.2, stochastic_depth_rate=0.3)
    expected = dataclasses.replace(ONE_BLOCK, dropout_rate=0.1, attention_dropout_rate=0.2, stochastic_depth_rate=0.3)
    assert keras_vit.config_of(model) == expected
    assert keras_vit.config_of(keras_vit.build("testing", image_size=32)).dropout_rate == 0.1
    assert keras_vit.config_of(keras_vit.build("testing", image_size=32, dropout_rate=0)).dropout_rate == 0


@pytest.mark.parametrize(
    ("activation", "function"),
    [("softmax", keras.ops.softmax), pytest.param("sigmoid", keras.ops.sigmoid, marks=pytest.mark.slow)],
)
def test_a_classifier_activation_gives_probabilities_and_keeps_the_weights(activation, function, tiny_images, tmp_path):
    model, plain = randomize(tiny(classifier_activation=activation)), randomize(tiny())
    logits = plain(tiny_images)
    np.testing.assert_allclose(model(tiny_images), function(logits), atol=1e-6)
    assert model.output_names == ["probabilities"]
    for without in (keras_vit.intermediates(model, "logits"), logits_model(model)):
        np.testing.assert_allclose(without(tiny_images), logits)
    keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz")
    keras_vit.load_checkpoint(tiny(), tmp_path / "model.npz")


@pytest.mark.parametrize(("config", "dtype"), [(ONE_BLOCK, "mixed_bfloat16"), (TINY_STEM, None)], ids=["vit", "resnet"])
def test_probabilities_are_float32_and_stay_in_an_adapted_model(config, dtype, tiny_images):
    model = keras_vit.build(config, image_size=TINY_IMAGE, classifier_activation="softmax", num_classes=3, dtype=dtype)
    np.testing.assert_allclose(np.sum(randomize(model)(tiny_images), axis=1), 1.0, atol=1e-5)
    adapted = keras_vit.adapt(model, num_classes=5)
    assert (adapted.output_names, adapted.output_shape) == (["probabilities"], (None, 5))
    assert {layer.dtype_policy.name for layer in adapted.layers} == {layer.dtype_policy.name for layer in model.layers}


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("BiT-R26x1", {"stochastic_depth_rate": 0.1}, "stochastic_depth_rate do not apply to a ResNet"),
        (TINY, {"dropout_rate": 1.5}, r"dropout_rate must be in \[0, 1\)"),
        (TINY, {"classifier_activation": "relu"}, "classifier_activation must be one of softmax, sigmoid, but is"),
        (TINY, {"num_classes": 0, "classifier_activation": "softmax"}, "is for a model with classes"),
    ],
)
def test_wrong_arguments_of_build_are_refused(config, options, words):
    with pytest.raises(UserError, match=words):
        keras_vit.build(config, image_size=TINY_IMAGE, **options)


def test_the_dtype_of_a_model_is_an_argument_and_the_global_policy_stays():
    before = keras.config.dtype_policy().name
    model = tiny(dtype="mixed_bfloat16")
    assert (model.output.dtype, model.weights[0].dtype) == ("bfloat16", "float32")
    assert keras.config.dtype_policy().name == before
    with pytest.raises(ValueError, match="half"):
        tiny(dtype="half")
    with pytest.raises(UserError):
        keras_vit.build(TINY, image_size=13, dtype="bfloat16")
    assert keras.config.dtype_policy().name == before


def test_name_and_dtype_of_a_model_from_a_checkpoint():
    path = FIXTURES / "vit_token.npz"
    model = keras_vit.from_checkpoint(path, name="birds", dtype="bfloat16", classifier_activation="softmax")
    expected = keras_vit.from_checkpoint(path)
    assert (model.name, model.output_names) == ("birds", ["probabilities"])
    for weight, exact in zip(model.weights, expected.weights, strict=True):
        assert weight.dtype == "bfloat16"
        rounded = keras.ops.convert_to_numpy(keras.ops.cast(exact, "bfloat16")).astype(np.float32)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight).astype(np.float32), rounded)


def test_one_name_gives_the_intermediate_itself(model, tiny_images):
    block = keras_vit.intermediates(model, "block_0")(tiny_images)
    np.testing.assert_array_equal(block, keras_vit.intermediates(model, ["block_0"])(tiny_images)["block_0"])
    with pytest.raises(UserError, match="no intermediate named 'blok_0'; the nearest names are block_0"):
        keras_vit.intermediates(model, "blok_0")


def test_a_global_policy_that_is_set_later_does_not_round_what_is_inside(model, tiny_images):
    expected = keras_vit.intermediates(model, "attention_0")(tiny_images)
    with dtype_policy("mixed_bfloat16"):
        found = keras_vit.intermediates(model, "attention_0")(tiny_images)
        maps = keras_vit.feature_map(model, "block_0"), keras_vit.feature_maps(model, [0]), local_features(model, [0])
    np.testing.assert_array_equal(found, expected)
    assert {each.outputs[0].dtype for each in maps} == {"float32"}


def test_a_model_that_was_cut_has_the_intermediates_that_are_left(tiny_images):
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=3)
    cut = keras.Model(model.input, model.get_layer("Transformer.encoderblock_0").output)
    assert list(keras_vit.intermediates(cut).output) == ["patch_embedding", "embedded", "block_0", "attention_0"]
    with pytest.raises(UserError, match="no intermediate named 'block_1'; the nearest names are block_0"):
        keras_vit.feature_map(cut, "block_1")
    resnet = keras_vit.build(dataclasses.replace(TINY_STEM, preactivation=True), image_size=TINY_IMAGE)
    cut = keras.Model(resnet.input, keras_vit.get_layer(resnet, "stage1").output)
    assert list(keras_vit.intermediates(cut).output) == ["root", "stage1"]


def test_what_makes_the_logits_may_be_an_operation_or_one_of_several_outputs(model):
    divided = keras.Model(model.input, model.output / 2.0)
    assert keras_vit.get_layer(divided, "logits").output is divided.output
    two = keras.Model(model.input, {"logits": model.output, "features": model.get_layer("pool").output})
    assert keras_vit.get_layer(two, "logits").name == "head"
    assert keras_vit.intermediates(two, "logits").output is model.output
    mean = keras_vit.build(dataclasses.replace(ONE_BLOCK, distillation="head"), image_size=TINY_IMAGE)
    with pytest.raises(UserError, match="No layer outputs 'pre_logits' alone"):
        keras_vit.get_layer(mean, "pre_logits")


def test_intermediates_are_never_those_of_another_model_with_the_same_layers(tiny_images, tmp_path):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=3))
    norm, pool, head = map(model.get_layer, ("Transformer.encoder_norm", "pool", "head"))
    lens = keras.Model(model.input, head(pool(norm(model.get_layer("Transformer.encoderblock_0").output))))
    np.testing.assert_array_equal(head(keras_vit.intermediates(model, "pre_logits")(tiny_images)), model(tiny_images))
    keras_vit.intermediates(lens, "block_0")
    with pytest.raises(UserError, match="calls layers that another model called before"):
        keras_vit.intermediates(lens, "pre_logits")
    lens.save(tmp_path / "lens.keras")
    loaded = keras.models.load_model(tmp_path / "lens.keras")
    np.testing.assert_array_equal(head(keras_vit.intermediates(loaded, "pre_logits")(tiny_images)), lens(tiny_images))


def test_numpys_integers_are_integers_everywhere(tmp_path):
    two = np.int64(2)
    config = keras_vit.ViTConfig(np.int32(4), np.int64(12), two, np.uint8(3), np.int16(20))
    model = keras_vit.build(config, image_size=np.int64(12), num_classes=two, channels=np.int32(1))
    assert model.input_shape == (None, 12, 12, 1)
    keras_vit.chunk_attention(model, two)
    keras_vit.chunk_attention(model, None)
    model.save(tmp_path / "model.keras")
    keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz")
    loaded = keras_vit.from_checkpoint(
        tmp_path / "model.npz", image_size=np.int64(16), num_classes=np.int64(5), num_heads=np.int64(3)
    )
    assert (loaded.input_shape, loaded.output_shape) == ((None, 16, 16, 1), (None, 5))
    adapted = keras_vit.adapt(model, image_size=np.array([8, 16]), patch_size=two, channels=np.int64(3))
    assert adapted.input_shape == (None, 8, 16, 3)
    table = np.zeros((1, 10, 12), np.float32)
    resized = keras_vit.resize_position_embedding(table, np.array([3, 3]), (two, two), num_prefix_tokens=np.int64(1))
    assert resized.shape == (1, 5, 12)
    assert keras_vit.feature_map(loaded, "block_1").output_shape == (None, 4, 4, 12)
    assert keras_vit.feature_maps(loaded, np.arange(2)).output["block_0"].shape == (None, 4, 4, 12)


def test_a_model_of_another_size_is_shown_the_same_part_of_an_image():
    preprocessing = keras_vit.Preprocessing(32, resize="resize-small", crop_from=40)
    for size, crop_from in ((16, 20), ((48, 40), 60), (36, 45)):
        assert preprocessing.for_image_size(size).crop_from == crop_from
    model = keras_vit.build(dataclasses.replace(ONE_BLOCK, patch_size=4), preprocessing=preprocessing, num_classes=3)
    assert keras_vit.preprocessing_of(keras_vit.adapt(model, image_size=(48, 40))).crop_from == 60


_RULES = {
    "stretch": {},
    "crop": {"resize": "crop"},
    "resize-small": {"resize": "resize-small", "crop_from": 16},
    "pad": {"resize": "pad"},
}


@pytest.fixture(name="photos")
def _images() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (4, 23, 31, 3), dtype=np.uint8)


@pytest.mark.parametrize(("rule", "channels"), [*zip(_RULES, (1, 3, 1, 3), strict=True)])
def test_batches_lists_and_the_layer_are_each_image_by_itself(rule, channels, photos, tmp_path):
    preprocessing = Preprocessing((12, 14), channels, value_range=(0.0, 1.0), **_RULES[rule])
    expected = np.stack([preprocessing(photo) for photo in photos])
    # Some processors sum the products of a batch in another order.
    np.testing.assert_allclose(preprocessing(photos), expected, atol=2e-7)
    mixed = preprocessing([PIL.Image.fromarray(photos[0]), photos[1][:20]])
    np.testing.assert_array_equal(mixed[0], expected[0])
    np.testing.assert_array_equal(mixed[1], preprocessing(photos[1][:20]))
    pipeline = keras.Sequential([keras.Input((None, None, 3), dtype="uint8"), preprocessing.layer()])
    assert pipeline.output_shape == (None, 12, 14, channels)
    np.testing.assert_allclose(pipeline(photos), expected, atol=2e-7)
    np.testing.assert_allclose(pipeline.predict(photos, verbose=0), expected, atol=3e-7)  # a graph rounds once more
    assert preprocessing.layer()(keras.KerasTensor((None, 23, 31, 3), "uint8")).dtype == "float32"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_a_pil_image_of_any_mode_is_taken(mode, photos):
    image = PIL.Image.fromarray(photos[0])
    if mode == "I;16":
        image = PIL.Image.fromarray(photos[0, :, :, 0].astype(np.uint16) * 257)
        expected = np.repeat(photos[0, :, :, :1], 3, axis=-1)
    else:
        image = image.convert(mode)
        expected = np.asarray(image.convert("RGB"))
    preprocessing = Preprocessing(expected.shape[:2])
    np.testing.assert_array_equal(preprocessing(image), preprocessing(expected))


def test_the_layer_in_front_of_a_model_is_saved_with_it(model, photos, tmp_path):
    preprocessing = keras_vit.preprocessing_of(model)
    whole = keras.Sequential([keras.Input((None, None, 3), dtype="uint8"), preprocessing.layer(), model])
    whole.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert loaded.layers[0].preprocessing == preprocessing
    np.testing.assert_allclose(loaded(photos), model(preprocessing(photos)), atol=1e-6)


def test_the_layer_is_float32_under_mixed_precision(photos):
    preprocessing = Preprocessing((12, 14))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layer = preprocessing.layer()
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(layer(photos), preprocessing(photos))


def test_the_summary_tells_all_layers_apart(model, capsys):
    keras_vit.summary(model)
    header, *rows, total = capsys.readouterr().out.splitlines()
    assert header.split() == ["Layer", "Type", "Output", "shape", "Parameters"]
    assert [row.split()[0] for row in rows] == [layer.name for layer in model.layers]
    assert len({len(row) for row in rows}) == 1
    assert total == f"model: {model.count_params():,} parameters, {model.count_params():,} of them trainable"


def warnings_of_fit(model: keras.Model, images, labels=None, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(images, labels, verbose=0, **options)
    return [str(each.message) for each in caught if "this model" in str(each.message)]


def in_memory(images, labels, batch_size):
    return (images, labels)


def as_dataset(images, labels, batch_size):
    tf = pytest.importorskip("tensorflow")
    return (tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size).prefetch(1),)


@pytest.fixture(scope="module")
def compiled() -> keras.Model:
    model = tiny()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    return model


PIXELS = np.random.default_rng(0).uniform(0, 255, (4, *TINY_IMAGE, 3)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0])


@pytest.mark.parametrize("form", [in_memory, as_dataset])
def test_fit_warns_once_of_pixels_in_another_range(compiled, form):
    shown = warnings_of_fit(compiled, *form(PIXELS, LABELS, 2), epochs=2)
    assert len(shown) == 1
    assert "but this model was made for -1 to 1" in shown[0]
    assert len(warnings_of_fit(compiled, *form(PIXELS / 255, LABELS, 2))) == 1
    as_advised = keras_vit.preprocessing_of(compiled).normalize(PIXELS)
    assert warnings_of_fit(compiled, *form(as_advised, LABELS, 2)) == []


def test_threads_that_read_the_looked_at_dataset_at_once_do_not_disturb_each_other(compiled):
    # Keras does so on JAX.
    images = PIXELS / 127.5 - 1
    data = _with_checked_range(as_dataset(images, LABELS, 4)[0], keras_vit.preprocessing_of(compiled))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for batches in pool.map(list, [data] * 40):
            np.testing.assert_array_equal(batches[0][0], images)


def test_fit_is_silent_about_constant_and_slightly_shifted_images_and_several_replicas(compiled, monkeypatch):
    for images in (0 * PIXELS, PIXELS / 127.5 - 1.3):
        assert warnings_of_fit(compiled, images, LABELS) == []
    monkeypatch.setattr(type(compiled.distribute_strategy), "num_replicas_in_sync", 2)  # whose graph divides the data
    assert warnings_of_fit(compiled, PIXELS, LABELS) == []


def test_the_looked_at_dataset_trains_as_the_same_images_in_memory():
    histories = []
    for form in (in_memory, as_dataset):
        keras.utils.set_random_seed(1)
        model = randomize(tiny())
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
        data = form(PIXELS / 127.5 - 1, LABELS, 4)
        histories.append(model.fit(*data, batch_size=None if len(data) == 1 else 4, shuffle=False, verbose=0).history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("loss", "activation", "warns"),
    [
        ("sparse_categorical_crossentropy", None, True),
        (keras.losses.SparseCategoricalCrossentropy(), None, True),
        (keras.losses.sparse_categorical_crossentropy, None, True),
        ("sparse_categorical_crossentropy", "softmax", False),
        ("mse", None, False),
    ],
    ids=["name", "object", "function", "softmax", "mse"],
)
def test_fit_warns_of_a_loss_of_probabilities_on_logits(loss, activation, warns, monkeypatch):
    monkeypatch.setattr(keras.Model, "fit", lambda *_, **others: None)  # what warns goes before it
    model = tiny(classifier_activation=activation)
    model.compile("sgd", loss)
    shown = warnings_of_fit(model, PIXELS / 127.5 - 1)
    assert ["expects probabilities, but this model ends with logits" in each for each in shown] == [True] * warns
