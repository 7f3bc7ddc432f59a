"""Tokenizers of text towers, from the files beside the weights, with the library `tokenizers`.

tokenizer.json, as transformers writes it; or vocab.json with merges.txt, as the first folders of CLIP have them.
"""

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_vit.checkpoints.fetch import hub
from keras_vit.errors import UserError
from keras_vit.text.canonical import clip_form, siglip2_form, siglip_form
from keras_vit.text.checkpoint import TextCheckpoint, open_text

_FILE, _VOCABULARY, _MERGES, _SETTINGS = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"
# Bytes; that of SigLIP 2 has 34 MB, CLIP's vocabulary 1 MB.
_LARGEST, _LARGEST_VOCABULARY = 2**26, 2**24
# Pieces of a text that byte pairs are merged in (OpenAI's simple_tokenizer).
_PIECES = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"
_ENDS = ("</s>", "<eos>")
# Of Gemma's vocabulary, which SigLIP 2 has.
_GEMMA = "<bos>"
# Characters of a text for each of the tower's tokens; what is behind them is cut before the text is split.
_CHARACTERS_PER_TOKEN = 256


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns texts into the token ids of a text tower: call it."""

    library: Any
    """A `tokenizers.Tokenizer` without truncation and padding."""
    canonical: Callable[[str], str]
    """The family's form of a text."""
    length: int
    """Ids of a text, padding included."""
    start: tuple[int, ...]
    """Ids before each text."""
    end: tuple[int, ...]
    """Ids behind each text, which a text that is cut keeps."""
    padding: int
    """Id behind a text that is shorter."""

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Token ids (N, T) int32 of N texts, or of one. Warns of texts that are too long and are cut."""
        return self.encode([texts] if isinstance(texts, str) else texts)[0]

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (N, T) int32, and how many of each are no padding (N,). Warns of texts that are cut."""
        room = self.length - len(self.start) - len(self.end)
        ids = np.full((len(texts), self.length), self.padding, np.int32)
        lengths, cut = np.zeros(len(texts), np.int64), []
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"A text must be a string, but is {text!r:.80}.")
            whole = self.canonical(text.encode("utf-8", "replace").decode("utf-8"))
            shown = whole[: self.length * _CHARACTERS_PER_TOKEN]
            tokens = self.library.encode(shown, add_special_tokens=False).ids
            if len(tokens) > room or len(shown) < len(whole):
                cut.append(text)
            row = (*self.start, *tokens[:room], *self.end)
            ids[number, : len(row)] = row
            lengths[number] = len(row)
        if cut:
            warnings.warn(
                f"{len(cut)} of {len(texts)} texts {'is' if len(cut) == 1 else 'are'} longer than the {self.length} "
                f"tokens of the text tower and cut, such as {cut[0][:60]!r}….",
                stacklevel=3,
            )
        return ids, lengths


def tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a two-tower checkpoint, from tokenizer.json or vocab.json and merges.txt beside the weights.

    Args:
        path: as `keras_vit.text_tower` takes it.

    Returns:
        A function from texts to token ids (N, T) int32, with the start, end, length and padding of the family.

    Raises:
        UserError: if there is no tokenizer, or one of another vocabulary than that of the text tower.
    """
    return open_tokenizer(path, open_text(path))


def open_tokenizer(path: str | os.PathLike, text: TextCheckpoint) -> Tokenizer:
    """`tokenizer` of a text tower whose headers have been read; `path` is what it was opened by."""
    folder = text.folder
    if (name := hub.parse_name(os.fspath(path))) is not None:
        hub.download_beside(name, folder, (_FILE, _SETTINGS), instead=(_VOCABULARY, _MERGES))
    library = _open_library(folder, os.fspath(path))
    library.no_truncation()
    library.no_padding()
    size = library.get_vocab_size(with_added_tokens=True)
    if size != text.config.vocab_size:
        raise UserError(
            f"The tokenizer of {os.fspath(path)} has {size} tokens, but its text tower has {text.config.vocab_size}; "
            "put the tokenizer that belongs to the weights there."
        )
    start, end = _special_ids(library)
    return Tokenizer(
        library, _canonical(library, text), text.config.length, start, end, _padding(library, folder, text)
    )


def _open_library(folder: pathlib.Path, path: str) -> Any:
    try:
        import tokenizers  # lazy: only texts need it
    except ModuleNotFoundError as missing:
        raise UserError(
            "Texts need the Python package tokenizers; install it with pip install tokenizers."
        ) from missing
    file, vocabulary, merges = (folder / name for name in (_FILE, _VOCABULARY, _MERGES))
    if file.is_file():
        content = _read(file, _LARGEST)
        try:
            return tokenizers.Tokenizer.from_str(content)
        except BaseException as error:  # the library raises Exception, and PanicException, which is none
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise _unreadable(file, error) from error
    if vocabulary.is_file() and merges.is_file():
        return _byte_pairs(tokenizers, vocabulary, merges)
    raise UserError(
        f"{path} has no tokenizer: neither {_FILE} nor {_VOCABULARY} and {_MERGES} lie beside the weights; download "
        f"{_FILE} of the model into that folder."
    )


def _byte_pairs(tokenizers: Any, vocabulary: pathlib.Path, merges: pathlib.Path) -> Any:
    """CLIP's tokenizer from its vocabulary and its merges."""
    try:
        ids = json.loads(_read(vocabulary, _LARGEST_VOCABULARY))
    except (ValueError, RecursionError) as error:
        raise _unreadable(vocabulary, error) from error
    if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < 2**31 for number in ids.values()):
        raise UserError(f"{vocabulary.name} should give a number for each token; download it again.")
    lines = _read(merges, _LARGEST_VOCABULARY).split("\n")
    pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    try:
        model = tokenizers.models.BPE(
            ids, pairs, unk_token=_CLIP_END, end_of_word_suffix="</w>", continuing_subword_prefix=""
        )
    except Exception as error:  # the library raises no other
        raise _unreadable(merges, error) from error
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), "removed", invert=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.add_special_tokens([token for token in (_CLIP_START, _CLIP_END) if token in ids])
    return library


def _read(file: pathlib.Path, most: int) -> str:
    size = file.stat().st_size
    if size > most:
        raise UserError(f"{file.name} is {size:,} bytes, too large for a tokenizer; download it again.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: pathlib.Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{file.name} cannot be read as a tokenizer ({reason}); download it again.")


def _special_ids(library: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids before, ids behind a text): those that the file's post-processor adds, else those of the family."""
    alone = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a").ids
    if len(whole) > len(alone):
        before = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
        return tuple(whole[:before]), tuple(whole[before + len(alone) :])
    if library.token_to_id(_CLIP_END) is not None:
        start = library.token_to_id(_CLIP_START)
        return (() if start is None else (start,)), (library.token_to_id(_CLIP_END),)
    return (), tuple(number for token in _ENDS if (number := library.token_to_id(token)) is not None)[:1]


def _canonical(library: Any, text: TextCheckpoint) -> Callable[[str], str]:
    if text.config.causal:
        return clip_form
    return siglip2_form if library.token_to_id(_GEMMA) is not None else siglip_form


def _padding(library: Any, folder: pathlib.Path, text: TextCheckpoint) -> int:
    """The id of the padding: for CLIP 0, as in OpenAI's code, which no pooled token sees; else as the files say."""
    if text.config.causal:
        return 0
    token: Any = None
    if (folder / _SETTINGS).is_file():
        try:
            settings = json.loads(_read(folder / _SETTINGS, _LARGEST_VOCABULARY))
        except (ValueError, RecursionError) as error:
            raise _unreadable(folder / _SETTINGS, error) from error
        token = settings.get("pad_token") if isinstance(settings, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        token = "<pad>" if library.token_to_id(_GEMMA) is not None else "</s>"
    number = library.token_to_id(token)
    if number is None:
        raise UserError(
            f"The tokenizer has no padding token {token!r:.80}, with which SigLIP fills a text to its full length; put "
            f"the {_SETTINGS} of the model beside the weights."
        )
    return number
