"""Decode image files in a TensorFlow graph: in tf.data pipelines, evaluation and the SavedModel.

A remote TPU host and a server run no Python, so the rules of `keras_vit.images.formats` stand here in TensorFlow
operations again; `tests/images/test_graph.py` compares the two on damaged files. Every loop has a limit, and the size
in the header is checked before memory is taken: a file of some kilobytes can declare gigabytes of pixels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_vit.images.formats import CHUNKS, GRAY_PALETTE, LARGEST_IMAGE, SEGMENTS, USUAL_SCANS, format_list, formats
from keras_vit.images.resizing import SUPPORT, columns_first, kernel

if TYPE_CHECKING:
    import tensorflow as tf
else:

    class _TensorFlow:
        """TensorFlow, imported with the first operation: this package runs without it."""

        def __getattr__(self, name: str):
            return getattr(importlib.import_module("tensorflow"), name)

    tf = _TensorFlow()

_HEADER_BYTES = 80  # header fields lie in the first bytes; shorter files are padded with zeros
# The names of Pillow's filters in ScaleAndTranslate.
_KERNELS = {"bilinear": "triangle", "bicubic": "keyscubic", "lanczos3": "lanczos3"}
_PRECISION = 22  # bits of Pillow's weights after the point
_ORIENTATION, _ENTRY_BYTES = 0x0112, 12  # the tag of the orientation in an EXIF directory, and the bytes of an entry


def _rare(function: Callable) -> Callable:
    """Return a function of its own, traced once for all graphs, which are built in less time if it is not inlined."""
    options = {"autograph": False, "reduce_retracing": True, "experimental_attributes": {"_noinline": True}}
    traced = functools.cache(lambda: tf.function(function, **options))
    return lambda *arguments: traced()(*arguments)


def decode_image(data: tf.Tensor, *, accurate: bool, upright: bool, most_pixels: int = LARGEST_IMAGE) -> tf.Tensor:
    """Bytes of an image file -> uint8 (h, w, C).

    C is that of the file, with an alpha where it has one. A file of another format, or one that declares more pixels
    than the maximum, is INVALID_ARGUMENT.

    Args:
        data: a string scalar.
        accurate: whether JPEGs are decoded with the accurate inverse cosine transform, as Pillow does, or the fast one.
        upright: whether the image is turned by its EXIF orientation.
        most_pixels: maximum of width times height.
    """
    most = tf.constant(most_pixels, tf.int64)
    image = tf.cond(tf.io.is_jpeg(data), lambda: _jpeg(data, 0, most, accurate=accurate), lambda: _other(data, most))
    image.set_shape((None, None, None))
    return _upright(image, data) if upright else image


def decode_to_channels(data: tf.Tensor, preprocessing, *, most_pixels: int = LARGEST_IMAGE) -> tf.Tensor:
    """Bytes of an image file -> uint8 (h, w, channels) of a model, as its `Preprocessing` says; see `decode_image`."""
    accurate, channels = preprocessing.library != "tensorflow", preprocessing.channels
    most = tf.constant(most_pixels, tf.int64)

    def jpeg() -> tf.Tensor:
        # libjpeg repeats gray as we do, at no cost; its gray of colors is not quite ours.
        if channels == 3:
            return _jpeg(data, 3, most, accurate=accurate)
        return preprocessing.to_channels(_jpeg(data, 0, most, accurate=accurate))

    image = tf.cond(tf.io.is_jpeg(data), jpeg, lambda: preprocessing.to_channels(_other(data, most)))
    image.set_shape((None, None, channels))
    return _upright(image, data) if preprocessing.exif_orientation else image


def _upright(image: tf.Tensor, data: tf.Tensor) -> tf.Tensor:
    # After decoding: if that fails, a search that is cancelled beside it could be reported in its place.
    with tf.control_dependencies([image]):
        return turned(image, orientation(tf.identity(data)))


def _jpeg(data: tf.Tensor, channels: int, most_pixels: tf.Tensor, *, accurate: bool) -> tf.Tensor:
    data = checked_jpeg(data, most_pixels)
    return tf.io.decode_jpeg(data, channels=channels, dct_method=dct_method(accurate=accurate))


def checked_jpeg(data: tf.Tensor, most_pixels=LARGEST_IMAGE) -> tf.Tensor:
    """Return the bytes of a JPEG. The graph fails where they declare more pixels than the maximum."""
    with tf.control_dependencies([tf.debugging.Assert(_jpeg_pixels(data) <= most_pixels, ["too large"])]):
        return tf.identity(data)


def dct_method(*, accurate: bool) -> str:
    """Return the inverse cosine transform of libjpeg. Both take the same time; TensorFlow's default is the fast one."""
    return "INTEGER_ACCURATE" if accurate else ""


@_rare
def _other(data: tf.Tensor, most_pixels: tf.Tensor) -> tf.Tensor:
    header = _header(data)
    is_bmp, pixels = begins(data, b"BM"), header_pixels(data)
    good = (pixels > 0) & (pixels <= most_pixels)
    with tf.control_dependencies([tf.debugging.Assert(good, [f"not a whole {format_list()}, or too large"])]):
        data = tf.cond(is_bmp, lambda: tf.strings.substr(data, 0, _bmp_end(header)), lambda: tf.identity(data))
    image = tf.io.decode_image(data, channels=0, dtype=tf.uint8, expand_animations=False)
    image.set_shape((None, None, None))
    return tf.cond(is_bmp, lambda: image[..., :3], lambda: image)  # its fourth byte is seldom an alpha channel


def header_pixels(data: tf.Tensor) -> tf.Tensor:
    """Bytes of an image file -> the pixels that the header of a PNG, BMP or WebP states; 0 for another file."""
    header = _header(data)
    cases = [
        (_is_png(data), lambda: _big_endian(header, 16) * _big_endian(header, 20)),
        (begins(data, b"BM"), lambda: _bmp_pixels(data, header)),
    ]
    if "WebP" in formats():
        is_webp = begins(data, b"RIFF") & tf.reduce_all(header[8:12] == list(b"WEBP"))
        cases.append((is_webp, lambda: _webp_pixels(header)))
    return tf.case(cases, default=lambda: tf.constant(0, tf.int64))


def turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turn an image (h, w, C) as it is seen, by its EXIF orientation, 1 to 8."""
    result = tf.cond(tf.equal(orientation, 1), lambda: image, lambda: _turned(image, orientation))
    result.set_shape((None, None, image.shape[-1]))
    return result


@_rare
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    across = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    mirrored = tf.reduce_any(tf.equal(orientation, [2, 3, 6, 7]))
    upside_down = tf.reduce_any(tf.equal(orientation, [3, 4, 7, 8]))
    across = tf.cond(mirrored, lambda: tf.reverse(across, [1]), lambda: across)
    return tf.cond(upside_down, lambda: tf.reverse(across, [0]), lambda: across)


def orientation(data: tf.Tensor) -> tf.Tensor:
    """Return the EXIF orientation of a file, 1 to 8, int32; 1 if there is none."""
    is_jpeg = tf.io.is_jpeg(data)
    # Of most JPEGs the first segment is JFIF's, and no other one of an application follows.
    first = _numbers(_bytes_at(data, 2, 4) + b"\0" * 4)
    second = _numbers(_bytes_at(data, 4 + 256 * first[2] + first[3], 2) + b"\0" * 2)
    plain = is_jpeg & tf.not_equal(first[1], 0xE1) & ~_is_application(second[1])
    return tf.cond(plain, lambda: tf.constant(1), lambda: _searched_orientation(data))


@_rare
def _searched_orientation(data: tf.Tensor) -> tf.Tensor:
    def of_chunk() -> tf.Tensor:
        # The search takes a hundredth of the time of decoding; nearly no file has the chunk.
        has = tf.strings.regex_full_match(data, rb"\C*(eXIf|EXIF)\C*")
        return tf.cond(has, lambda: _exif_chunk(data), lambda: tf.constant(b""))

    return _exif_orientation(tf.cond(tf.io.is_jpeg(data), lambda: _exif_segment(data), of_chunk))


def _is_application(marker: tf.Tensor) -> tf.Tensor:
    return (marker >= 0xE0) & (marker <= 0xEF) | tf.equal(marker, 0xFE)


def _exif_segment(data: tf.Tensor) -> tf.Tensor:
    """Return the EXIF block of a JPEG, from its APP1 segments before the first table; empty if there is none."""

    def marker(position: tf.Tensor) -> tf.Tensor:
        """Return the first 10 bytes of a segment, int32: 0xFF, its marker, its length, its content."""
        return _numbers(_bytes_at(data, position, 10) + b"\0" * 10)

    def is_exif(head: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(tf.equal(head[:2], [0xFF, 0xE1])) & tf.reduce_all(tf.equal(head[4:10], list(b"Exif\0\0")))

    def goes_on(count: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        head = marker(position)
        return tf.equal(head[0], 0xFF) & _is_application(head[1]) & ~is_exif(head) & (count < SEGMENTS)

    def step(count: tf.Tensor, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        head = marker(position)
        return count + 1, position + 2 + 256 * head[2] + head[3]

    position = tf.while_loop(goes_on, step, [tf.constant(0), tf.constant(2)])[1]
    head = marker(position)
    length = tf.where(is_exif(head), tf.maximum(256 * head[2] + head[3] - 8, 0), 0)
    return _bytes_at(data, position + 10, length)


def _exif_chunk(data: tf.Tensor) -> tf.Tensor:
    """Return the EXIF block of a PNG or WebP; empty if there is none."""
    is_png = _is_png(data)
    end = tf.cast(tf.strings.length(data), tf.int64)

    def chunk(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """(length, kind, whether it is the EXIF) of a chunk."""
        head = _bytes_at(data, tf.cast(position, tf.int32), 8)
        numbers = tf.cast(_numbers(head + b"\0" * 8)[:8], tf.int64)
        big, little = [2**24, 2**16, 2**8, 1], [1, 2**8, 2**16, 2**24]
        length = tf.where(is_png, tf.reduce_sum(numbers[:4] * big), tf.reduce_sum(numbers[4:] * little))
        kind = tf.strings.substr(head + b"\0" * 8, tf.where(is_png, 4, 0), 4)
        return length, kind, tf.equal(kind, tf.where(is_png, b"eXIf", b"EXIF"))

    def goes_on(count: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        return (position + 8 <= end) & ~chunk(position)[2] & (count < CHUNKS)

    def step(count: tf.Tensor, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        length = chunk(position)[0]
        return count + 1, position + tf.where(is_png, 12 + length, 8 + length + length % 2)

    start = tf.where(is_png, tf.constant(8, tf.int64), 12)
    position = tf.while_loop(goes_on, step, [tf.constant(0), start])[1]
    length, _, is_exif = chunk(tf.minimum(position, end))
    length = tf.where(is_exif & (position + 8 <= end), tf.minimum(length, 2**16), 0)
    block = _bytes_at(data, tf.cast(tf.minimum(position, end), tf.int32) + 8, tf.cast(length, tf.int32))
    return tf.where(begins(block, b"Exif\0\0"), _bytes_at(block, 6, 2**16), block)


def _exif_orientation(exif: tf.Tensor) -> tf.Tensor:
    """Return the orientation in the first directory of an EXIF block, in either byte order; 1 if there is none."""
    content = tf.cast(_numbers(exif + b"\0" * 8), tf.int64)
    length = tf.strings.length(exif)
    little = begins(exif, b"II")

    def number(digits: tf.Tensor, count: int = 2) -> tf.Tensor:
        """Return bytes (..., count) as numbers."""
        powers = [256**place for place in range(count)]
        ordered = tf.where(little, tf.constant(powers, tf.int64), tf.constant(powers[::-1], tf.int64))
        return tf.reduce_sum(digits * ordered, axis=-1)

    directory = tf.cast(tf.minimum(number(content[4:8], 4), 2**16), tf.int32)
    known = (little | begins(exif, b"MM")) & (directory + 2 <= length)
    start = tf.where(known, directory, 0) + 2
    count = tf.cast(number(content[start - 2 : start]), tf.int32)
    count = tf.where(known, tf.minimum(count, (length - start) // _ENTRY_BYTES), 0)
    entries = tf.reshape(content[start : start + _ENTRY_BYTES * count], (-1, _ENTRY_BYTES))
    is_long = tf.equal(number(entries[:, 2:4]), 4)
    values = tf.where(is_long, number(entries[:, 8:12], 4), number(entries[:, 8:10]))
    here = tf.concat([tf.equal(number(entries[:, :2]), _ORIENTATION), [True]], 0)
    value = tf.concat([values, tf.ones(1, tf.int64)], 0)[tf.argmax(here)]
    return tf.where((value >= 1) & (value <= 8), tf.cast(value, tf.int32), 1)


def begins(data: tf.Tensor, magic: bytes) -> tf.Tensor:
    """Return whether a string scalar begins with these bytes."""
    # substr of a shorter string returns the string, which differs from the magic.
    return tf.equal(tf.strings.substr(data, 0, len(magic)), magic)


def _is_png(data: tf.Tensor) -> tf.Tensor:
    return begins(data, b"\x89PNG\r\n\x1a\n")


def _bytes_at(data: tf.Tensor, position, count) -> tf.Tensor:
    return tf.strings.substr(data, tf.minimum(tf.strings.length(data), position), count)


def _numbers(data: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.io.decode_raw(data, tf.uint8), tf.int32)


def _header(data: tf.Tensor) -> tf.Tensor:
    """Return the first bytes of a file, int64, with zeros behind a shorter one."""
    return tf.cast(_numbers(tf.strings.substr(data, 0, _HEADER_BYTES) + b"\0" * _HEADER_BYTES), tf.int64)


def _little_endian(header: tf.Tensor, position: int, size: int = 4) -> tf.Tensor:
    return tf.reduce_sum(header[position : position + size] * [256**place for place in range(size)])


def _big_endian(header: tf.Tensor, position: int) -> tf.Tensor:
    """Return a 4-byte integer of a PNG, at most 2**31 - 1; a negative number if it is larger."""
    value = tf.reduce_sum(header[position : position + 4] * [2**24, 2**16, 2**8, 1])
    return tf.where(value < 2**31, value, -LARGEST_IMAGE - 1)


def _jpeg_pixels(data: tf.Tensor) -> tf.Tensor:
    """Width x height, multiplied for files with more scans than encoders of progressive files write."""
    sides = tf.cast(tf.image.extract_jpeg_shape(data), tf.int64)
    content = tf.io.decode_raw(data, tf.uint8)
    scans = tf.math.count_nonzero((content[:-1] == 0xFF) & (content[1:] == 0xDA))  # never inside entropy-coded data
    return sides[0] * sides[1] * tf.maximum(scans // USUAL_SCANS, 1)


def _bmp_pixels(data: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """0 for files that TensorFlow decodes wrongly: those of palettes other than a gray one, and compressed ones."""
    header_bytes, bits = _little_endian(header, 14), _little_endian(header, 28, 2)
    palette = _bytes_at(data, tf.cast(tf.minimum(14 + header_bytes, 2**30), tf.int32), len(GRAY_PALETTE))
    plain = (bits == 24) | (bits == 32) | ((bits == 8) & (palette == GRAY_PALETTE))
    plain &= (header_bytes >= 40) & (_little_endian(header, 30) == 0)
    return tf.where(plain, _little_endian(header, 18) * _bmp_rows(header), 0)


def _bmp_rows(header: tf.Tensor) -> tf.Tensor:
    """Return the height, which is negative where rows go from top to bottom, as a positive number."""
    height = _little_endian(header, 22)
    return tf.minimum(height, 2**32 - height)


def _bmp_end(header: tf.Tensor) -> tf.Tensor:
    """Return where the pixels of a BMP end, int32: behind them TensorFlow accepts no byte, but Photoshop writes two."""
    row_bytes = (_little_endian(header, 18) * _little_endian(header, 28, 2) + 31) // 32 * 4
    return tf.cast(tf.minimum(_little_endian(header, 10) + row_bytes * _bmp_rows(header), 2**31 - 1), tf.int32)


def _webp_pixels(header: tf.Tensor) -> tf.Tensor:
    """0 for an animation, because TensorFlow 2.21 overflows the buffer of its first frame."""

    def is_kind(kind: bytes) -> tf.Tensor:
        return tf.reduce_all(header[12:16] == list(kind))

    def extended() -> tf.Tensor:
        pixels = (1 + _little_endian(header, 24, 3)) * (1 + _little_endian(header, 27, 3))
        return tf.where(tf.equal(header[20] // 2 % 2, 0), pixels, 0)

    def lossless() -> tf.Tensor:
        sides = _little_endian(header, 21)
        return (1 + sides % 2**14) * (1 + sides // 2**14 % 2**14)

    def lossy() -> tf.Tensor:
        return (_little_endian(header, 26, 2) % 2**14) * (_little_endian(header, 28, 2) % 2**14)

    kinds = [(is_kind(b"VP8X"), extended), (is_kind(b"VP8L"), lossless), (is_kind(b"VP8 "), lossy)]
    return tf.case(kinds, default=lambda: tf.constant(0, tf.int64))


def preprocessed_bytes(image: tf.Tensor, preprocessing) -> tf.Tensor:
    """`Preprocessing.resized` for bytes (..., h, w, C), of the channels of the model, that stay bytes."""
    size, channels = preprocessing.image_size, preprocessing.channels
    if len(image.shape) > 3:
        result = tf.map_fn(lambda one: preprocessed_bytes(one, preprocessing), image)
        return tf.ensure_shape(result, (*image.shape[:-3], *size, channels))
    sides = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float64))
    places = preprocessing.placements(sides, tf)
    rows, columns = (type(place)(*(tf.cast(number, tf.int32) for number in place)) for place in places)
    if preprocessing.resize == "crop":
        image = image[rows.first : rows.first + rows.window, columns.first : columns.first + columns.window]
    image = resize_bytes(image, (rows.resized, columns.resized), preprocessing.interpolation)
    if preprocessing.crop_from is not None:
        image = image[rows.begin : rows.begin + size[0], columns.begin : columns.begin + size[1]]
    if preprocessing.resize == "pad":
        fill = tf.constant(preprocessing.fill(), tf.float32)
        below, right = size[0] - rows.before - tf.shape(image)[0], size[1] - columns.before - tf.shape(image)[1]
        # Where the image is less the fill, zeros beside it are the fill.
        paddings = [[rows.before, below], [columns.before, right], [0, 0]]
        image = tf.cast(tf.pad(tf.cast(image, tf.float32) - fill, paddings) + fill, tf.uint8)
    return tf.ensure_shape(image, (*size, channels))


def resize(image: tf.Tensor, size, preprocessing) -> tf.Tensor:
    """Resize an image (h, w, C) -> (height, width, C), 0..255, with the filter of a model, in its `dtype`.

    For augmentation: of bytes a few are a level off Pillow's, which saves a third of the time.

    size: (height, width), numbers or a tensor of two.
    """
    if preprocessing.dtype == "uint8":
        if image.dtype != tf.uint8:
            image = tf.saturate_cast(tf.round(image), tf.uint8)
        size = tuple(tf.unstack(size) if tf.is_tensor(size) else size)
        return resize_bytes(image, size, preprocessing.interpolation, exact=False)
    # The blur of gaussian is nearly that of an antialiased bilinear filter; TensorFlow's own gaussian is another one.
    interpolation = {"gaussian": "bilinear"}.get(preprocessing.interpolation, preprocessing.interpolation)
    return tf.image.resize(image, size, interpolation, antialias=preprocessing.antialias)


def resize_bytes(image: tf.Tensor, size: tuple, interpolation: str, *, exact: bool = True) -> tf.Tensor:
    """Bytes (h, w, C) -> (height, width, C) uint8, equal to Pillow's.

    ScaleAndTranslate sums over the few pixels under the filter. It is fast if the axis that it resizes is the first of
    a matrix, so the image is transposed for its rows and transposed back for its columns.

    Args:
        image: (h, w, C) uint8; h and w may be unknown before the graph runs.
        size: (height, width), int32 scalars or integers.
        interpolation: a filter of Pillow.
        exact: whether sums that are halfway between two integers round as Pillow's. Else they may be a level off: 1%
            of the pixels for some ratios of sides, none for most.
    """
    (height, width), channels = tf.unstack(tf.shape(image)[:2]), image.shape[-1]
    known = [None if tf.is_tensor(length) else length for length in size]
    if interpolation == "nearest":
        rows, columns = (_nearest(side, length) for side, length in zip((height, width), size, strict=True))
        return tf.gather(tf.gather(image, rows), columns, axis=1)
    # Pillow 13 resizes the columns of tall images first (`Resample.c`, ImagingResample).
    tall = columns_first((height, width), [tf.cast(length, tf.int32) for length in size])

    def across(pixels: tf.Tensor) -> tf.Tensor:
        return tf.cond(tall, lambda: tf.transpose(pixels, (1, 0, 2)), lambda: pixels)

    (height, width), size = (
        tf.unstack(tf.where(tall, tf.reverse(sides, [0]), sides)) for sides in (tf.shape(image)[:2], tf.stack(size))
    )
    columns = tf.transpose(tf.reshape(across(image), (height, width * channels)))
    columns = _resized_rows(tf.reshape(columns, (width, channels * height)), size[1], interpolation, exact=exact)
    rows = tf.transpose(tf.reshape(columns, (size[1] * channels, height)))
    rows = _resized_rows(tf.reshape(rows, (height, size[1] * channels)), size[0], interpolation, exact=exact)
    resized = across(tf.reshape(rows, (size[0], size[1], channels)))
    resized.set_shape((*known, channels))  # which tall hides: training needs the sides before the graph runs
    return resized


def _nearest(side: tf.Tensor, length) -> tf.Tensor:
    """The pixel of an axis that each pixel of a resized one shows; sums as in Pillow (`Geometry.c`, scale_affine)."""
    step = tf.cast(side, tf.float64) / tf.cast(length, tf.float64)
    steps = tf.concat([step[None] / 2.0, tf.fill([length - 1], step)], axis=0)
    return tf.minimum(tf.cast(tf.cumsum(steps), tf.int32), side - 1)


def _resized_rows(matrix: tf.Tensor, length, interpolation: str, *, exact: bool) -> tf.Tensor:
    """Bytes (side, n) -> (length, n) uint8, resized along the first axis."""
    if interpolation == "box":  # whose pixels at the edge are in or out by the last bit
        return _box(matrix, length)
    side, width = tf.unstack(tf.shape(matrix))
    # The op inverts its scale in float32: the inverse of the rounded step comes back as the step.
    step = tf.cast(tf.cast(side, tf.float64) / tf.cast(length, tf.float64), tf.float32)
    sums = tf.raw_ops.ScaleAndTranslate(
        images=tf.reshape(matrix, tf.stack([1, side, 1, width])),
        size=tf.stack([length, 1]),
        scale=tf.stack([1.0 / step, 1.0]),
        translation=[0.0, 0.0],
        kernel_type=_KERNELS[interpolation],
        antialias=True,
    )
    sums = tf.reshape(sums, (length, width))
    return _halves_as_in_pillow(sums, matrix, interpolation) if exact else _rounded(sums)


def _rounded(sums: tf.Tensor, shift=0.0) -> tf.Tensor:
    """Sums plus a shift >= 0, rounded to 0..255, uint8: in one pass over them."""
    quantized = tf.raw_ops.QuantizeV2(
        input=sums, min_range=-shift, max_range=255.0 - shift, T=tf.quint8, round_mode="HALF_AWAY_FROM_ZERO"
    )
    return tf.bitcast(quantized.output, tf.uint8)


def _box(matrix: tf.Tensor, length) -> tf.Tensor:
    """Bytes (side, n) -> (length, n) uint8: means, in the integers of Pillow."""
    side = tf.shape(matrix)[0]
    first, coefficients = _pillow_coefficients(side, length, "box")
    pixel = tf.minimum(first[:, None] + tf.range(tf.shape(coefficients)[1]), side - 1)
    row = tf.range(length)[:, None] + tf.zeros_like(pixel)
    sums = tf.raw_ops.SparseTensorDenseMatMul(
        a_indices=tf.reshape(tf.cast(tf.stack([row, pixel], axis=-1), tf.int64), (-1, 2)),
        a_values=tf.reshape(tf.cast(coefficients, tf.float64), (-1,)),
        a_shape=tf.cast(tf.stack([length, side]), tf.int64),
        b=tf.cast(matrix, tf.float64),
    )
    return tf.cast(tf.clip_by_value(tf.floor(sums * 2.0**-_PRECISION + 0.5), 0.0, 255.0), tf.uint8)


def _halves_as_in_pillow(sums: tf.Tensor, matrix: tf.Tensor, interpolation: str) -> tf.Tensor:
    """Sums (length, n) rounded to uint8; those that are close to a half are computed again, in integers.

    Pillow's weights are integers of 22 bits (`Resample.c`, normalize_coeffs_8bpc). Their errors decide where it rounds
    a sum that is a half in exact arithmetic, and for simple ratios of sides many are.
    """
    side, width = tf.unstack(tf.shape(matrix))
    # ScaleAndTranslate computes places of pixels in float32.
    distance = 5e-4 + 1e-6 * tf.cast(side, tf.float32)
    pixels = _rounded(sums - distance)
    doubtful = tf.where(tf.reshape(tf.not_equal(pixels, _rounded(sums, distance)), (-1,)))  # (m, 1)
    first, coefficients = _pillow_coefficients(side, tf.shape(sums)[0], interpolation)
    place = tf.cast(doubtful[:, 0], tf.int32)
    row, column = place // width, place % width
    rows = tf.minimum(tf.gather(first, row)[:, None] + tf.range(tf.shape(coefficients)[1]), side - 1)  # (m, taps)
    values = tf.gather(tf.reshape(matrix, (-1,)), rows * width + column[:, None])
    total = tf.reduce_sum(tf.cast(values, tf.int32) * tf.gather(coefficients, row), axis=1)
    total = tf.bitwise.right_shift(total + 2 ** (_PRECISION - 1), _PRECISION)
    exact = tf.cast(tf.clip_by_value(total, 0, 255), tf.uint8)
    return tf.reshape(tf.tensor_scatter_nd_update(tf.reshape(pixels, (-1,)), doubtful, exact), tf.shape(pixels))


def _pillow_coefficients(side: tf.Tensor, length: tf.Tensor, interpolation: str) -> tuple[tf.Tensor, tf.Tensor]:
    """(first pixel (length,), weights (length, taps)) of the pixels of a resized axis, int32, as in Pillow."""
    step = tf.cast(side, tf.float64) / tf.cast(length, tf.float64)
    scale = tf.maximum(step, 1.0)
    center = (tf.cast(tf.range(length), tf.float64) + 0.5) * step
    support = SUPPORT[interpolation] * scale
    first = tf.maximum(tf.cast(center - support + 0.5, tf.int32), 0)
    last = tf.minimum(tf.cast(center + support + 0.5, tf.int32), side)
    pixel = first[:, None] + tf.range(tf.reduce_max(last - first))
    weights = kernel(interpolation, (tf.cast(pixel, tf.float64) - center[:, None] + 0.5) / scale, tf)
    weights = tf.where(pixel < last[:, None], weights, 0.0)
    weights *= 2.0**_PRECISION / tf.reduce_sum(weights, axis=1, keepdims=True)
    return first, tf.cast(tf.where(weights < 0.0, weights - 0.5, weights + 0.5), tf.int32)
