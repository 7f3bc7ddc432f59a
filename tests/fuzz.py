"""A process that reads damaged files: `python -m tests.fuzz READER=COUNT ...`.

It has 2 GB, and 20 seconds for each file. Each file is one that the program writes, changed at some
places. It must end in a result or in an exception that the reader declares: no other exception, no crash, no time or
memory without end.
"""

import functools
import io
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import PIL.Image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_vit.errors import UserError

MEMORY, SECONDS = 2 * 2**30, 20
# A file, and what reads it.
Case = tuple[bytes, Callable[[bytes], object]]

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "remove", "cut", "repeat"]),
        st.integers(0, 10**9),
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"9" * 30])),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for what, number, part in edits:
        place = number % (len(data) + 1)
        behind = {"replace": part + data[place + len(part) :], "insert": part + data[place:], "cut": b""}
        behind |= {"remove": data[place + len(part) :], "repeat": data[place : place + 50] * 9 + data[place:]}
        data = data[:place] + behind[what]
    return data


def images() -> list[Case]:
    from keras_vit.images.decode import decode_with_pillow, open_image

    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    whole = {"JPEG": pixels, "PNG": pixels, "BMP": pixels, "GIF": pixels[..., 0], "WEBP": pixels, "TIFF": pixels}
    cases: list[Case] = []
    for kind, values in whole.items():
        stream = io.BytesIO()
        PIL.Image.fromarray(values).save(stream, kind)

        def read(data: bytes, kind: str = kind) -> None:
            try:
                with open_image(data, formats=(kind,), most_pixels=10**6) as image:
                    np.asarray(image.convert("RGB"))
                if kind != "TIFF":
                    decode_with_pillow(data, upright=True, most_pixels=10**6)
            except Exception as error:  # Pillow raises many types for damaged files; their readers catch all
                raise UserError(str(error)) from error

        cases.append((stream.getvalue(), read))
    return cases


def tokenizers(folder: pathlib.Path) -> list[Case]:
    from keras_vit.text.vocabulary import open_vocabulary

    chain = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 2
    fields = {
        "version": "1.0", "added_tokens": [], "normalizer": {"type": "Sequence", "normalizers": chain},
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"w0": 0, "a": 1}, "unk_token": "w0"},
    }  # fmt: skip

    def read(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        open_vocabulary(folder, "x").split(["a photo of a cat"])

    return [(json.dumps(fields).encode(), read)]


def keras_files(folder: pathlib.Path) -> list[Case]:
    import keras

    from keras_vit.files.keras_model import load_model

    image = keras.Input((4, 4, 3))
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.Flatten()(image)))
    model.save(folder / "a.keras")

    def read(data: bytes) -> None:
        (folder / "b.keras").write_bytes(data)
        load_model(folder / "b.keras")

    return [((folder / "a.keras").read_bytes(), read)]


def features(folder: pathlib.Path) -> list[Case]:
    from training.features.store import FeatureDescription, Part, open_index, part_file, write_description, write_part

    known = FeatureDescription("m", "f", "token", 4, "float32", ("a",), {"train": 3}, 0, None, {})
    part = Part(["a", "b", "c"], np.arange(3, dtype=np.uint64), ["a", None, "a"], np.ones((3, 4), np.float32), {})
    write_description(folder, known)
    write_part(folder, known, "train", 0, part)

    def read(data: bytes, file: pathlib.Path) -> None:
        file.write_bytes(data)
        index = open_index(str(folder))
        _ = index.images, index.embeddings(), index.problems, index.some([0])

    files = folder / "features.json", part_file(folder, "train", 0)
    whole = {file: file.read_bytes() for file in files}

    def read_with_the_others(data: bytes, file: pathlib.Path) -> None:
        for other, content in whole.items():
            other.write_bytes(content)
        read(data, file)

    return [(whole[file], functools.partial(read_with_the_others, file=file)) for file in files]


def main(counts: dict[str, int]) -> None:
    """Read so many damaged files of each kind of the readers."""

    def late(*_: object) -> None:
        os.write(2, b"a file takes more than 20 seconds\n")
        os._exit(3)

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        readers = {
            "images": images,
            "tokenizers": lambda: tokenizers(folder),
            "keras": lambda: keras_files(folder),
            "features": lambda: features(folder),
        }
        cases = [(case, count) for reader, count in counts.items() for case in readers[reader]()]
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        for (data, read), count in cases:
            read(data)
            read_edited(data, read, count)


def read_edited(data: bytes, read: Callable[[bytes], object], count: int) -> None:
    """Read `count` edited versions of a file."""

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(EDITS)
    def ends(edits: list[tuple[str, int, bytes]]) -> None:
        signal.alarm(SECONDS)
        try:
            read(edited(data, edits))
        except UserError:
            pass
        finally:
            signal.alarm(0)

    ends()


if __name__ == "__main__":
    main({reader: int(count) for reader, count in (word.split("=") for word in sys.argv[1:])})
