"""Decodes image files inside a served graph: reports invalid images by index, and limits their memory.

The error of a decoder does not name the element of the batch, and a file of some kilobytes can declare gigabytes of
pixels. So the graph reads the size from the header first, and decodes each file as an element of a tf.data pipeline.
Elements that fail are missing from the result, and the error of the request lists their indices.
"""

import struct

import tensorflow as tf

from export import parity
from keras_vit import Preprocessing
from keras_vit.files.image_formats import format_list, formats

# Largest number of pixels of an image, over all frames: 32 megapixels take 96 MB as bytes and 384 MB when resized.
LARGEST_IMAGE = 32_000_000
# Number of scans of a progressive JPEG without extra cost; encoders write about ten.
_USUAL_SCANS = 32
# Largest number of steps through the blocks of a GIF, about four per frame, and of equal sub-blocks per step.
_GIF_STEPS, _GIF_RUN = 2048, 1024


def decode_batch(image_bytes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Decode image files (B,) in parallel to (B, height, width, channels) float32 in the value range of the model.

    An element of another format, or with more than LARGEST_IMAGE pixels, is INVALID_ARGUMENT with its index.
    """
    shape = (*preprocessing.image_size, preprocessing.channels)
    count = tf.size(image_bytes, out_type=tf.int64)

    @tf.autograph.experimental.do_not_convert  # the rewriting takes longer than the tracing
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        data = image_bytes[index]
        pixels = header_pixels(data)
        with tf.control_dependencies([tf.debugging.Assert((pixels > 0) & (pixels <= LARGEST_IMAGE), [pixels])]):
            return index, tf.ensure_shape(parity.decode(tf.identity(data), preprocessing), shape)

    images = tf.data.Dataset.range(count).map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    images = images.ignore_errors()
    end = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(shape)))  # for an empty batch
    indices, pixels = images.concatenate(end).batch(count + 1).get_single_element()
    missing = tf.sets.difference(tf.range(count)[None], indices[None, :-1]).values
    limit = f"no whole {format_list()} of at most {LARGEST_IMAGE // 10**6} megapixels"
    message = tf.strings.format(f"image_bytes{{}}: {limit}", missing)  # image_bytes[3 5]: no whole …
    with tf.control_dependencies([tf.debugging.Assert(tf.size(missing) == 0, [message])]):
        return preprocessing.normalize(tf.ensure_shape(tf.identity(pixels[:-1]), (None, *shape)))


def header_pixels(data: tf.Tensor) -> tf.Tensor:
    """Number of pixels in the header of an image file, over all frames and scans; 0 for an invalid file.

    Applies the rules of `keras_vit.files.image_formats.format_problem` in a graph.
    """
    # Short files are padded, so that all header fields exist.
    header = tf.cast(tf.io.decode_raw(tf.strings.substr(data, 0, 80) + b"\0" * 80, tf.uint8), tf.int64)
    cases = [
        (_begins(data, b"\xff\xd8\xff"), lambda: _jpeg_pixels(data)),
        (_begins(data, b"\x89PNG\r\n\x1a\n"), lambda: _big_endian(header, 16) * _big_endian(header, 20)),
        (_begins(data, b"BM"), lambda: _bmp_pixels(data, header)),
        (_begins(data, b"GIF8"), lambda: _gif_pixels(data)),
    ]
    if "WebP" in formats():
        is_webp = _begins(data, b"RIFF") & tf.reduce_all(header[8:12] == list(b"WEBP"))
        cases.append((is_webp, lambda: _webp_pixels(header)))
    return tf.case(cases, default=lambda: tf.constant(0, tf.int64))


def _begins(data: tf.Tensor, magic: bytes) -> tf.Tensor:
    # substr of a shorter string returns the string, which differs from the magic.
    return tf.equal(tf.strings.substr(data, 0, len(magic)), magic)


def _little_endian(header: tf.Tensor, position: int, size: int = 4) -> tf.Tensor:
    return tf.reduce_sum(header[position : position + size] * [256**place for place in range(size)])


def _big_endian(header: tf.Tensor, position: int) -> tf.Tensor:
    """A 4-byte integer of a PNG, at most 2**31 - 1; a negative number if it is larger."""
    value = tf.reduce_sum(header[position : position + 4] * [2**24, 2**16, 2**8, 1])
    return tf.where(value < 2**31, value, -LARGEST_IMAGE - 1)


def _jpeg_pixels(data: tf.Tensor) -> tf.Tensor:
    """Width x height, multiplied for progressive files with more scans than encoders write."""
    sides = tf.cast(tf.image.extract_jpeg_shape(data), tf.int64)
    content = tf.io.decode_raw(data, tf.uint8)
    scans = tf.math.count_nonzero((content[:-1] == 0xFF) & (content[1:] == 0xDA))  # never inside entropy-coded data
    return sides[0] * sides[1] * tf.maximum(scans // _USUAL_SCANS, 1)


def _bmp_pixels(data: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """0 for files that TensorFlow decodes wrongly: palettes other than a gray ramp, compression, unusual masks."""
    first_pixel, header_bytes = _little_endian(header, 10), _little_endian(header, 14)
    bits, compression = _little_endian(header, 28, 2), _little_endian(header, 30)
    start = tf.minimum(14 + header_bytes, tf.cast(tf.strings.length(data), tf.int64))
    length = tf.clip_by_value(first_pixel - start, 0, 1024)
    palette = tf.io.decode_raw(tf.strings.substr(data, start, length) + b"\0\0\0", tf.uint8)
    palette = tf.reshape(palette[: tf.size(palette) // 4 * 4], (-1, 4))[: length // 4, :3]
    ramp = tf.reduce_all(tf.cast(palette, tf.int32) == tf.range(tf.shape(palette)[0])[:, None])
    usual = tf.reduce_all(header[54:66] == list(struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)))
    color = ((bits == 24) | (bits == 32)) & ((compression == 0) | ((compression == 3) & usual))
    supported = (header_bytes >= 40) & (color | ((bits <= 8) & (compression == 0) & ramp))
    width, height = (
        tf.cast(tf.bitcast(tf.cast(_little_endian(header, at), tf.uint32), tf.int32), tf.int64) for at in (18, 22)
    )
    return tf.where(supported, tf.abs(width * height), 0)


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


def _gif_pixels(data: tf.Tensor) -> tf.Tensor:
    """Sum over all frames of a GIF, because the decoder reads all frames even if only the first one is used.

    0 if the first frame does not cover the canvas, or if there are more blocks than `_GIF_STEPS`. Consecutive
    sub-blocks of the same length, as encoders write them, are one step.
    """
    content = tf.io.decode_raw(data, tf.uint8)
    length = tf.size(content, out_type=tf.int64)

    def at(position: tf.Tensor) -> tf.Tensor:
        return tf.where(position < length, tf.cast(content[tf.minimum(position, length - 1)], tf.int64), 0)

    def side(position: tf.Tensor) -> tf.Tensor:
        return at(position) + 256 * at(position + 1)

    def color_table(position: tf.Tensor) -> tf.Tensor:
        """Bytes of the color table, from the flags at this position."""
        flags = at(position)
        return tf.where(flags >= 128, 3 * tf.bitwise.left_shift(tf.constant(2, tf.int64), flags % 8), 0)

    def skip_sub_blocks(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Position behind a run of equal sub-blocks and one other sub-block; whether their terminator came, too."""
        stride = 1 + at(position)
        lengths = tf.reshape(content[position : position + stride * _GIF_RUN : stride], (-1,))  # static rank
        differs = tf.cast(lengths, tf.int64) != stride - 1
        equal = tf.where(tf.reduce_any(differs), tf.argmax(differs), tf.size(lengths, out_type=tf.int64))
        other = position + tf.where(stride > 1, equal * stride, 0)
        after = other + 1 + at(other)
        ends = tf.equal(at(other), 0)
        ends_after = ~ends & tf.equal(at(after), 0)
        return after + tf.cast(ends_after, tf.int64), ends | ends_after

    def step(position: tf.Tensor, inside: tf.Tensor, pixels: tf.Tensor, count: tf.Tensor):
        """One block, or several sub-blocks; `inside` tells whether sub-blocks follow."""
        kind = at(position)
        frame, extension = ~inside & tf.equal(kind, 0x2C), ~inside & tf.equal(kind, 0x21)
        after, ends = tf.cond(
            inside,
            lambda: skip_sub_blocks(position),
            lambda: (tf.where(extension, position + 2, length), tf.constant(False)),
        )
        after = tf.where(frame, position + 11 + color_table(position + 9), after)
        width, height = side(position + 5), side(position + 7)
        fits = (width <= screen[0]) & (height <= screen[1])
        fills = tf.equal(side(position + 1) + side(position + 3), 0) & (width == screen[0]) & (height == screen[1])
        fits &= (pixels > 0) | fills
        pixels = tf.where(frame, pixels + width * height, pixels)
        stop = (frame & ~fits) | (count + 1 >= _GIF_STEPS)
        return (
            tf.where(stop, length, after),
            frame | extension | (inside & ~ends),
            tf.where(stop, tf.constant(0, tf.int64), pixels),
            count + 1,
        )

    zero = tf.constant(0, tf.int64)
    screen = side(zero + 6), side(zero + 8)
    start = 13 + color_table(zero + 10)
    walk = (start, tf.constant(False), zero, zero)
    return tf.while_loop(lambda position, *_: position < length, step, walk)[2]
