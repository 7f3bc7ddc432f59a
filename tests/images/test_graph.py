"""The decoder in a graph and the one with Pillow: the same pixels, orientations and verdicts."""

import io
import pathlib
import struct
import sys
from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.errors import UserError
from keras_vit.images import decode as decoding
from keras_vit.images import graph
from keras_vit.images.decode import decode_file, decode_with_pillow
from keras_vit.images.formats import format_problem, orientation
from keras_vit.images.preprocessing import to_channels
from tests.support import encoded

DAMAGED = pathlib.Path(__file__).parents[1] / "fixtures" / "damaged"
GRAY = np.random.default_rng(0).integers(0, 256, (7, 11), np.uint8)


def gray(form: str, mode: str = "L", **options) -> bytes:
    return encoded(PIL.Image.fromarray(GRAY).convert(mode), form, **options)


SIGNATURE = [tf.TensorSpec((), tf.string)]  # so that they are traced once
decode = tf.function(lambda data: graph.decode_image(data, accurate=True, upright=True), SIGNATURE, autograph=False)
orientation_in_graph = tf.function(graph.orientation, SIGNATURE, autograph=False)
ANIMATION = {"save_all": True, "append_images": [PIL.Image.fromarray(GRAY[::-1])]}
FILES = {
    "gray PNG": gray("PNG"), "gray PNG with a color key": gray("PNG", transparency=3),
    "PNG with a color key": gray("PNG", "RGB", transparency=(1, 2, 3)),
    "PNG with a palette": gray("PNG", "P", transparency=3), "PNG with alpha": gray("PNG", "RGBA"),
    "GIF": gray("GIF"), "animated GIF": gray("GIF", **ANIMATION), "gray BMP": gray("BMP"),
    "BMP": gray("BMP", "RGB"), "BMP with alpha": gray("BMP", "RGBA"),
    "black and white BMP": gray("BMP", "1"), "WebP": gray("WEBP", "RGB"),
    "animated WebP": gray("WEBP", "RGB", **ANIMATION), "gray JPEG": gray("JPEG"),
    "JPEG": gray("JPEG", "RGB"), "JPEG of four inks": gray("JPEG", "CMYK"),
    "progressive JPEG": gray("JPEG", "RGB", progressive=True, subsampling=2),
    "PNG with 16 bits": gray("PNG", "I;16"), "PNG with 1 bit": gray("PNG", "1"),
    "gray PNG with alpha": gray("PNG", "LA"), "lossless WebP with alpha": gray("WEBP", "RGBA", lossless=True),
    "TIFF": gray("TIFF"), "words": b"words", "nothing": b"",
}  # fmt: skip
REFUSED = ("TIFF", "words", "nothing", "animated WebP", "black and white BMP", "GIF", "animated GIF")


def in_graph(data: bytes) -> np.ndarray | None:
    try:
        return decode(tf.constant(data)).numpy()
    except tf.errors.InvalidArgumentError:
        return None


def with_pillow(data: bytes) -> np.ndarray | None:
    try:
        return None if format_problem(data) else decode_with_pillow(data, upright=True)
    except Exception:
        return None


@pytest.mark.parametrize("name", FILES)
def test_whole_files_have_the_same_pixels_and_cut_ones_none(name):
    data = FILES[name]
    found, expected = in_graph(data), with_pillow(data)
    assert (found is None) == (name in REFUSED)
    assert (expected is None) == (name in REFUSED)
    if expected is not None:
        np.testing.assert_array_equal(*(to_channels(image, 3, "white") for image in (found, expected)))
    for length in np.linspace(0, len(data) - 20, 5).astype(int):
        assert in_graph(data[:length]) is None, length
        assert with_pillow(data[:length]) is None, length


@pytest.mark.parametrize("name", FILES)
def test_header_rules_are_the_same_in_damaged_files(name):
    rng, data = np.random.default_rng(1), FILES[name]
    for position in rng.integers(0, min(len(data), 90) or 1, 60 if data else 0):
        file = data[:position] + rng.bytes(1) + data[position + 1 :]
        if format_problem(file):
            assert in_graph(file) is None, file[:90]


@pytest.mark.parametrize("path", sorted(DAMAGED.iterdir()), ids=lambda path: path.name)
def test_a_damaged_png_is_refused_by_both(path):
    assert in_graph(path.read_bytes()) is None
    assert with_pillow(path.read_bytes()) is None


def test_the_reason_is_told_without_the_trace_of_the_graph():
    for data, reason in ((FILES["JPEG"][:-20], "jpeg::Uncompress failed. Invalid JPEG"), (b"", "the file is empty")):
        with pytest.raises(UserError, match=f"^x is not a readable image: {reason}[^:.]*; repair or remove it.$"):
            decode_file(data, "x", accurate=True, upright=True)


def test_another_backend_reads_and_refuses_the_same_files(on_jax):
    for data in (FILES["BMP"][:-1], FILES["animated WebP"], FILES["JPEG"], FILES["PNG with a palette"]):
        expected = in_graph(data)
        if expected is None:
            with pytest.raises(UserError, match="not a readable image"):
                decode_file(data, "x", accurate=True, upright=True)
        else:
            np.testing.assert_array_equal(decode_file(data, "x", accurate=True, upright=True), expected)


@pytest.mark.parametrize("name", ["BMP", "gray BMP", "BMP with alpha"])
def test_bytes_behind_the_pixels_of_a_bmp_are_left_out(name):
    for more in (b"\0\0", bytes(700)):
        for found in (in_graph(FILES[name] + more), with_pillow(FILES[name] + more)):
            np.testing.assert_array_equal(found, in_graph(FILES[name]))


@pytest.mark.parametrize("name", ["GIF", "animated GIF", "black and white BMP"])
def test_what_no_graph_reads_is_read_by_pillow_where_a_file_is_read_alone(name):
    expected = PIL.Image.fromarray(GRAY).convert("1" if "BMP" in name else "L")
    decoded = decode_file(FILES[name], name, accurate=True, upright=True)
    np.testing.assert_array_equal(to_channels(decoded, 3), np.asarray(expected.convert("RGB")))


def test_a_transparent_gif_is_put_on_white_as_other_images_are():
    palette = PIL.Image.fromarray(GRAY).convert("P", palette=PIL.Image.Palette.ADAPTIVE, colors=4)
    decoded = decode_file(encoded(palette, "GIF", transparency=0), "x", accurate=True, upright=True)
    seen = np.where(np.asarray(palette)[..., None] == 0, 255, np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(to_channels(decoded, 3, "white"), seen)


def test_of_an_animation_only_the_first_frame_is_read():
    data = FILES["animated GIF"]
    damaged = data[: data.index(b"\x21\xf9", data.index(b"\x2c"))] + b"damaged"
    np.testing.assert_array_equal(*(decode_file(each, "x", accurate=True, upright=True) for each in (data, damaged)))


def exif(orientation: int, order: str, kind: int = 3) -> bytes:
    """An EXIF block with other entries before and after the orientation."""
    value = struct.pack(order + ("I" if kind == 4 else "HH"), *((orientation,) if kind == 4 else (orientation, 0)))
    entries = struct.pack(order + "HHII", 0x010F, 4, 1, 7)
    entries += struct.pack(order + "HHI", 0x0112, kind, 1) + value + struct.pack(order + "HHII", 0x011A, 4, 1, 9)
    return {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, 3) + entries + b"\0" * 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_images_are_turned_as_pillow_turns_them(kind, order):
    colors = np.random.default_rng(3).integers(0, 256, (5, 8, 3), np.uint8)
    options = {"lossless": True} if kind == "WEBP" else {"subsampling": 0} if kind == "JPEG" else {}
    for number in range(1, 9):
        data = encoded(colors, kind, exif=exif(number, order), **options)
        expected = np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))))
        np.testing.assert_array_equal(in_graph(data), expected)
        np.testing.assert_array_equal(with_pillow(data), expected)


@pytest.mark.parametrize("order", ["<", ">"])
def test_damaged_orientations_are_read_alike_and_stay_within_bounds(order):
    rng = np.random.default_rng(4)
    for kind in (3, 4):
        block = exif(6, order, kind)
        blocks = [block, *(block[:length] for length in range(0, len(block), 3))]
        blocks += [block[:at] + rng.bytes(1) + block[at + 1 :] for at in rng.integers(0, len(block), 80)]
        for damaged in blocks:
            segment = b"\xff\xe1" + struct.pack(">H", len(damaged) + 8) + b"Exif\0\0" + damaged
            file = FILES["JPEG"][:2] + segment + FILES["JPEG"][2:]
            assert int(orientation_in_graph(tf.constant(file))) == orientation(file), damaged


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "box", "nearest"])
def test_an_image_that_is_resized_to_known_sides_has_them_before_the_graph_runs(interpolation):
    """Training needs them: patches are cut by numbers."""
    resize = tf.function(lambda image: graph.resize_bytes(image, (12, 16), interpolation), autograph=False)
    assert resize.get_concrete_function(tf.TensorSpec((None, None, 3), tf.uint8)).output_shapes == (12, 16, 3)


@pytest.fixture(name="decode_with_graph")
def _decode_with_graph(monkeypatch) -> Callable[[bool], None]:
    """Whether images are decoded by a graph from now on, which is otherwise so after the first ones."""
    return lambda yes: monkeypatch.setattr(decoding, "_WITHOUT_GRAPH", 0 if yes else sys.maxsize)


def test_the_first_images_are_decoded_without_a_graph_to_the_same_pixels_and_messages(decode_with_graph):
    def found(by_graph: bool, data: bytes) -> np.ndarray | str:
        decode_with_graph(by_graph)
        try:
            return decode_file(data, "x", accurate=True, upright=True)
        except UserError as error:
            return str(error)

    for file in (*FILES.values(), *(file.read_bytes() for file in sorted(DAMAGED.iterdir()))):
        np.testing.assert_array_equal(found(False, file), found(True, file))


def test_no_slice_of_the_graph_has_a_negative_stride():
    """Grappler prints an error for each that it takes for a slice of a shape: "layout failed: … stride is negative"."""
    preprocessing = Preprocessing(image_size=(8, 8), resize="pad", interpolation="bicubic")
    read = tf.function(preprocessing.read, autograph=False)
    definition = read.get_concrete_function(tf.TensorSpec((), tf.string)).graph.as_graph_def()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        for node in nodes:
            strides = constants.get(node.input[3].split(":")[0]) if node.op == "StridedSlice" else None
            assert strides is None or (tf.make_ndarray(strides) > 0).all(), node.name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_graph_has_the_maximum_of_pixels_that_its_reader_needs(kind):
    data = tf.constant(encoded(PIL.Image.new("RGB", (20, 30)), kind))
    assert graph.decode_image(data, accurate=True, upright=True, most_pixels=600).shape == (30, 20, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        graph.decode_image(data, accurate=True, upright=True, most_pixels=599)
