"""The one opener of image files: what it accepts, what it refuses from the header, and that no other one is used."""

import os
import pathlib
import re
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from keras_vit.images.decode import TooManyPixels, open_image
from tests.support import encoded

ROOT = pathlib.Path(__file__).parents[2]


def dark(form: str, **options) -> bytes:
    return encoded(PIL.Image.new("L", (8, 6), 7), form, **options)


def claiming(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"IDAT" + zlib.compress(bytes(1000)))
    packed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP"])
def test_files_and_their_content_are_opened(kind, tmp_path):
    (tmp_path / "a").write_bytes(dark(kind))
    for file in (dark(kind), tmp_path / "a", str(tmp_path / "a")):
        with open_image(file) as image:
            assert image.size == (8, 6)
            assert abs(int(np.asarray(image.convert("L")).max()) - 7) < 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n", "not a readable JPEG or"),
        (dark("TIFF"), "not a readable JPEG or PNG"),
        (dark("PNG")[:20], "(?i)truncated"),
        (claiming(100, 100), "10,000 pixels, and at most 4,900"),
        (claiming(12_000, 12_000), "144,000,000 pixels, and at most 4,900"),
        (claiming(2**31 - 1, 2**31 - 1), "pixels, and at most 4,900"),
        (dark("JPEG", progressive=True) + b"\xff\xda" * 6400, "9,6.. pixels, and at most 4,900"),
    ],
    ids=["EPS", "TIFF", "cut", "large", "warned of", "bomb", "many scans"],
)
def test_other_formats_and_sizes_are_refused_from_the_header(data, words):
    with pytest.raises((OSError, ValueError), match=words) as caught:
        open_image(data, formats=("JPEG", "PNG"), most_pixels=4900)
    assert isinstance(caught.value, TooManyPixels) == ("pixels" in words)


def test_pipes_and_folders_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", tmp_path, tmp_path / "none.png", "/dev/zero", tmp_path / ("a" * 5000)):
        with pytest.raises(OSError, match="not a regular file|too long"):
            open_image(path)


def test_no_other_code_opens_images():
    files = [path for package in ("keras_vit", "training", "export") for path in (ROOT / package).rglob("*.py")]
    opening = [path for path in files if re.search(r"Image\.open\(|from PIL\.Image import", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in opening] == ["keras_vit/images/decode.py"]
