"""Shared by the tests of texts: golden data of two towers, and folders of them with a tokenizer of words."""

import json
import pathlib
import shutil

import keras
import numpy as np

from tests.support import FIXTURES

TOWERS = FIXTURES / "tasks"
CLIP, LEGACY, OPEN_CLIP, SIGLIP = (
    f"hf_{name}" for name in ("clip_two_towers", "clip_legacy_eos", "openclip_two_towers", "siglip_two_towers")
)
ALL = (CLIP, LEGACY, OPEN_CLIP, SIGLIP)
# Ids of the words w0, w1 …: the golden texts have no others but the end and the padding.
NUM_TOKENS = 50


def golden(name: str) -> dict[str, np.ndarray]:
    """The inputs and outputs of the original code."""
    return dict(np.load(TOWERS / f"{name}.io.npz"))


def logits_of(model: keras.Model, images: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(images, training=False))


def tokenizer_json(vocabulary: dict[str, int], **fields) -> dict:
    """A tokenizer that splits at white space, as the library `tokenizers` writes it."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        **fields,
    }


def with_tokenizer(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A copy of a golden folder with a tokenizer whose words are w0, w1 …, by their id, and the texts of the file."""
    shutil.copytree(TOWERS / name, folder)
    vocabulary = {f"w{number}": number for number in range(NUM_TOKENS)}
    if name == SIGLIP:  # whose padding is 1
        del vocabulary["w1"]
        vocabulary["</s>"] = 1
    else:
        del vocabulary["w49"]
        vocabulary["<|endoftext|>"] = 49
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocabulary)))
    return folder


def texts_of(name: str) -> list[str]:
    """The golden texts in the words of `with_tokenizer`."""
    texts = []
    for row in golden(name)["input_ids"]:
        end = {SIGLIP: 1}.get(name, 49)
        ids = list(row)
        texts.append(" ".join(f"w{number}" for number in ids[: ids.index(end)]))
    return texts
