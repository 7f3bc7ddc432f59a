"""TFLite files: size and accuracy of each format, their metadata, and their report."""

import collections
import dataclasses
import io
import json
import math
import pathlib
import random
import zipfile

import flatbuffers
import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from scipy import special

import keras_vit
from export import parity
from export.options import SavedModelOptions, SourceOptions, TFLiteOptions
from export.report import _draw as draw
from export.source import ExportedModel, Provenance, random_images, read_calibration
from export.texts import preprocessing_code
from export.tflite import convert, flatbuffer, quantize, tflite_file
from export.tflite import export as tflite_export
from export.tflite.convert import converted, to_tflite, write_served_file
from export.tflite.flatbuffer import Graph, unpack
from keras_vit import ConvStem, Preprocessing, ResNetConfig, UserError, ViTConfig
from keras_vit.errors import ParityError
from keras_vit.files import tflite_metadata
from keras_vit.files.tflite_metadata import TFLiteMetadata
from keras_vit.images.files import Samples
from keras_vit.run import CALIBRATION, Run
from tests.exports import model_of_five, tflite_of
from tests.support import others_slow, randomize

LABELS = ("wren", "ant", "Żubr", "bee", "newt")
SIZE = (12, 30)
CONFIG = ViTConfig(patch_size=(4, 6), hidden_size=48, num_layers=1, num_heads=3, mlp_dim=96)
FORMATS = ("float32", "float16", "int8-dynamic", "int8-weights", "int4-weights", "int8")


def photos(seed: int, number: int, channels: int = 3) -> Samples:
    rng = np.random.default_rng(seed)
    shades = rng.integers(0, 256, (number, 3, 5, channels))
    encoded = [tf.io.encode_png(np.kron(shade, np.ones((4, 6, 1))).astype(np.uint8)).numpy() for shade in shades]
    return Samples(tuple(encoded), rng.integers(0, 5, number))


def build(config=CONFIG, channels: int = 3) -> keras.Model:
    """A model as if trained: its weights as they begin, and a head that tells images apart."""
    random.seed(5)  # from which Keras draws the seeds of its weights
    model = keras_vit.build(config, preprocessing=Preprocessing(SIZE, channels), num_classes=5, name="birds")
    for weight in model.weights:
        if weight.path.endswith("head/kernel") or "head.conv2d/kernel" in weight.path:
            weight.assign(np.random.default_rng(0).normal(0.0, 0.3, weight.shape))
    return model


@pytest.fixture(name="phone", scope="module")
def _phone(tmp_path_factory):
    """All formats of one model, and what the export returned."""
    place = tmp_path_factory.mktemp("phone")
    written = tflite_of(build(), LABELS, photos(1, 24), place, FORMATS, calibration=photos(2, 24), max_disagreement=0.1)
    return place, written


def test_the_head_of_int8_dynamic_stays_in_float32_while_it_has_few_of_the_weights(phone, tmp_path):
    model = randomize(keras_vit.build(ViTConfig(8, 32, 1, 2, 64), image_size=16, num_classes=300))
    (tmp_path / "large").write_bytes(to_tflite(model))
    large = quantize.quantize(tmp_path / "large", "int8-dynamic")
    small = phone[1]["int8-dynamic"][0].read_bytes()
    for content, shape, dtype in ((small, [5, 48], "float32"), (large, [300, 32], "int8")):
        details = Interpreter(model_content=content).get_tensor_details()
        assert {tensor["dtype"].__name__ for tensor in details if [*tensor["shape"]] == shape} == {dtype}


def test_size_and_accuracy_of_each_format(phone):
    _, written = phone
    difference = {kind: found["max_abs_diff"] for kind, (_, found) in written.items()}
    size = {kind: path.stat().st_size for kind, (path, _) in written.items()}
    assert difference["float32"] <= 1e-4
    assert 0 < difference["float16"] < 0.02
    assert 0 < difference["int8"] < 0.8
    assert 0 < difference["int8-weights"] < 0.3
    assert difference["int8-weights"] < difference["int4-weights"] < 1.5
    assert size["int4-weights"] < 0.9 * size["int8-weights"]
    assert 0 < difference["int8-dynamic"] < 0.6
    assert 0 < written["int8-dynamic"][1]["mean_abs_diff"] < 0.12
    assert size["float16"] < 0.7 * size["float32"]
    assert all(size[kind] < 0.6 * size["float32"] for kind in FORMATS[2:])


def test_products_alone_are_integers_in_int8(phone):
    in_float = 0
    for operator in Graph(phone[1]["int8"][0].read_bytes()).operators:
        if operator.name in ("FULLY_CONNECTED", "CONV_2D"):
            in_float += operator.inputs[1].dtype != "INT8"  # the activations too, some of them at run time
        elif operator.name in ("SOFTMAX", "GELU", "MEAN", "RSQRT", "BATCH_MATMUL", "ADD"):
            assert operator.inputs[0].dtype == "FLOAT32"
    steps = json.loads((phone[0] / "report.json").read_text())["quantization_steps"]["int8"]
    assert in_float == sum(step["kept"] and step["name"].endswith("in float32") for step in steps)
    assert {kind: path for kind, (path, _) in phone[1].items()}.keys() == set(FORMATS)


def test_weights_of_dense_layers_have_four_bits_but_those_of_the_head_and_of_few_others_eight(phone):
    graph = Graph(phone[1]["int4-weights"][0].read_bytes())
    dense = [operator for operator in graph.operators if operator.name == "FULLY_CONNECTED"]
    weights = [graph.source(operator.inputs[1]) for operator in dense]
    assert len(dense) == 7
    assert weights[-1].dtype == "INT8"
    eight = [index for index, found in enumerate(weights[:-1]) if found.dtype == "INT8"]
    sizes = [math.prod(found.shape) for found in weights[:-1]]
    assert 0 < sum(sizes[index] for index in eight) <= 0.25 * sum(sizes)
    readers = collections.defaultdict(set)
    for operator, found in zip(dense, weights, strict=True):
        readers[operator.inputs[0].index].add(found.dtype)
    assert all(len(types) == 1 for types in readers.values())  # of query, key and value
    assert [graph.source(o.inputs[1]).dtype for o in graph.operators if o.name == "CONV_2D"] == ["INT8"]
    [subgraph] = unpack(phone[1]["int4-weights"][0].read_bytes()).subgraphs
    blocks = collections.defaultdict(set)
    for found in weights[:-1]:
        if found.dtype == "INT4":
            blocks[found.shape[1]].add(getattr(subgraph.tensors[found.index].quantization.details, "blockSize", None))
    assert blocks == {48: {None}, 96: {32}}  # 48 channels have no whole blocks of 32
    stored = json.loads((phone[0] / "report.json").read_text())["layers_in_eight_bits"]
    assert sum(len(layers["outputs"]) for layers in stored) == len(eight)
    assert "int4-weights: dense layers in 8 bits" in (phone[0] / "report.md").read_text()


def test_the_layers_whose_rounding_changes_the_logits_most_keep_eight_bits(phone):
    content = phone[1]["float32"][0].read_bytes()
    images = [np.random.default_rng(seed).uniform(-1, 1, (1, *SIZE, 3)).astype(np.float32) for seed in range(4)]
    products = flatbuffer.products(content)
    [*others, head] = [found.outputs for found in products if found.weights.ndim == 2]

    def logits(content: bytes) -> np.ndarray:
        run = Interpreter(model_content=content).get_signature_runner("serving_default")
        return np.concatenate([run(image=image)["logits"] for image in images])

    every = quantize.in_eight_bits(content, logits, [head], share=1.0)
    assert sorted(name for layers in every for name in layers.outputs) == sorted(others)
    assert sum(layers.error for layers in every) == pytest.approx(1.0)
    gains = [layers.error / layers.weights for layers in every]
    assert gains == sorted(gains, reverse=True)
    last = every[-1].outputs
    # A large weight in each block, beside which the others are rounded to 0.
    factors = {found.outputs: np.where(np.arange(found.weights.shape[-1]) % 32, 1, 20) for found in products}
    rough = {found.outputs: factors[found.outputs] * found.weights for found in products if found.outputs in last}
    loud = quantize.in_eight_bits(flatbuffer.with_weights(content, rough), logits, [head], share=1.0)
    assert [layers.outputs for layers in loud].index(last) < len(every) - 1
    assert quantize.in_eight_bits(content, logits, [head], share=0.0) == []


def test_four_bits_are_refused_for_convolutions(tmp_path):
    resnet = keras_vit.ResNetConfig((1,), 4, (8,), num_groups=2)
    options = {"formats": ["int4-weights"], "calibration": photos(2, 4)}
    for model, target in ((build(resnet), "cpu"), (build(), "npu")):
        with pytest.raises(UserError, match="int4-weights stores dense layers in 4 bits, but most weights"):
            tflite_of(model, LABELS, photos(1, 4), tmp_path, target=target, **options)


def test_ranges_are_the_extremes_of_the_calibration_images(phone):
    """The library's moving average would cut off what one image alone reaches."""
    calm, loud = np.full((1, *SIZE, 3), 0.01, np.float32), np.full((1, *SIZE, 3), 1.0, np.float32)
    few = [loud, *[calm] * 6]  # too few to look for other ranges
    content, _ = quantize.quantize_static(phone[1]["float32"][0], few)
    first = next(operator for operator in Graph(content).operators if operator.name == "QUANTIZE")
    image, quantized = (unpack(content).subgraphs[0].tensors[end.index] for end in (*first.inputs, *first.outputs))
    assert b"image" in image.name
    np.testing.assert_allclose(quantized.quantization.scale, 1.0 / 255, rtol=0.01)


def test_xnnpack_takes_the_whole_graph(phone):
    for kind in FORMATS[:-1]:  # it has no 16-bit products
        assert tflite_file.partitions(phone[1][kind][0]) <= 2
        assert not {"SHAPE", "PACK", "GATHER", "CUSTOM"} & set(tflite_file.operators(phone[1][kind][0]))


# Tables of metadata_schema.fbs, by the positions of their fields.


def field(table: flatbuffers.table.Table, place: int) -> int:
    offset = table.Offset(4 + 2 * place)
    assert offset, f"no field {place}"
    return offset + table.Pos


def table(parent: flatbuffers.table.Table, place: int) -> flatbuffers.table.Table:
    return flatbuffers.table.Table(parent.Bytes, parent.Indirect(field(parent, place)))


def first(parent: flatbuffers.table.Table, place: int) -> flatbuffers.table.Table:
    start = parent.Vector(field(parent, place) - parent.Pos)
    return flatbuffers.table.Table(parent.Bytes, parent.Indirect(start))


def text(parent: flatbuffers.table.Table, place: int) -> str:
    return parent.String(field(parent, place)).decode()


def floats(parent: flatbuffers.table.Table, place: int) -> list[float]:
    offset = field(parent, place) - parent.Pos
    return np.frombuffer(parent.Bytes, "<f4", parent.VectorLen(offset), parent.Vector(offset)).tolist()


def byte(parent: flatbuffers.table.Table, place: int) -> int:
    return parent.Bytes[field(parent, place)]


def metadata(content: bytes) -> flatbuffers.table.Table:
    model = tflite_file.schema.Model.GetRootAs(content, 0)
    (entry,) = [
        model.Metadata(number) for number in range(model.MetadataLength())
        if model.Metadata(number).Name() == b"TFLITE_METADATA"
    ]  # fmt: skip
    data = bytes(model.Buffers(entry.Buffer()).DataAsNumpy())
    assert data[4:8] == b"M001"
    return flatbuffers.table.Table(data, int.from_bytes(data[:4], "little"))


def test_a_file_holds_labels_and_normalization_as_standard_metadata(phone):
    for kind, (path, _) in phone[1].items():
        with zipfile.ZipFile(path) as attached:
            assert attached.read("labels.txt").decode() == "wren\nant\nŻubr\nbee\nnewt\n"
        model = metadata(path.read_bytes())
        assert (text(model, 0), text(model, 7)) == ("birds", "1.0.0")
        assert text(model, 1) == f"a model in memory, {kind}; weights: unknown"
        assert text(model, 5) == "not specified; add the license of the weights and of the data"
        graph = first(model, 3)
        given, answer = first(graph, 2), first(graph, 3)
        assert (text(given, 0), text(answer, 0)) == ("image", "logits")
        assert byte(table(given, 3), 0) == 2  # ImageProperties
        image = table(table(given, 3), 1)
        assert byte(image, 0) == 1  # RGB
        size = table(image, 1)
        assert (size.Bytes[field(size, 0)], size.Bytes[field(size, 1)]) == (30, 12)
        unit = first(given, 4)
        assert byte(unit, 0) == 1  # NormalizationOptions
        assert (floats(table(unit, 1), 0), floats(table(unit, 1), 1)) == ([127.5] * 3, [127.5] * 3)
        labels = first(answer, 6)
        assert (text(labels, 0), byte(labels, 2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS
        fields = {**Preprocessing((12, 30)).resizing(), "value_range": [-1.0, 1.0]}
        assert tflite_metadata.read_metadata(path.read_bytes()) == TFLiteMetadata((-1.0, 1.0), fields, False, None)


def test_damaged_metadata_are_none(phone):
    content = bytearray(phone[1]["int8-dynamic"][0].read_bytes())
    assert tflite_metadata.read_metadata(bytes(content[:40])) is None
    assert tflite_metadata.read_metadata(b"") is None
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.txt", "a\nb\n")
    assert tflite_metadata.read_names(stream.getvalue(), "x") == ("a", "b")
    damaged = bytearray(stream.getvalue())
    damaged[40] = 255  # the first compressed byte
    assert tflite_metadata.read_names(bytes(damaged), "x") is None
    place = content.index(b"M001")
    content[place - 4 : place] = b"\xff\xff\xff\x7f"
    assert tflite_metadata.read_metadata(bytes(content)) is None


def test_weights_stay_aligned_for_the_kernels(phone):
    content = np.fromfile(phone[1]["int8-dynamic"][0], np.uint8)
    model = tflite_file.schema.Model.GetRootAs(content, 0)
    for number in range(model.BuffersLength()):
        buffer = model.Buffers(number)
        if buffer.DataLength():
            start, begin = (data.__array_interface__["data"][0] for data in (buffer.DataAsNumpy(), content))
            assert (start - begin) % 16 == 0


def test_the_report_measures_every_format_and_recommends_one(phone):
    report = json.loads((phone[0] / "report.json").read_text())
    assert report["formats"].keys() == set(FORMATS)
    for row in report["formats"].values():
        assert row["latency_ms"].keys() == {"1_threads", "2_threads"}
        assert row["operators"]["FULLY_CONNECTED"] == 7
        assert row["num_images"] == 24
        assert row["gained"] - row["lost"] == round(24 * (row["accuracy"] - report["keras_accuracy"]))
        assert row["mcnemar_p"] == parity.mcnemar(row["lost"], row["gained"])
    assert report["formats"]["float32"]["accuracy"] == report["keras_accuracy"]
    errors = report["layer_errors"]["int8"]
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert set(errors) <= {layer.name for layer in build().layers}
    assert {form: steps[0]["name"] for form, steps in report["quantization_steps"].items()} == {
        "int8": "extremes as ranges"
    }
    text = (phone[0] / "report.md").read_text()
    assert "int8: steps of the quantization, on calibration images" in text
    assert report["recommendation"] in text
    assert Preprocessing(SIZE).summary() in text
    assert "\n".join(preprocessing_code(Preprocessing(SIZE))) in text
    assert Preprocessing(**report["preprocessing"]) == Preprocessing(SIZE)
    assert "| accuracy | correct only in Keras | correct only here | McNemar's p |" in " ".join(text.split())


def test_the_figure_of_a_report_has_a_bar_for_each_number(tmp_path):
    draw("A title", {"latency": {"1_threads": 1.5, "2_threads": 0.8}, "none": {}}, tmp_path / "report.png")
    with PIL.Image.open(tmp_path / "report.png") as figure:
        assert figure.size == (900, 206)


def row(agreement: float, accuracy: float | None, latency: float) -> dict:
    return {"agreement": agreement, "accuracy": accuracy, "latency_ms": {"1_threads": latency}, "bytes": 1_500_000}


def test_the_recommended_format_is_the_fastest_accurate_one():
    rows = {"float32": row(1.0, 0.9, 9.0), "float16": row(1.0, 0.9, 5.0), "int8": row(0.98, 0.9, 1.0)}
    assert tflite_export.recommend(rows, 0.9).startswith(
        "Recommended: float16, the fastest on one thread (5 ms, 1.50 MB)"
    )
    assert tflite_export.recommend(rows, 0.9).endswith("Not recommended for this model: int8.")
    assert "Recommended: float32" in tflite_export.recommend(rows | {"float16": row(1.0, 0.89, 5.0)}, 0.9)
    assert "Recommended: float16" in tflite_export.recommend(rows | {"float16": row(1.0, None, 5.0)}, None)
    assert tflite_export.recommend({"int8": row(0.9, 0.9, 1.0)}, 0.9) == (
        "None of these formats is accurate enough; use float32."
    )


@pytest.mark.parametrize("size", [pytest.param("of the model", marks=pytest.mark.slow), "resized"])
def test_pixels_can_be_the_input_of_every_format(tmp_path, size):
    """They are rounded after resizing, and the model is compared on the same pixels."""
    kinds = ("float32", "int8-dynamic", "int8") if size == "of the model" else ("float32",)
    exact = photos(3, 12) if size == "of the model" else random_images(Preprocessing(SIZE))
    written = tflite_of(
        build(), LABELS, exact, tmp_path, kinds, calibration=exact, uint8_input=True, max_disagreement=0.1
    )
    assert written["float32"][1]["max_abs_diff"] <= 1e-4
    for kind, (path, _) in written.items():
        assert path.name == f"model-{kind}-uint8-input.tflite"
        (given,) = Interpreter(model_path=str(path)).get_input_details()
        assert (given["dtype"], given["shape"].tolist()) == (np.uint8, [1, *SIZE, 3])
        normalization = table(first(first(first(metadata(path.read_bytes()), 3), 2), 4), 1)
        assert (floats(normalization, 0), floats(normalization, 1)) == ([0.0], [1.0])


@pytest.mark.slow
def test_any_batch_on_request(tmp_path):
    model = build()
    written = tflite_of(model, LABELS, photos(4, 5), tmp_path, ("float32", "int8-dynamic"), dynamic_batch=True)
    path = written["float32"][0]
    assert path.name == "model-float32-dynamic-batch.tflite"
    interpreter = Interpreter(model_path=str(path))
    interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], (3, *SIZE, 3))
    interpreter.allocate_tensors()
    images = np.random.default_rng(0).uniform(-1, 1, (3, *SIZE, 3)).astype(np.float32)
    logits = interpreter.get_signature_runner("serving_default")(image=images)["logits"]
    np.testing.assert_allclose(logits, model.predict(images, verbose=0), atol=1e-4)


@pytest.mark.slow
def test_a_file_that_mixes_the_images_of_a_batch_is_not_kept(tmp_path, monkeypatch):
    model = build()

    def reversed_batch(*_, **__):
        image = tf.TensorSpec((None, *SIZE, 3), name="image")
        return converted(lambda pixels: {"logits": tf.reverse(model(pixels), [0])}, image, model.weights)

    monkeypatch.setattr(tflite_export, "to_tflite", reversed_batch)
    with pytest.raises(ParityError, match="logits of the float32 TFLite file for several images at a time differ"):
        tflite_of(model, LABELS, photos(4, 5), tmp_path / "phone", ("float32",), dynamic_batch=True)
    assert list(tmp_path.iterdir()) == []


STEM = ResNetConfig((1, 1), 4, (8, 16), preactivation=False, num_groups=2)
FAMILIES = {
    "mean of the tokens": dataclasses.replace(CONFIG, classifier="gap", gelu="erf"),
    "attention pooling": dataclasses.replace(CONFIG, classifier="map", representation_size=9, dropout_rate=0.1),
    "hybrid": ViTConfig(patch_size=1, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20, stem=STEM),
    "BiT": ResNetConfig((1, 1), 4, (8, 16), preactivation=True, num_groups=2),
    "early convolutions": ViTConfig(1, 12, 1, 3, 20, stem=ConvStem((6, 8), (3, 3), (2, 2))),
}


@pytest.mark.parametrize("name", others_slow(FAMILIES, "attention pooling", "hybrid"))
def test_every_family_becomes_a_file(name):
    model = build(FAMILIES[name], channels=1)
    content = to_tflite(model)
    images = np.random.default_rng(5).uniform(-1, 1, (3, *SIZE, 1)).astype(np.float32)
    np.testing.assert_allclose(tflite_file.run_interpreter(content, images)["logits"], model(images), atol=1e-4)
    operators = {operator.name for operator in Graph(content).operators}
    assert "FULLY_CONNECTED" in operators
    assert not operators & {"SHAPE", "PACK", "GATHER", "REDUCE_PROD", "CUSTOM", "READ_VARIABLE", "VAR_HANDLE"}


@pytest.mark.slow
def test_a_model_trained_in_mixed_precision_is_exported_in_float32(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build()
    finally:
        keras.config.set_dtype_policy("float32")
    written = tflite_of(model, LABELS, photos(6, 6), tmp_path, ("float32", "int8-dynamic"))
    assert written["float32"][1]["max_abs_diff"] <= 1e-4
    assert Interpreter(model_path=str(written["float32"][0])).get_output_details()[0]["dtype"] == np.float32


def test_a_calibrated_format_without_images_is_refused_before_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(tflite_export, "to_tflite", pytest.fail)
    with pytest.raises(UserError, match="int8 .* needs representative images for its calibration; pass --calib"):
        tflite_of(build(), LABELS, photos(7, 2), tmp_path / "x", ["float32", "int8"])
    assert list(tmp_path.iterdir()) == []


def test_calibration_images_are_training_images(tmp_path, monkeypatch):
    monkeypatch.setattr("export.source._MOST_CALIBRATION_IMAGES", 4)

    def calibration(run: str, folder: str | None = None, kind: str = "int8") -> Samples | None:
        options = TFLiteOptions(SourceOptions(run), "phone", (kind,), calibration=folder)
        return read_calibration(Run.open(run), options, LABELS)

    zipfile.ZipFile(tmp_path / "model.keras", "w").close()
    photos(8, 6).save(tmp_path / CALIBRATION)
    assert calibration(str(tmp_path), kind="int8-dynamic").encoded == photos(8, 6).encoded[:4]
    assert calibration(str(tmp_path), kind="float32") is calibration("augreg:B_16", kind="int8-dynamic") is None
    (tmp_path / "bee").mkdir()
    for number, content in enumerate(photos(9, 5).encoded):
        (tmp_path / "bee" / f"{number}.png").write_bytes(content)
    found = calibration("augreg:B_16", str(tmp_path))
    assert (len(found.encoded), found.labels.tolist()) == (4, [3, 3, 3, 3])


def test_the_same_model_gives_the_same_file(phone):
    content = phone[1]["float32"][0].read_bytes()
    packed = [tflite_file.with_metadata(content, "x", "y", LABELS, Preprocessing(SIZE), False, "MIT") for _ in range(2)]
    assert packed[0] == packed[1]
    assert zipfile.is_zipfile(io.BytesIO(packed[0]))


# The file that TF Serving runs in place of the graph of a SavedModel, as far as LiteRT alone can tell


@pytest.fixture(name="exported", scope="module")
def _exported() -> ExportedModel:
    """A calibrated model of five classes with seven images."""
    return model_of_five(Provenance(temperature=2.0))


@pytest.fixture(name="expected", scope="module")
def _expected(exported) -> parity.Reference:
    return parity.reference(exported.model, parity.Reference(exported.samples, exported.preprocessing))


@pytest.fixture(name="file", scope="module")
def _file(exported, expected, tmp_path_factory) -> pathlib.Path:
    """The file that is written of it."""
    folder = tmp_path_factory.mktemp("served")
    facts = write_served_file(folder, exported, expected)
    assert facts["tflite_bytes"] == (folder / "model.tflite").stat().st_size
    return folder / "model.tflite"


def test_inputs_and_outputs_have_the_names_by_which_tf_serving_finds_them(file, expected):
    interpreter = Interpreter(model_path=str(file))
    [image] = interpreter.get_input_details()
    assert image["name"] == "image"  # TF Serving looks for the part before a colon
    interpreter.resize_tensor_input(image["index"], (3, 12, 18, 3))
    interpreter.allocate_tensors()
    interpreter.set_tensor(image["index"], next(expected.batches())[1][:3])
    interpreter.invoke()
    found = {end["name"]: interpreter.get_tensor(end["index"]) for end in interpreter.get_output_details()}
    assert found.keys() == {"logits", "probabilities"}
    np.testing.assert_allclose(found["logits"], expected.logits[:3], atol=1e-5)
    np.testing.assert_allclose(found["probabilities"], special.softmax(expected.logits[:3] / 2.0, axis=-1), atol=1e-5)


def test_a_file_with_other_logits_or_probabilities_is_refused(file, exported, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "to_tflite", lambda *_, **__: file.read_bytes())
    other = dataclasses.replace(expected, outputs=[{"logits": row + 0.01} for row in expected.logits])
    with pytest.raises(ParityError, match=r"logits of the file model.tflite differ from the model's by .*0.01"):
        write_served_file(tmp_path, exported, other)
    several = dataclasses.replace(exported, origin=Provenance(multi_label=True))
    with pytest.raises(ParityError, match="probabilities of model.tflite differ"):
        write_served_file(tmp_path, several, expected)


@pytest.mark.parametrize("option", ["attention", "tflite"])
def test_merged_tokens_are_not_beside_what_has_all(option):
    with pytest.raises(UserError, match=f"--merge-tokens .* --{option}"):
        SavedModelOptions(SourceOptions("memory"), "served", merge_tokens=2, **{option: True})
