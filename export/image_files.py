"""Image files inside a served graph: every picture that cannot be one is named, none can take the server's memory.

A decoder's own error names no element of the batch, and a file of some kilobytes can claim gigabytes of pixels. So the
size that a file claims is read from its header first, and each file is decoded as an element of a tf.data pipeline:
what fails there is missing from the result, and its number goes into the one error of the request.
"""

import tensorflow as tf

from export import parity
from keras_vit import Preprocessing

# Pixels of one picture, of all its frames together: 32 megapixels are 96 MB of bytes and 384 MB while resized.
LARGEST_IMAGE = 32_000_000


def decode_batch(image_bytes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Image files (B,) -> (B, height, width, channels) float32 in the model's range, decoded in parallel.

    An element that is no JPEG, PNG, BMP or GIF of at most LARGEST_IMAGE pixels is INVALID_ARGUMENT with its number.
    """
    shape = (*preprocessing.image_size, preprocessing.channels)
    count = tf.size(image_bytes, out_type=tf.int64)

    def decode(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        data = image_bytes[index]
        pixels = claimed_pixels(data)
        with tf.control_dependencies([tf.debugging.Assert((pixels > 0) & (pixels <= LARGEST_IMAGE), [pixels])]):
            return index, tf.ensure_shape(parity.decode(tf.identity(data), preprocessing), shape)

    images = tf.data.Dataset.range(count).map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    images = images.ignore_errors()
    end = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(shape)))  # for an empty batch
    numbers, pixels = images.concatenate(end).batch(count + 1).get_single_element()
    missing = tf.sets.difference(tf.range(count)[None], numbers[None, :-1]).values
    limit = f"no whole JPEG, PNG, BMP or GIF of at most {LARGEST_IMAGE // 10**6} megapixels"
    complaint = tf.strings.format(f"image_bytes{{}}: {limit}", missing)  # image_bytes[3 5]: no whole …
    with tf.control_dependencies([tf.debugging.Assert(tf.size(missing) == 0, [complaint])]):
        return preprocessing.normalize(tf.ensure_shape(tf.identity(pixels[:-1]), (None, *shape)))


def claimed_pixels(data: tf.Tensor) -> tf.Tensor:
    """Pixels that the header of an image file promises, of all frames together; 0 for what is none of the four."""

    def jpeg() -> tf.Tensor:
        sides = tf.cast(tf.image.extract_jpeg_shape(data), tf.int64)
        return sides[0] * sides[1]

    def png() -> tf.Tensor:
        return tf.reduce_prod(tf.cast(_integers(data, 16, 2, tf.int32, little_endian=False), tf.int64))

    def bmp() -> tf.Tensor:
        return tf.abs(tf.reduce_prod(tf.cast(_integers(data, 18, 2, tf.int32, little_endian=True), tf.int64)))

    return tf.case(
        [
            (_begins(data, b"\xff\xd8\xff"), jpeg),
            (_begins(data, b"\x89PNG\r\n\x1a\n"), png),
            (_begins(data, b"BM"), bmp),
            (_begins(data, b"GIF8"), lambda: _gif_pixels(data)),
        ],
        default=lambda: tf.constant(0, tf.int64),
    )


def _begins(data: tf.Tensor, magic: bytes) -> tf.Tensor:
    # A string shorter than the magic is its own beginning, and another one.
    return tf.equal(tf.strings.substr(data, 0, len(magic)), magic)


def _integers(data: tf.Tensor, position: int, count: int, kind: tf.DType, *, little_endian: bool) -> tf.Tensor:
    size = count * kind.size
    part = tf.strings.substr(data, position, size)
    whole = tf.debugging.Assert(tf.equal(tf.strings.length(part), size), ["too short"])
    with tf.control_dependencies([whole]):
        return tf.io.decode_raw(tf.identity(part), kind, little_endian=little_endian)


def _gif_pixels(data: tf.Tensor) -> tf.Tensor:
    """Walks the blocks of a GIF: its decoder reads every frame, each of whatever size, though only one is wanted."""
    content = tf.cast(tf.io.decode_raw(data, tf.uint8), tf.int64)
    length = tf.size(content, out_type=tf.int64)

    def at(position: tf.Tensor) -> tf.Tensor:
        return tf.where(position < length, content[tf.minimum(position, length - 1)], 0)

    def side(position: tf.Tensor) -> tf.Tensor:
        return at(position) + 256 * at(position + 1)

    def colours(position: tf.Tensor) -> tf.Tensor:
        """Bytes of the colour table that the flags at this position announce."""
        flags = at(position)
        return tf.where(flags >= 128, 3 * tf.bitwise.left_shift(tf.constant(2, tf.int64), flags % 8), 0)

    def step(position: tf.Tensor, inside: tf.Tensor, pixels: tf.Tensor):
        """One block, or one part of a block's data; `inside` is whether parts follow."""
        kind = at(position)
        frame, extension = ~inside & tf.equal(kind, 0x2C), ~inside & tf.equal(kind, 0x21)
        after = tf.where(inside, position + 1 + kind, tf.where(extension, position + 2, length))
        after = tf.where(frame, position + 11 + colours(position + 9), after)
        pixels += tf.where(frame, side(position + 5) * side(position + 7), 0)
        return after, frame | extension | (inside & (kind > 0)), pixels

    start = 13 + colours(tf.constant(10, tf.int64))
    walk = (start, tf.constant(False), tf.constant(0, tf.int64))
    return tf.while_loop(lambda position, inside, pixels: position < length, step, walk)[2]
