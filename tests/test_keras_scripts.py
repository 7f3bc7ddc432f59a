"""What a script in Keras takes from the packages: data, predictions, measures and exports of a model in memory."""

import pathlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import export
import keras_vit
import training
from keras_vit import UserError, ViTConfig
from keras_vit.run import Run
from tests.support import FIXTURES, randomize
from training import predict
from training.data.pipeline import evaluation_batches
from training.data.sources import DataOptions, open_source

CONFIG = ViTConfig(patch_size=8, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)


@pytest.fixture(name="photos", scope="module")
def _images(tmp_path_factory) -> pathlib.Path:
    """Two classes of 20 JPEG files, of which two each are for evaluation; some are turned by their EXIF data."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    for label in ("ant", "bee"):
        (folder / label).mkdir()
        for number in range(20):
            image = PIL.Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
            image.save(folder / label / f"{number}.jpg", exif=exif if number % 2 else PIL.Image.Exif())
    return folder


@pytest.fixture(name="model", scope="module")
def _model() -> keras.Model:
    """It classifies as timm does, with its classes in another order than the folders."""
    preprocessing = keras_vit.Preprocessing((16, 16), library="timm", interpolation="bicubic")
    model = randomize(keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=2))
    keras_vit.set_classes(model, ["bee", "ant"])
    return model


def test_a_file_is_decoded_alike_in_a_graph_and_by_its_path_or_bytes_without_a_warning(photos, model, caplog, capfd):
    preprocess = keras_vit.preprocessing_of(model)
    files = sorted(map(str, photos.glob("*/1*.jpg")))
    data = tf.data.Dataset.from_tensor_slices(files)
    in_graph = list(data.map(lambda path: preprocess(preprocess.decode(tf.io.read_file(path)))).as_numpy_iterator())
    list(data.map(lambda path: preprocess.decode(tf.io.read_file(path))[None]).map(preprocess))
    for file, pixels in zip(files, in_graph, strict=True):
        decoded = preprocess.decode(file)
        np.testing.assert_array_equal(decoded, preprocess.decode(pathlib.Path(file).read_bytes()))
        np.testing.assert_array_equal(np.asarray(preprocess(decoded)), pixels)
        np.testing.assert_array_equal(np.asarray(preprocess(PIL.Image.open(file))), pixels)
    assert "AutoGraph" not in caplog.text + "".join(capfd.readouterr())
    with pytest.raises(UserError, match="The file is not a readable image"):
        preprocess.decode(b"no image")


def test_a_data_set_has_what_evaluation_sees_and_another_order_in_each_epoch(photos, model):
    test = training.dataset(f"folder:{photos}", model, split="evaluation", batch_size=3)
    assert (test.class_names, len(test)) == (("bee", "ant"), 2)
    images, labels = (np.concatenate(parts) for parts in zip(*test.as_numpy_iterator(), strict=True))
    source, preprocessing = open_source(DataOptions(f"folder:{photos}")), keras_vit.preprocessing_of(model)
    expected = next(iter(evaluation_batches(source.evaluation, preprocessing, num_classes=2, batch_size=4)))
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1].numpy()[:, ::-1])
    augment = {"flip": True, "mixup": 0.2}
    train = training.dataset(f"folder:{photos}", model, batch_size=8, augment=augment)
    first, second = (np.concatenate([x for x, _ in train.as_numpy_iterator()]) for _ in range(2))
    assert first.shape == (32, 16, 16, 3)
    assert np.abs(first - second).max() > 0
    with pytest.raises(TypeError, match="flips"):
        training.dataset(f"folder:{photos}", model, augment={"flips": True})


def test_predictions_and_measures_are_those_of_fit(photos, model):
    ordered = keras_vit.adapt(model, classes=("ant", "bee"))
    metrics = training.evaluate_model(ordered, f"folder:{photos}")
    in_another_order = training.evaluate_model(model, f"folder:{photos}")
    assert in_another_order["accuracy"] == metrics["accuracy"]
    assert in_another_order["log_loss"] == pytest.approx(metrics["log_loss"], abs=1e-6)
    ordered.compile(metrics=["accuracy"], loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    data = training.dataset(f"folder:{photos}", ordered, split="evaluation")
    loss, accuracy = ordered.evaluate(data, verbose=0)
    np.testing.assert_allclose([loss, accuracy], [metrics["log_loss"], metrics["accuracy"]], atol=1e-5)
    files = sorted(photos.glob("ant/*.jpg"))[:2]
    shares = keras_vit.predict(model, files)
    assert [set(each) for each in shares] == [{"ant", "bee"}] * 2
    logits = model(np.stack([keras_vit.preprocessing_of(model)(PIL.Image.open(file)) for file in files]))
    found = [[each["bee"], each["ant"]] for each in shares]
    np.testing.assert_allclose(found, keras.ops.softmax(logits), atol=1e-6)
    assert len(keras_vit.predict(model, photos)) == 40
    with pytest.raises(UserError, match="has no head"):
        keras_vit.predict(keras_vit.adapt(model, num_classes=0), files)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_predictions_are_the_probabilities_of_a_model_that_outputs_them(photos, model, activation):
    probable = keras_vit.build(CONFIG, image_size=16, num_classes=2, classifier_activation=activation)
    probable.set_weights(model.get_weights())
    keras_vit.set_classes(probable, ["bee", "ant"])
    file = photos / "ant" / "1.jpg"
    (shares,) = keras_vit.predict(probable, file)
    preprocess = keras_vit.preprocessing_of(probable)
    images = preprocess(preprocess.decode(file))[None]
    np.testing.assert_allclose([[shares["bee"], shares["ant"]]], probable(images), atol=1e-6)
    assert probable.predict_function is not None  # another model would be traced in each call
    assert Run.of_model(probable).is_multi_label == (activation == "sigmoid")


def test_models_that_are_not_of_keras_vit_or_have_several_outputs_are_refused(photos, model):
    class Wrapped(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

    for wrapped in (keras.Sequential([model]), Wrapped()):
        for call in (keras_vit.predict, lambda wrapped, images: training.evaluate_model(wrapped, f"folder:{images}")):
            with pytest.raises(UserError, match="contains a model of keras_vit, but is none itself"):
                call(wrapped, photos)
    two = keras.Model(model.input, [model.output, model.get_layer("pool").output], name="two")
    for call in (keras_vit.predict, lambda model, images: training.evaluate_model(model, f"folder:{images}")):
        with pytest.raises(UserError, match="has 2 outputs, but its logits alone are needed"):
            call(two, photos)


@pytest.mark.slow
def test_exports_of_a_model_in_memory_know_its_classes(photos, model, tmp_path):
    version = export.to_saved_model(model, tmp_path / "served", images=photos)
    assert (version / "assets" / "labels.txt").read_text() == "bee\nant\n"
    written = export.to_tflite(model, tmp_path / "phone", ("float32",), images=photos)
    assert written["float32"].is_file()
    keras_vit.set_classes(model, None)
    with pytest.raises(UserError, match="name them in Python by keras_vit.set_classes"):
        export.to_saved_model(model, tmp_path / "unnamed")
    keras_vit.set_classes(model, ["bee", "ant"])


def test_pixels_of_another_range_are_warned_of_in_predict(model):
    with pytest.warns(UserWarning, match="values from 0 to 255, but this model was made for -1 to 1"):
        model.predict(np.full((1, 16, 16, 3), 255, np.uint8) * np.eye(16, dtype=np.uint8)[None, :, :, None], verbose=0)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("block_0", "Transformer.encoderblock_0"),
        ("attention_0", "Transformer.encoderblock_0.MultiHeadDotProductAttention_1"),
        ("logits", "head"),
        ("pool", "pool"),
    ],
)
def test_a_layer_has_the_short_name_of_its_output(model, name, layer):
    assert keras_vit.get_layer(model, name).name == layer


def test_a_bare_file_does_not_predict_with_the_normalization_of_other_models(model, photos, tmp_path, capsys):
    keras_vit.save_checkpoint(model, tmp_path / "folder", layout="timm")
    predict.main(["--run", str(tmp_path / "folder"), str(photos / "ant" / "1.jpg")])
    assert "bee" in capsys.readouterr().out
    (tmp_path / "folder" / "config.json").unlink()
    with pytest.raises(UserError, match="how images are normalized.* put the config.json"):
        predict.main(["--run", str(tmp_path / "folder"), "--num-heads", "3", str(photos / "ant" / "1.jpg")])


def test_what_a_bare_file_does_not_tell_is_said_and_a_model_is_named_as_its_file(model, tmp_path, capsys):
    keras_vit.save_checkpoint(model, tmp_path / "my cats.safetensors", layout="timm")
    bare = keras_vit.from_checkpoint(tmp_path / "my cats.safetensors", num_heads=3)
    assert bare.name == "my_cats"
    printed = capsys.readouterr().out
    assert "my cats.safetensors does not say it: " in printed
    assert "0..255 to -1" in printed
    assert "heads" not in printed
    keras_vit.from_checkpoint(FIXTURES / "vit_token.npz")
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="timm/vit_tiny_patch16_224"):
        keras_vit.from_checkpoint("vit_tiny_patch16_224")
