"""SavedModels as TF Serving runs them: signatures, loaders, warm-up requests, and invalid inputs."""

import collections
import dataclasses
import json
import pathlib
import re
import struct
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import unknown_fields
from PIL import Image
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

import keras_vit
from export import parity
from export.files import directory_bytes
from export.options import SavedModelOptions, SourceOptions
from export.saved_model import export as saved_model_export
from export.saved_model.signatures import WARMUP_FILE
from export.source import Provenance
from keras_vit import Preprocessing, UserError, inspection
from keras_vit.images.files import Samples
from keras_vit.images.formats import format_list
from tests.export import cpp_loader
from tests.exports import CONFIG, LABELS, SIZE, saved_model_of
from tests.images.test_graph import FILES, REFUSED
from tests.support import TINY_STEM, encoded, official, randomize
from training.data.dataset import Split
from training.data.pipeline import evaluation_batches, training_batches
from training.data.sources import open_source
from training.options.common import DataOptions
from training.recipes.recipe import Recipe


@pytest.fixture(name="samples", scope="module")
def _samples() -> Samples:
    """Images in all four formats, of mixed sizes; the class of the last two is not known."""
    rng = np.random.default_rng(4)
    photos = [rng.integers(0, 256, (10 + number, 25, 3), dtype=np.uint8) for number in range(9)]
    files = [encoded(photo, ("PNG", "JPEG", "BMP")[number % 3]) for number, photo in enumerate(photos)]
    return Samples(tuple(files), np.array([0, 1, 2, 3, 4, 5, 6, -1, -1]))


@pytest.fixture(name="served", scope="module")
def _served(samples, tmp_path_factory):
    """A model whose LayerNorm inputs are small, so that epsilon counts, its export, and that loaded."""
    model = randomize(keras_vit.build(CONFIG, preprocessing=Preprocessing(SIZE), num_classes=7, name="birds"))
    for layer in (model.get_layer("embedding"), model.get_layer("Transformer.posembed_input")):
        layer.set_weights([1e-3 * weight for weight in layer.get_weights()])
    path, _ = saved_model_of(model, LABELS, samples, tmp_path_factory.mktemp("served"), attention=True)
    return model, path, tf.saved_model.load(path)


@pytest.fixture(name="expected", scope="module")
def _expected(served, samples) -> parity.Reference:
    return parity.reference(served[0], parity.Reference(samples, keras_vit.preprocessing_of(served[0])))


def test_a_batch_may_mix_formats_and_sizes(served, samples, expected):
    answer = served[2].signatures["serving_default"](image_bytes=tf.constant(samples.encoded))
    probabilities = tf.nn.softmax(expected.logits).numpy()
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=1e-5)
    best = np.argsort(-probabilities, axis=-1)[:, :5]
    np.testing.assert_array_equal(answer["classes"], best)
    np.testing.assert_allclose(answer["scores"], np.take_along_axis(probabilities, best, -1), atol=1e-5)
    assert np.char.decode(answer["labels"].numpy().astype(bytes), "utf-8").tolist() == np.array(LABELS)[best].tolist()


def test_pixels_are_taken_as_floats_in_the_models_range_or_as_bytes(served):
    pixels = np.random.default_rng(1).integers(0, 256, (3, *SIZE, 3), dtype=np.uint8)
    floats = keras_vit.preprocessing_of(served[0]).normalize(pixels)
    expected = served[0](floats)
    for name, image in (("image_tensor", tf.constant(floats)), ("image_tensor_uint8", tf.constant(pixels))):
        answer = served[2].signatures[name](image=image)
        np.testing.assert_allclose(answer["logits"], expected, atol=1e-5)
        np.testing.assert_allclose(answer["probabilities"], tf.nn.softmax(expected), atol=1e-5)
    np.testing.assert_allclose(served[2].serve(floats), expected, atol=1e-5)
    np.testing.assert_allclose(keras.layers.TFSMLayer(served[1])(floats), expected, atol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError):
        served[2].serve(floats[0])


def test_features_and_attention_are_those_of_the_model(served, samples, expected):
    inside = keras_vit.intermediates(served[0], ["pre_logits", "attention_0", "attention_1"])
    values = inside(next(expected.batches())[1])
    files = tf.constant(samples.encoded)
    np.testing.assert_allclose(
        served[2].signatures["features"](image_bytes=files)["features"], values["pre_logits"], atol=1e-5
    )
    attention = served[2].signatures["attention"](image_bytes=files)
    assert attention.keys() == {"attention_0", "attention_1"}
    for name, probabilities in attention.items():
        np.testing.assert_allclose(probabilities, values[name], atol=1e-5)


def example(file: bytes) -> bytes:
    feature = {"image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[file]))}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def test_examples_are_classified_under_the_names_that_the_classify_call_wants(served, samples):
    best = served[2].signatures["serving_default"](image_bytes=tf.constant(samples.encoded))
    answer = served[2].signatures["classify"](inputs=tf.constant([example(file) for file in samples.encoded]))
    assert answer.keys() == {"classes", "scores"}
    assert answer["classes"].numpy().tolist() == best["labels"].numpy().tolist()
    np.testing.assert_allclose(answer["scores"], best["scores"], atol=1e-6)
    assert saved_model_export.signature_definitions(served[1])["classify"].method_name == "tensorflow/serving/classify"


@pytest.mark.slow
def test_a_calibrated_model_serves_calibrated_probabilities_and_accepts_from_the_threshold_on(
    served, samples, expected, tmp_path
):
    probabilities = tf.nn.softmax(expected.logits / 2.0).numpy()
    threshold = float(np.sort(probabilities.max(axis=1))[3:5].mean())
    origin = Provenance(temperature=2.0)
    path, _ = saved_model_of(served[0], LABELS, samples, tmp_path, origin=origin, threshold=threshold)
    signatures = tf.saved_model.load(path).signatures
    answer = signatures["serving_default"](image_bytes=tf.constant(samples.encoded))
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=1e-5)
    np.testing.assert_array_equal(answer["accepted"], probabilities.max(axis=1) >= threshold)
    assert set(answer["accepted"].numpy()) == {True, False}
    logits = signatures["image_tensor"](image=tf.constant(next(expected.batches())[1]))["logits"]
    np.testing.assert_allclose(logits, expected.logits, atol=1e-4)
    report = json.loads((path / "report.json").read_text())
    assert (report["temperature"], report["threshold"]) == (2.0, threshold)
    assert "divided by the temperature 2, which was" in (path / "README.md").read_text()


def test_the_report_has_the_numbers_and_the_card_everything_else(served):
    report = json.loads((served[1] / "report.json").read_text())
    assert report["latency_ms"]["all_threads"] > 0
    assert report["num_images"] == 9
    assert report["accuracy"] == report["keras_accuracy"]
    assert report["max_abs_diff"] <= 1e-5
    assert report["bytes"] <= directory_bytes(served[1])
    assert report["operators"]["DecodeJpeg"] == 1  # all signatures share one function that decodes
    stored = sum(file.stat().st_size for file in (served[1] / "variables").iterdir())
    assert 1 < stored / (4 * served[0].count_params()) < 1.25  # each weight once
    page = (served[1] / "report.md").read_text()
    assert "| largest difference of a logit from the Keras model " in page
    assert not re.search(r"^\| \w+_", page, re.MULTILINE)  # rows in words
    assert "<details><summary>Operators: " in page
    assert page.index("<details>") < page.index("MatMul") < page.index("</details>")
    card = (served[1] / "README.md").read_text()
    for words in (
        "# birds: 7 classes", "hidden size 48", "wren, ant, Żubr", "docker run -p 8500:8500", ":predict", ":classify",
        "| serving_default | input | image_bytes | string | (B) |", "stretched to 12 x 30 (bilinear)",
        "| License |", "| image_tensor | output | logits | float32 | (B, 7) |",
    ):  # fmt: skip
        assert words in re.sub(" +", " ", card)


def test_the_warm_up_requests_are_official_and_replay(served, samples):
    log_class, replayed = official("PredictionLog"), []
    for record in tf.data.TFRecordDataset(str(served[1] / WARMUP_FILE)).as_numpy_iterator():
        log = log_class.FromString(record)
        assert not list(unknown_fields.UnknownFieldSet(log))
        if log.HasField("classify_log"):
            request = log.classify_log.request
            (given,) = request.input.example_list.examples
            assert given.SerializeToString() == example(samples.encoded[0])
            arguments = {"inputs": tf.constant([given.SerializeToString()])}
        else:
            request = log.predict_log.request
            arguments = {name: tf.constant(tf.make_ndarray(tensor)) for name, tensor in request.inputs.items()}
        answer = served[2].signatures[request.model_spec.signature_name](**arguments)
        assert all(len(value) == 1 for value in answer.values())
        replayed.append(request.model_spec.signature_name)
    assert sorted(replayed) == sorted(served[2].signatures)


# Tensors of another shape.

INVALID_ARGUMENT = 3


def hostile_requests() -> list[tuple[str, np.ndarray]]:
    """Signature and tensor, each of a shape or type that the signature does not take."""
    images = [
        *[(3,) * rank for rank in range(6)], (1, 12, 30), (12, 30, 3), (1, 30, 12, 3), (1, 3, 12, 30), (1, 12, 30, 1),
        (1, 12, 30, 4), (1, 9, 9, 3), (1, 24, 60, 3), (1, 12, 29, 3), (2, 15, 24, 3), (0, 9, 9, 3), (1, 0, 30, 3),
        (1, 12, 30, 0), (0,), (0, 0), (1, 1, 12, 30, 3), (1, 12, 30, 3, 1), (1,) * 8,
    ]  # fmt: skip
    requests = [("image_tensor", np.full(shape, 0.5, np.float32)) for shape in images]
    requests += [("image_tensor_uint8", np.full(shape, 7, np.uint8)) for shape in images]
    for name in ("serving_default", "features", "attention", "classify"):
        requests += [(name, np.full(shape, b"no image", object)) for shape in ((), (1, 1), (2, 3), (0, 2), (1, 1, 1))]
    requests += [("image_tensor", np.zeros((1, *SIZE, 3), np.uint8)), ("serving_default", np.zeros(3, np.float32))]
    return requests


def test_the_cpp_loader_gives_the_logits_and_survives_hostile_requests_without_an_answer(served, samples, expected):
    """It is TF Serving's; kernels for images abort the process when a tensor has another rank.

    Each of several threads gets the answer or the error of its own request.
    """
    # Features and attention read files by the same function as serving_default.
    shapes = [(name, value) for name, value in hostile_requests() if name not in ("features", "attention")]
    assert len(shapes) >= 50
    files = np.array([samples.encoded[0]], object)
    valid = [("serving_default", files), ("classify", np.array([example(files[0])], object))]
    valid += [("serving_default", files[:0]), ("classify", files[:0])]
    valid += [
        (name, np.zeros((batch, *SIZE, 3), kind))
        for name, kind in (("image_tensor", np.float32), ("image_tensor_uint8", np.uint8))
        for batch in (1, 0)
    ]
    contents = [("serving_default", np.array([content], object)) for content in GARBAGE.values()]
    contents += [("classify", np.array([content], object)) for content in (b"", b"\xff" * 9, example(b""))]
    images = ("image_tensor", next(expected.batches())[1])
    done, [first, *answers] = cpp_loader.ask(served[1], [images, *valid, *shapes, *contents, *valid])
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_allclose(first["output"], expected.logits, atol=1e-5)
    answered, refused = answers[: len(valid)] + answers[-len(valid) :], answers[len(valid) : -len(valid)]
    assert [len(answer["output"]) for answer in answered] == 2 * [len(value) for _, value in valid]
    for (name, value), answer in zip(shapes + contents, refused, strict=True):
        assert answer.get("code") == INVALID_ARGUMENT, (name, value.shape, answer)
    for (name, value), answer in zip(shapes[:-2], refused, strict=False):
        taken = f"[?,{SIZE[0]},{SIZE[1]},3]" if name.startswith("image") else "[?]"
        assert f"[{','.join(map(str, value.shape))}] is not compatible with expected shape {taken}" in answer["error"]


def test_the_signatures_state_the_shapes_that_they_take(served):
    shapes = {
        name: [tf.TensorShape(info.tensor_shape).as_list() for info in definition.inputs.values()]
        for name, definition in saved_model_export.signature_definitions(served[1]).items()
        if definition.inputs
    }
    files, images = [[None]], [[None, *SIZE, 3]]
    assert shapes == {
        "serving_default": files, "features": files, "attention": files, "classify": files,
        "image_tensor": images, "image_tensor_uint8": images,
    }  # fmt: skip


# Invalid images.


def png(width: int, height: int, bits: int, color_type: int, rows: bytes, key: bytes = b"") -> bytes:
    """A PNG of rows as they are stored: Pillow writes no wrong size, no deep transparent color and no deep alpha."""
    parts = [b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)]
    parts += [b"tRNS" + key] if key else []
    parts += [b"IDAT" + zlib.compress(rows), b"IEND"]
    packed = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def png_header(width: int, height: int) -> bytes:
    return png(width, height, 8, 2, bytes(1000))


@pytest.fixture(name="gallery", scope="module")
def _gallery(tmp_path_factory) -> pathlib.Path:
    """Class folders of images of all kinds, also with deep alphas and a deep transparent color."""
    root, rng = tmp_path_factory.mktemp("gallery"), np.random.default_rng(0)

    def deep(color_type: int, channels: int) -> bytes:
        rows = rng.integers(0, 256, (7, 1 + 11 * 2 * channels), dtype=np.uint8)
        rows[:, 0] = 0  # no filter
        return png(11, 7, 16, color_type, rows.tobytes(), key=b"" if channels > 1 else rows[3, 9:11].tobytes())

    files = {name: data for name, data in FILES.items() if name not in (*REFUSED, "PNG with 16 bits")}
    files |= {"deep key": deep(0, 1), "deep gray and alpha": deep(4, 2), "deep color and alpha": deep(6, 4)}
    for number, (name, data) in enumerate(files.items()):
        file = root / "abc"[number % 3] / "nested" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return root


@pytest.mark.slow
def test_an_image_gives_the_same_logits_in_training_evaluation_inspection_and_serving(served, gallery):
    model, preprocessing = served[0], keras_vit.preprocessing_of(served[0])
    split = open_source(DataOptions(f"folder:{gallery}")).train
    count = split.num_examples
    files = [pathlib.Path(split.name(index)) for index in range(count)]
    numbered = Split(count, lambda index: (split.read(index)[0], tf.cast(index, tf.int32)))
    inspected = np.stack([preprocessing(inspection.decode(file.read_bytes(), file.name).pixels) for file in files])
    [(evaluated, _, _)] = evaluation_batches(numbered, preprocessing, num_classes=count, batch_size=count)
    evaluated = evaluated.numpy()
    recipe = Recipe(image_size=SIZE, batch_size=count, steps=1, inception_crop=False, flip=False, learning_rate=0.1)
    options = {"num_classes": count, "seed": 0, "first_step": 0, "num_steps": 1}
    [(trained, order)] = training_batches(numbered, recipe, preprocessing, **options)
    trained = trained.numpy()[np.argsort(np.argmax(order, axis=-1))]
    for index, file in enumerate(files):
        assert np.ptp(inspected[index]) > 0.5, f"{file.name} is blank"
        np.testing.assert_allclose(inspected[index], evaluated[index], atol=1e-4, err_msg=file.name)
    logits = np.asarray(model(evaluated))
    np.testing.assert_allclose(model(trained), logits, atol=1e-4)
    np.testing.assert_allclose(model(inspected), logits, atol=1e-4)
    answer = served[2].signatures["serving_default"](image_bytes=tf.constant([file.read_bytes() for file in files]))
    # The probabilities show the logits up to a constant.
    there = np.log(answer["probabilities"])
    np.testing.assert_allclose(
        there - there.mean(-1, keepdims=True), logits - logits.mean(-1, keepdims=True), atol=1e-4
    )


def oversized() -> dict[str, bytes]:
    """Small files of each format whose header states the largest image that the format can."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (9, 14, 3), dtype=np.uint8))
    clear = image.copy()
    clear.putalpha(90)

    def patched(content: bytes, *changes: tuple[int, bytes]) -> bytes:
        for position, new in changes:
            content = content[:position] + new + content[position + len(new) :]
        return content

    jpeg, bmp = encoded(image, "JPEG"), encoded(image, "BMP")
    lossy, lossless = encoded(image, "WEBP"), encoded(image, "WEBP", lossless=True)
    sides = struct.pack("<HH", 65_535, 65_535)
    return {
        "huge PNG": png_header(2**31 - 1, 2**31 - 1),
        "huge JPEG": patched(jpeg, (jpeg.index(b"\xff\xc0") + 5, sides)),
        "huge BMP": patched(bmp, (18, struct.pack("<ii", 2**31 - 1, 2**31 - 1))),
        "huge upside-down BMP": patched(bmp, (18, struct.pack("<ii", 2**31 - 1, -(2**31)))),
        "huge WebP": patched(lossy, (26, struct.pack("<HH", 16_383, 16_383))),
        "huge lossless WebP": patched(lossless, (21, b"\xff\xff\xff\x0f")),
        "huge WebP with alpha": patched(encoded(clear, "WEBP"), (24, b"\xff" * 6)),
    }


def many_scans() -> bytes:
    """A JPEG of 16 megapixels whose last scan comes a thousand times."""
    whole = encoded(Image.new("L", (4000, 4000), 99), "JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * 1000 + whole[-2:]


GARBAGE = {
    "empty": b"",
    "text": b"no image",
    "magic alone": b"\x89PNG\r\n\x1a\n",
    "truncated": encoded(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8), "PNG")[:900],
    "half a JPEG": encoded(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8), "JPEG")[:300],
    "PNG bomb": png_header(30_000, 30_000),
    "negative": png_header(2**31 + 5, 7),
    "animated WebP": encoded(
        np.zeros((5, 5, 3), np.uint8), "WEBP", save_all=True, append_images=[Image.new("RGB", (5, 5), "red")]
    ),
    "GIF": encoded(np.zeros((5, 5), np.uint8), "GIF"),
    "JPEG of a thousand scans": many_scans(),
    "BMP of a palette": encoded(Image.new("RGB", (9, 9), "red").quantize(4), "BMP"),
    **oversized(),
}


def test_invalid_images_are_reported_by_their_indices_and_cost_no_memory(served, samples):
    """The first would each be 324 MB, and 1.3 GB as floats. Of more than six, the message shows a few."""
    huge = [encoded(np.zeros((9000, 12_000), np.uint8), kind) for kind in ("PNG", "JPEG")]
    huge.append(encoded(np.zeros((4000, 8001), np.uint8), "PNG"))  # more than 32 megapixels
    files = tf.constant([samples.encoded[0], *huge, *list(GARBAGE.values())[:3], samples.encoded[1]])
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins now

    def peak_kilobytes() -> int:
        status = pathlib.Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

    before = peak_kilobytes()
    words = rf"image_bytes\[1 2 3 4 5 6\]: no whole {format_list()} of"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        served[2].signatures["serving_default"](image_bytes=files)
    assert peak_kilobytes() - before < 50_000


def fuzzed(rng: np.random.Generator, files: list[bytes]) -> bytes:
    """An image with random changes, or random bytes."""
    content = bytearray(files[rng.integers(len(files))])
    for _ in range(rng.integers(1, 9)):
        content[rng.integers(min(len(content), (40, 10**9)[rng.integers(2)]))] = rng.integers(256)
    if rng.random() < 0.3:
        del content[rng.integers(len(content)) :]
    return bytes(content) if rng.random() < 0.9 else rng.bytes(rng.integers(60))


@pytest.mark.parametrize("number", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_input_is_answered_or_refused_by_its_index(served, samples, number):
    rng, call, refused = np.random.default_rng(number), served[2].signatures["serving_default"], 0
    for _ in range(number):
        try:
            answer = call(image_bytes=tf.constant([fuzzed(rng, samples.encoded)]))
            assert np.isfinite(answer["scores"]).all()
        except tf.errors.InvalidArgumentError as error:
            assert "image_bytes[0]: no whole JPEG" in str(error)  # noqa: PT017
            refused += 1
    assert 0.2 * number < refused < 0.95 * number


# Other models and other forms.


def test_epsilon_survives_when_the_served_graph_is_frozen(served):
    """OneDNN's fused LayerNorm computes with 1e-3 unless the graph it replaces has the one form that says more."""
    model, _, loaded = served
    images = np.random.default_rng(0).uniform(-1, 1, (4, *SIZE, 3)).astype(np.float32)
    expected = np.asarray(model(images))
    frozen = convert_variables_to_constants_v2(loaded.signatures["image_tensor"])
    logits = next(value for value in frozen(image=tf.constant(images)) if not np.allclose(value.numpy().sum(-1), 1))
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def _operators_on_the_device(path: pathlib.Path) -> collections.Counter:
    """What a session, such as TF Serving's, runs for the logits of a SavedModel: operators, as they were rewritten."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], str(path)).signature_def["image_tensor"]
        metadata = tf.compat.v1.RunMetadata()
        session.run(
            signature.outputs["logits"].name,
            {signature.inputs["image"].name: np.zeros((2, *SIZE, 3), np.float32)},
            tf.compat.v1.RunOptions(output_partition_graphs=True),
            metadata,
        )
    return collections.Counter(
        "+".join([node.op, *(name.decode() for name in node.attr["fused_ops"].list.s)])
        for graph in metadata.partition_graphs
        for node in graph.node
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_served_model_uses_fused_operators(dtype, served, samples, tmp_path):
    model, path, _ = served
    if dtype != "float32":
        path, _ = saved_model_of(model, LABELS, samples, tmp_path, dtype=dtype, max_disagreement=1.0)
    found = _operators_on_the_device(path)
    if "_MklSoftmax" not in found:
        pytest.skip("TensorFlow has no oneDNN on this processor, or is set not to use it")
    blocks = sum(layer.name.endswith(".query") for layer in model.layers)
    assert found["_MklLayerNorm"] == sum(isinstance(layer, keras.layers.LayerNormalization) for layer in model.layers)
    assert found["_MklNativeFusedMatMul+BiasAdd+GeluApproximate"] == blocks
    assert found["_MklNativeFusedMatMul+BiasAdd"] == 5 * blocks + 1  # and the head
    assert not found.keys() & {"Rsqrt", "SquaredDifference", "Tanh", "Erf", "Pow"}
    assert found["Cast"] == (2 if dtype == "bfloat16" else 0)


@pytest.mark.slow
def test_bfloat16_halves_the_weights_and_agrees(served, samples, tmp_path):
    model = keras_vit.build(CONFIG, preprocessing=Preprocessing(SIZE), num_classes=7)
    model.get_layer("head").set_weights([3 * w.numpy() for w in served[0].get_layer("head").weights])
    path, found = saved_model_of(model, LABELS, samples, tmp_path, dtype="bfloat16")
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    nodes = [node for function in saved.meta_graphs[0].graph_def.library.function for node in function.node_def]
    constants = [node.attr["value"].tensor for node in nodes if node.op == "Const"]
    weights = [constant for constant in constants if constant.dtype == tf.bfloat16.as_datatype_enum]
    # As variables, each once: TensorFlow keeps several copies of constants for each signature.
    assert sum(weight.ByteSize() for weight in weights) < 0.1 * model.count_params()
    stored = (path / "variables" / "variables.data-00000-of-00001").stat().st_size
    assert 1.5 * model.count_params() < stored < 3 * model.count_params()
    largest = found["tolerance"] / parity.FLOAT_TOLERANCE
    assert 0 < found["max_abs_diff"] < 2**-5 * largest  # 8 bits, and sums in the order of the processor
    answer = tf.saved_model.load(path).signatures["image_tensor"](image=tf.zeros((2, *SIZE, 3)))
    assert {value.dtype for value in answer.values()} == {tf.float32}


@pytest.mark.slow
def test_compiled_by_xla_the_model_is_the_same(served, samples, tmp_path):
    path, found = saved_model_of(served[0], LABELS, samples, tmp_path, xla=True)
    assert found["max_abs_diff"] <= 1e-4
    assert b"_XlaMustCompile" in (path / "saved_model.pb").read_bytes()
    assert b"_XlaMustCompile" not in (served[1] / "saved_model.pb").read_bytes()


def test_options_that_a_model_does_not_support_are_refused_first(samples, tmp_path):
    projection = dataclasses.replace(CONFIG, pre_norm=True, head_bias=False)  # as CLIP has it
    for config, size, num_classes, options, words in (
        (TINY_STEM, 32, 7, {"attention": True}, "is a ResNet without attention blocks; leave --attention out"),
        (CONFIG, SIZE, 7, {"dtype": "bfloat16", "xla": True}, "--xla applies only to --dtype float32"),
        (CONFIG, SIZE, 0, {}, r"ends with its features, of shape \(None, 48\), and has no classes to serve"),
        (projection, SIZE, 7, {}, r"ends with its features, of shape \(None, 7\), and has no classes to serve"),
        ("testing-unpooled", 32, 7, {}, r"classifies every token, into shape \(None, 4, 7\)"),
    ):
        model = keras_vit.build(config, image_size=size, num_classes=num_classes)
        with pytest.raises(UserError, match=words):
            saved_model_of(model, LABELS, samples, tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"cannot load a SavedModel from a path with \[ or .*'served \[1\]'; give"):
        SavedModelOptions(source=SourceOptions(run="r"), output="served [1]")


@pytest.mark.slow
def test_a_tflite_file_beside_the_graph_is_of_the_same_outputs(served, samples, expected, tmp_path):
    path, _ = saved_model_of(served[0], LABELS, samples, tmp_path, tflite=True)
    facts = json.loads((path / "report.json").read_text())
    assert facts["tflite_bytes"] == (path / "model.tflite").stat().st_size
    assert facts["tflite_max_abs_diff"] < 1e-5
    assert tf.saved_model.load(path).signatures["image_tensor"].structured_outputs.keys() == {"logits", "probabilities"}
