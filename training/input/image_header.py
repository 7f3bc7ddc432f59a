"""The rules of `keras_vit.files.image_formats` in TensorFlow operations, for tf.data.

A remote TPU host runs no Python. `tests/input/test_image_header.py` compares the two on damaged files.
"""

import struct

import tensorflow as tf

from keras_vit.files.image_formats import formats

# Header fields lie in the first bytes; shorter files are padded with zeros.
_HEADER_BYTES = 66


def is_supported(data: tf.Tensor) -> tf.Tensor:
    """Whether `format_problem` finds nothing in a file that is no JPEG: bytes, a string scalar -> bool."""
    header = _numbers(tf.strings.substr(data, 0, _HEADER_BYTES) + b"\0" * _HEADER_BYTES)
    cases = [
        (_is_png(data), lambda: tf.constant(True)),
        (begins(data, b"BM"), lambda: _has_raw_pixels(data, header)),
        (begins(data, b"GIF8"), lambda: _first_frame_is_full(data)),
    ]
    if "WebP" in formats():
        is_webp = begins(data, b"RIFF") & tf.reduce_all(header[8:12] == list(b"WEBP"))
        animated = tf.reduce_all(header[12:16] == list(b"VP8X")) & (header[20] // 2 % 2 > 0)
        cases.append((is_webp, lambda: ~animated))
    return tf.case(cases, default=lambda: tf.constant(False))


def needs_no_search(data: tf.Tensor) -> tf.Tensor:
    """Whether a file is a JPEG, or a PNG in which no color key can come before the pixels; bool."""
    may_have_key = _may_have_color_key(data) & tf.not_equal(_bytes_at(data, 37, 4), b"IDAT")
    return tf.io.is_jpeg(data) | (_is_png(data) & ~may_have_key)


def _is_png(data: tf.Tensor) -> tf.Tensor:
    return begins(data, b"\x89PNG\r\n\x1a\n")


def _may_have_color_key(data: tf.Tensor) -> tf.Tensor:
    """Whether a PNG is gray or RGB, without alpha."""
    return tf.reduce_any(_bytes_at(data, 25, 1) == [b"\0", b"\2"])


def _bytes_at(data: tf.Tensor, position: int, count: int) -> tf.Tensor:
    return tf.strings.substr(data, tf.minimum(tf.strings.length(data), position), count)


def begins(data: tf.Tensor, magic: bytes) -> tf.Tensor:
    """Whether a string scalar begins with these bytes."""
    # substr of a shorter string returns the string, which differs from the magic.
    return tf.equal(tf.strings.substr(data, 0, len(magic)), magic)


def has_color_key(data: tf.Tensor) -> tf.Tensor:
    """Whether a PNG without alpha channel has a transparent color, which TensorFlow applies only to four channels."""
    length = tf.strings.length(data)

    def chunk(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(length, kind) of the chunk at a position; of IDAT behind the end."""
        inside = position + 8 <= length
        part = tf.where(inside, tf.strings.substr(data, tf.where(inside, position, 0), 8), b"\0\0\0\0IDAT")
        size = tf.reduce_sum(tf.cast(_numbers(tf.strings.substr(part, 0, 4)), tf.int64) * [2**24, 2**16, 2**8, 1])
        return tf.cast(tf.minimum(size, 2**30), tf.int32), tf.strings.substr(part, 4, 4)

    def is_key(position: tf.Tensor) -> tf.Tensor:
        size, kind = chunk(position)
        return tf.equal(kind, b"tRNS") & (tf.minimum(size, length - position - 8) >= key_bytes)

    def goes_on(position: tf.Tensor) -> tf.Tensor:
        return tf.not_equal(chunk(position)[1], b"IDAT") & ~is_key(position)

    def behind(position: tf.Tensor) -> tuple[tf.Tensor]:
        return (position + 12 + chunk(position)[0],)

    def found() -> tf.Tensor:
        # Positions may pass the length by one chunk of 2**30 at most, so they stay below 2**31 for files of a gigabyte.
        return is_key(tf.while_loop(goes_on, behind, [tf.constant(8)])[0])

    key_bytes = tf.where(tf.equal(_bytes_at(data, 25, 1), b"\0"), 2, 6)
    return tf.cond(_is_png(data) & _may_have_color_key(data), found, lambda: tf.constant(False))


def _numbers(data: tf.Tensor) -> tf.Tensor:
    """Bytes as int32."""
    return tf.cast(tf.io.decode_raw(data, tf.uint8), tf.int32)


def _little_endian(header: tf.Tensor, position: int, size: int = 4) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(header[position : position + size], tf.int64) * [256**place for place in range(size)])


def _has_raw_pixels(data: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    length = tf.cast(tf.strings.length(data), tf.int64)
    first_pixel, header_bytes = _little_endian(header, 10), _little_endian(header, 14)
    bits, compression = _little_endian(header, 28, 2), _little_endian(header, 30)
    start = tf.minimum(14 + header_bytes, length)
    palette_bytes = tf.clip_by_value(first_pixel - start, 0, tf.minimum(length - start, 1024)) // 4 * 4
    palette = tf.reshape(_numbers(tf.strings.substr(data, start, palette_bytes)), (-1, 4))[:, :3]
    ramp = tf.reduce_all(palette == tf.range(tf.shape(palette)[0])[:, None])
    usual_masks = tf.reduce_all(header[54:66] == list(struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)))
    colors = (tf.equal(bits, 24) | tf.equal(bits, 32)) & (
        tf.equal(compression, 0) | (tf.equal(compression, 3) & usual_masks)
    )
    raw = (header_bytes >= 40) & tf.where(bits > 8, colors, tf.equal(compression, 0) & ramp)
    return raw | (length < 54)  # too short to be decoded


def _first_frame_is_full(data: tf.Tensor) -> tf.Tensor:
    """Walks over the blocks of a GIF: a frame begins with 0x2C, an extension has two bytes, sub-blocks follow both."""
    content = tf.io.decode_raw(data, tf.uint8)
    length = tf.size(content)

    def at(position: tf.Tensor) -> tf.Tensor:
        """The byte at a position; behind the end that of the trailer."""
        return tf.where(position < length, tf.cast(content[tf.minimum(position, length - 1)], tf.int32), 0x3B)

    def side(position: tf.Tensor) -> tf.Tensor:
        return at(position) + 256 * at(position + 1)

    def table_bytes(position: tf.Tensor) -> tf.Tensor:
        flags = at(position)
        return tf.where(flags >= 128, 3 * tf.bitwise.left_shift(2, flags % 8), 0)

    def frame(position: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Position of the sub-blocks; whether the frame is as it must be."""
        width, height = side(position + 5), side(position + 7)
        full = tf.equal(side(position + 1) + side(position + 3), 0) & (width == screen[0]) & (height == screen[1])
        fits = tf.where(first, full, (width <= screen[0]) & (height <= screen[1]))
        whole = position + 8 < length  # a damaged header passes: the decoder refuses it
        return tf.where(whole, position + 11 + table_bytes(position + 9), length), fits | ~whole

    def sub_blocks(position: tf.Tensor) -> tf.Tensor:
        """The position behind them."""
        last = tf.while_loop(
            lambda position: (position < length) & (at(position) > 0),
            lambda position: (position + 1 + at(position),),
            [position],
        )
        return 1 + last[0]

    def block(position: tf.Tensor, first: tf.Tensor, good: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        is_frame = tf.equal(at(position), 0x2C)
        behind, fits = frame(position, first)
        start = tf.where(is_frame, behind, position + 2)
        return sub_blocks(start), first & ~is_frame, good & (fits | ~is_frame)

    def goes_on(position: tf.Tensor, _, good: tf.Tensor) -> tf.Tensor:
        return good & (position < length) & tf.not_equal(at(position), 0x3B)

    screen = side(tf.constant(6)), side(tf.constant(8))
    start = 13 + table_bytes(tf.constant(10))
    return tf.while_loop(goes_on, block, [start, tf.constant(True), tf.constant(True)])[2] | (length < 11)
