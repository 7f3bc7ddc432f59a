"""Tokens against those that OpenAI's code recorded, each family's form of a text, and hostile files."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keras_vit
from keras_vit.text import vocabulary
from keras_vit.text.tokenizer import clip_form, siglip2_form, siglip_form
from tests.text.towers import CLIP, SIGLIP, TOWERS, tokenizer_json, with_tokenizer

RECORDED = json.loads((TOWERS / "clip_tokens.json").read_text())


def byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes, in the order of CLIP's vocabulary: printable ones come first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + number) for number in range(len(others)))]


def resized(folder: pathlib.Path, vocab_size: int, length: int) -> None:
    """Give the text tower of a folder another vocabulary and length, with embeddings of zeros."""
    arrays = load_file(folder / "model.safetensors")
    arrays["text_model.embeddings.token_embedding.weight"] = np.zeros((vocab_size, 32), np.float32)
    arrays["text_model.embeddings.position_embedding.weight"] = np.zeros((length, 32), np.float32)
    save_file(arrays, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"vocab_size": vocab_size, "max_position_embeddings": length}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(name="clip", scope="module")
def _clip(tmp_path_factory):
    """A folder of CLIP with vocab.json and merges.txt, of the merges that the recorded texts use."""
    folder = tmp_path_factory.mktemp("clip") / "clip"
    shutil.copytree(TOWERS / CLIP, folder)
    characters = byte_characters()
    merged = [merge.replace(" ", "") for merge in RECORDED["merges"]]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*characters, *(f"{character}</w>" for character in characters), *merged, *ends]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *RECORDED["merges"]]), encoding="utf-8")
    resized(folder, len(tokens), 77)
    return folder


@pytest.mark.filterwarnings("ignore:.*texts are longer")
def test_tokens_are_those_that_openai_recorded(clip):
    tokenize = keras_vit.tokenizer(clip)
    found = tokenize(RECORDED["texts"])
    assert found.shape == (len(RECORDED["texts"]), 77)
    for text, row, expected in zip(RECORDED["texts"], found, RECORDED["ids"], strict=True):
        assert row.tolist() == expected + [0] * (77 - len(expected)), text


def test_a_text_that_is_too_long_keeps_its_end_and_is_said(clip):
    tokenize = keras_vit.tokenizer(clip)
    with pytest.warns(UserWarning, match="1 of 2 texts is longer than the 77 tokens"):
        ids = tokenize(["cat", "cat dog " * 100_000])  # cut before it is split
    assert ids[1, -1] == ids[0].max() == tokenize.end[0]
    assert (tokenize("cat").shape, tokenize([]).shape) == ((1, 77), (0, 77))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (clip_form, "  A\tCat &amp;&nbsp;dog ", "a cat & dog"),
        (clip_form, "“ﬁne”  ＡＢＣ it’s\u200b", '"fine" abc it\'s\u200b'),
        (clip_form, "C++\x85 \x91a\x92 ﬅ", "c++… 'a' ſt"),
        (clip_form, "\x1b[31mred\x1b[0m", "red"),
        (siglip_form, " A photo, of   a cat!\n(red) ", "a photo of a cat red"),
        (siglip2_form, "A Photo, of É", "a photo, of é"),
        (siglip2_form, "ΣΟΦΟΣ", "σοφοσ"),
    ],
)
def test_each_family_has_its_form_of_a_text(form, text, expected):
    assert form(text) == expected


def siglip_folder(folder, vocabulary: dict[str, int], settings: dict | None = None):
    """A folder of SigLIP whose tokenizer has a post-processor that adds the end, as published ones."""
    shutil.copytree(TOWERS / SIGLIP, folder)
    end = next(token for token in vocabulary if token in ("</s>", "<eos>"))
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": end, "type_id": 0}}
    post = {
        "type": "TemplateProcessing",
        "single": [sequence, special],
        "pair": [sequence, special],
        "special_tokens": {end: {"id": end, "ids": [vocabulary[end]], "tokens": [end]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocabulary, post_processor=post)))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def words(**special: int) -> dict[str, int]:
    """50 tokens: these, and words for the other ids."""
    names = {number: name for name, number in special.items()}
    return {names.get(number, f"w{number}"): number for number in range(50)}


def test_siglip_is_padded_with_its_end_and_siglip_2_with_its_padding(tmp_path):
    first = siglip_folder(tmp_path / "siglip", words(**{"</s>": 1}))
    assert keras_vit.tokenizer(first)("W7, w9!").tolist() == [[7, 9, 1, 1, 1, 1, 1, 1]]
    gemma = words(**{"<pad>": 3, "<eos>": 1, "<bos>": 2})
    second = siglip_folder(tmp_path / "siglip2", gemma)
    assert keras_vit.tokenizer(second)("W7 w9").tolist() == [[7, 9, 1, 3, 3, 3, 3, 3]]
    said = siglip_folder(tmp_path / "said", gemma, {"pad_token": {"content": "w4"}})
    assert keras_vit.tokenizer(said)("w7").tolist() == [[7, 1, 4, 4, 4, 4, 4, 4]]


def test_siglip_without_a_padding_token_is_one_sentence(tmp_path):
    folder = siglip_folder(tmp_path / "siglip", words(**{"<eos>": 1}))
    with pytest.raises(keras_vit.UserError, match="has no padding token '</s>'"):
        keras_vit.tokenizer(folder)


def test_siglip_reads_the_sentence_pieces_of_transformers(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path / "siglip"
    shutil.copytree(TOWERS / SIGLIP, folder)
    (tmp_path / "corpus.txt").write_text("a photo of a cat\nthe dog in the snow\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(folder / "spiece"), vocab_size=19, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    resized(folder, 19, 8)
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    ids = library.encode("a cat")
    assert len(ids) < 8
    assert keras_vit.tokenizer(folder)("A  Cat!").tolist() == [ids + [1] * (8 - len(ids))]
    for content in (b"no model", b""):
        (folder / "spiece.model").write_bytes(content)
        with pytest.raises(keras_vit.UserError, match=r"spiece\.model cannot be read as a tokenizer"):
            keras_vit.tokenizer(folder)


def test_an_id_behind_the_embeddings_is_one_sentence(tmp_path):
    folder = with_tokenizer(CLIP, tmp_path / "clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["w5"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(keras_vit.UserError, match="has the id 1000, but its ids should be below 50"):
        keras_vit.tokenizer(folder)("w4 w5")


def fifty_ends():
    """A post-processor that puts 50 tokens behind each text."""
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "w9", "type_id": 0}}]
    special = {"w9": {"id": "w9", "ids": [9] * 50, "tokens": ["w9"] * 50}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("post_processor", fifty_ends(), "puts 50 of them around a text, but its text tower has 50 and room for 8"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
            r"tokenizer\.json cannot be read as a tokenizer \(Onig: Regex search error",
        ),
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": 40 * [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}],
            },
            r"tokenizer\.json cannot be read as a tokenizer \((its library ended|no answer)",
        ),
    ],
)
def test_a_tokenizer_that_fails_when_it_is_used_is_one_sentence(field, value, message, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "_PATIENCE", 1.0)
    folder = with_tokenizer(CLIP, tmp_path / "clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {field: value}))
    with pytest.raises(keras_vit.UserError, match=message):
        keras_vit.tokenizer(folder)("a" * 40 + "!")


def sparse(path: pathlib.Path, size: int) -> None:
    with path.open("wb") as stream:
        stream.truncate(size)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: sparse(path, 400_000_000), "is 400,000,000 bytes, too large for a tokenizer"),
        (lambda path: path.write_text('{"a":' * 100_000), "cannot be read as a tokenizer"),
        (lambda path: path.write_text("[" * 100_000), "cannot be read as a tokenizer"),
        (lambda path: path.write_text("{}"), "cannot be read as a tokenizer"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read as a tokenizer"),
    ],
)
def test_a_hostile_tokenizer_is_one_sentence(write, message, tmp_path):
    folder = with_tokenizer(CLIP, tmp_path / "clip")
    write(folder / "tokenizer.json")
    with pytest.raises(keras_vit.UserError, match=message):
        keras_vit.tokenizer(folder)


@pytest.mark.parametrize(
    ("tokens", "merges", "message"),
    [
        ("[1]", "", "should give a number for each token"),
        ('{"a": -1}', "", "should give a number for each token"),
        ("[" * 100_000, "", "vocab.json and merges.txt cannot be read"),
        ('{"a": 0}', "a b", "merges.txt cannot be read"),
        ('{"a": 0}', "a b c", "merges.txt cannot be read"),
    ],
)
def test_a_hostile_vocabulary_is_one_sentence(tokens, merges, message, tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(TOWERS / CLIP, folder)
    (folder / "vocab.json").write_text(tokens)
    (folder / "merges.txt").write_text(merges)
    with pytest.raises(keras_vit.UserError, match=message):
        keras_vit.tokenizer(folder)
