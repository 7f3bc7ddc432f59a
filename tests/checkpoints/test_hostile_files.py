"""Mutated checkpoint files: each is loaded completely or refused with one sentence, quickly and in little memory.

`python -m pytest tests/checkpoints/test_hostile_files.py -m slow` tries 10,000; the quick test the first 60 of them.
"""

import dataclasses
import json
import pathlib
import random
import resource
import struct
import time

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError, ViTConfig
from tests.fuzz import edited

# With the GELU of torchvision, which its files cannot express otherwise.
CONFIG = ViTConfig(patch_size=4, hidden_size=8, num_layers=2, num_heads=2, mlp_dim=12, gelu="erf")
UNTOUCHED = 7.5
LAYOUTS = ("npz", "npz-linen", "big_vision", "huggingface", "timm", "torchvision")
SUFFIXES = {"huggingface": "", "timm": ".safetensors", "torchvision": ".safetensors"}
SECONDS, BYTES = 5.0, 64 * 2**20


def fresh(layout: str) -> keras.Model:
    """A model that the layout can express, with constant weights."""
    has_pre_logits = layout not in ("huggingface", "timm")
    config = dataclasses.replace(CONFIG, representation_size=6) if has_pre_logits else CONFIG
    model = keras_vit.build(config, image_size=8, num_classes=3)
    return poisoned(model)


def poisoned(model: keras.Model) -> keras.Model:
    for weight in model.weights:
        weight.assign(np.full(weight.shape, UNTOUCHED))
    return model


def seeds(folder: pathlib.Path, models: dict[str, keras.Model]) -> dict[str, pathlib.Path]:
    """One good file for each layout."""
    files = {}
    for layout, model in models.items():
        path = folder / f"{layout}{SUFFIXES.get(layout, '.npz')}"
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=weight.shape) for weight in model.get_weights()])
        keras_vit.save_checkpoint(model, path, layout=layout)
        files[layout] = path / "model.safetensors" if layout == "huggingface" else path
        poisoned(model)
    return files


WORDS = (b"<f4", b"F32", b"shape", b"descr", b"False", b"data_offsets", b"kernel", b"bias", b"weight")
OTHER_WORDS = (b"|O8", b"I64", b"<V2", b"<c8", b"True", b"", b"kernels", b"\xff\xfe", b"'" * 9, b"<f8", b"-1")
LENGTHS = (0, 1, 2**31, 2**40, 2**63, 2**64 - 1)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three mutations: of a word, or anywhere, or in a header."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(content)) if rng.random() < 0.5 else _header_byte(content, rng)
        if rng.random() < 0.2:
            content = content[:place] + content[place:].replace(rng.choice(WORDS), rng.choice(OTHER_WORDS), 1)
        else:
            part = rng.choice((rng.randbytes(1), rng.randbytes(8), b"9", struct.pack("<Q", rng.choice(LENGTHS))))
            kind = rng.choice(("replace", "replace", "insert", "remove", "cut", "repeat"))
            content = edited(content, [(kind, place, part)]) or b"P"
    return content


def _header_byte(content: bytes, rng: random.Random) -> int:
    """A position in the metadata: a zip's entries and directory, a JSON header or NumPy headers."""
    places = [0, len(content) - 1]
    for mark in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x93NUMPY", b'"'):
        start = content.find(mark, rng.randrange(len(content)))
        if start >= 0:
            places.append(start + rng.randrange(60))
    return min(rng.choice(places), len(content) - 1)


def mutated_config(content: bytes, rng: random.Random) -> bytes:
    """config.json with one value replaced."""
    config = json.loads(content)
    value = rng.choice((None, -1, 0, 10**12, 1e308, "x", [], [1] * 9, {}, True, [[]], "gelu_new", [8, 8]))
    config[rng.choice(list(config))] = value
    return json.dumps(config).encode()


def attempt(layout: str, path: pathlib.Path, model: keras.Model, rng: random.Random) -> bool:
    """Whether the file is loaded; fails if a refused file changes the model."""
    try:
        if rng.random() < 0.05:
            options = {"num_heads": 2} if layout in ("timm", "torchvision") else {}
            weights = keras_vit.from_checkpoint(path, image_size=8, **options).get_weights()
            assert all(np.isfinite(array).all() for array in weights)
            return True
        keras_vit.load_checkpoint(model, path)
    except UserError:
        assert all((array == UNTOUCHED).all() for array in model.get_weights())
        return False
    assert not any((array == UNTOUCHED).all() for array in model.get_weights())
    poisoned(model)
    return True


def campaign(folder: pathlib.Path, count: int) -> dict[bool, int]:
    models = {layout: fresh(layout) for layout in LAYOUTS}
    files = seeds(folder, models)
    outcomes = {True: 0, False: 0}
    for layout, path in files.items():
        assert attempt(layout, path, models[layout], random.Random(0)), layout
    for number in range(count):
        rng = random.Random(number)
        layout = LAYOUTS[number % len(LAYOUTS)]
        path = files[layout]
        victim = path.with_name("config.json") if layout == "huggingface" and rng.random() < 0.4 else path
        content = victim.read_bytes()
        victim.write_bytes((mutated_config if victim.suffix == ".json" else mutated)(content, rng))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            outcomes[attempt(layout, path, models[layout], rng)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of {layout}") from error
        finally:
            victim.write_bytes(content)
        assert time.monotonic() - start < SECONDS, number
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < BYTES, number
    return outcomes


def test_a_mutated_file_is_loaded_completely_or_refused(tmp_path):
    outcomes = campaign(tmp_path, 60)
    assert outcomes[False] > 30
    assert outcomes[True] > 0


@pytest.mark.slow
def test_ten_thousand_mutated_files_are_loaded_completely_or_refused(tmp_path):
    assert sum(campaign(tmp_path, 10_000).values()) == 10_000
