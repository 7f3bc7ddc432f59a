"""The vocabulary of a text tower, from the files beside the weights: what splits a text into tokens.

tokenizer.json, as transformers writes it; vocab.json with merges.txt, as the first folders of CLIP have them; or
spiece.model, which is all that transformers writes for SigLIP.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from keras_vit.errors import UserError, needed_package

FILE, VOCABULARY, MERGES, PIECES = "tokenizer.json", "vocab.json", "merges.txt", "spiece.model"
CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
# Bytes; that of SigLIP 2 has 34 MB, CLIP's vocabulary 1 MB.
_LARGEST, _LARGEST_VOCABULARY = 2**26, 2**24
# Where a text is split before byte pairs are merged (OpenAI's simple_tokenizer).
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text tower."""

    split: Callable[[str], list[int]]
    """A text in the form of its family -> the ids of its tokens, without those around a text."""
    id_of: Callable[[str], int | None]
    """A token -> its id; None if it is none."""
    size: int
    """Number of tokens."""
    start: tuple[int, ...] = ()
    """Ids that the file puts before a text."""
    end: tuple[int, ...] = ()
    """Ids that the file puts behind a text."""


def open_vocabulary(folder: pathlib.Path, path: str) -> Vocabulary:
    """The vocabulary in the folder of a checkpoint; `path` is its name for messages. Raises UserError."""
    file, vocabulary, merges, pieces = (folder / name for name in (FILE, VOCABULARY, MERGES, PIECES))
    if file.is_file():
        return _of_tokenizers(_read_library(file))
    if vocabulary.is_file() and merges.is_file():
        return _of_tokenizers(_byte_pairs(vocabulary, merges))
    if pieces.is_file():
        return _sentence_pieces(pieces)
    raise UserError(
        f"{path} has no tokenizer: neither {FILE}, nor {VOCABULARY} and {MERGES}, nor {PIECES} lie beside the weights; "
        f"download {FILE} of the model into that folder."
    )


def read_settings(file: pathlib.Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is none, or no object in it."""
    if not file.is_file():
        return {}
    content = _parsed(file)
    return content if isinstance(content, dict) else {}


def _of_tokenizers(library: Any) -> Vocabulary:
    """The vocabulary of a `tokenizers.Tokenizer`."""
    library.no_truncation()
    library.no_padding()

    def split(text: str, *, whole: bool = False) -> list[int]:
        with _reading(FILE):
            return library.encode(text, add_special_tokens=whole).ids

    alone, whole = split("a"), split("a", whole=True)
    before = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
    return Vocabulary(
        split,
        library.token_to_id,
        library.get_vocab_size(with_added_tokens=True),
        tuple(whole[:before]),
        tuple(whole[before + len(alone) :]),
    )


def _read_library(file: pathlib.Path) -> Any:
    """The tokenizer of tokenizer.json."""
    tokenizers, content = _tokenizers(), _read(file, _LARGEST)
    with _reading(file.name):
        return tokenizers.Tokenizer.from_str(content)


def _byte_pairs(vocabulary: pathlib.Path, merges: pathlib.Path) -> Any:
    """CLIP's tokenizer from its vocabulary and its merges."""
    tokenizers, ids = _tokenizers(), _parsed(vocabulary)
    if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < 2**31 for number in ids.values()):
        raise UserError(f"{vocabulary.name} should give a number for each token; download it again.")
    lines = _read(merges, _LARGEST_VOCABULARY).split("\n")
    pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    with _reading(merges.name):
        model = tokenizers.models.BPE(
            ids, pairs, unk_token=CLIP_END, end_of_word_suffix="</w>", continuing_subword_prefix=""
        )
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "removed", invert=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.add_special_tokens([token for token in (CLIP_START, CLIP_END) if token in ids])
    return library


def _sentence_pieces(file: pathlib.Path) -> Vocabulary:
    """The vocabulary of spiece.model."""
    sentencepiece = needed_package("sentencepiece", f"The tokenizer {file.name} needs", "sentencepiece")
    with _reading(file.name):
        library = sentencepiece.SentencePieceProcessor(model_proto=_bytes(file, _LARGEST_VOCABULARY))

    def id_of(token: str) -> int | None:
        number = library.piece_to_id(token)
        return number if library.id_to_piece(number) == token else None  # that of <unk> for others

    return Vocabulary(library.encode, id_of, library.get_piece_size())


def _tokenizers() -> ModuleType:
    return needed_package("tokenizers", "Texts need", "tokenizers")


def _parsed(file: pathlib.Path) -> Any:
    """The content of a JSON file."""
    with _reading(file.name):
        return json.loads(_read(file, _LARGEST_VOCABULARY))


def _read(file: pathlib.Path, most: int) -> str:
    with _reading(file.name):
        return _bytes(file, most).decode("utf-8")


def _bytes(file: pathlib.Path, most: int) -> bytes:
    size = file.stat().st_size
    if size > most:
        raise UserError(f"{file.name} is {size:,} bytes, too large for a tokenizer; download it again.")
    return file.read_bytes()


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    """As `keras_vit.errors.reading`, also for the PanicException of a library in Rust, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError | KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} cannot be read as a tokenizer ({reason}); download it again.") from error
