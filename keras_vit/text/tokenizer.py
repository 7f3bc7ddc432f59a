"""Texts -> token ids, as each family of text towers has them: its form of a text, length, start, end and padding."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from keras_vit.checkpoints.fetch import hub
from keras_vit.errors import UserError
from keras_vit.text.canonical import clip_form, siglip2_form, siglip_form
from keras_vit.text.checkpoint import TextCheckpoint, open_text
from keras_vit.text.vocabulary import (
    CLIP_END,
    CLIP_START,
    FILE,
    MERGES,
    PIECES,
    VOCABULARY,
    Vocabulary,
    open_vocabulary,
    read_settings,
)

_SETTINGS = "tokenizer_config.json"
_ENDS = ("</s>", "<eos>")
# Of Gemma's vocabulary, which SigLIP 2 has.
_GEMMA = "<bos>"
# Characters of a text for each of the tower's tokens; what is behind them is cut before the text is split.
_CHARACTERS_PER_TOKEN = 256


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns texts into the token ids of a text tower: call it."""

    vocabulary: Vocabulary
    """What splits a text in the family's form."""
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
        whole = [self.canonical(text.encode("utf-8", "replace").decode("utf-8")) for text in texts]
        shown = [text[: self.length * _CHARACTERS_PER_TOKEN] for text in whole]
        for number, tokens in enumerate(self.vocabulary.split(shown)):
            if tokens and max(tokens) >= self.vocabulary.size:
                raise UserError(
                    f"The tokenizer has the id {max(tokens)}, but its ids should be below {self.vocabulary.size}; put "
                    "the one that belongs to the weights there."
                )
            if len(tokens) > room or len(shown[number]) < len(whole[number]):
                cut.append(texts[number])
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
    """The tokenizer of a two-tower checkpoint, from the files beside the weights.

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
        hub.download_beside(name, folder, (FILE, _SETTINGS), instead=(VOCABULARY, MERGES, PIECES))
    vocabulary = open_vocabulary(folder, os.fspath(path))
    if vocabulary.size != text.config.vocab_size:
        raise UserError(
            f"The tokenizer of {os.fspath(path)} has {vocabulary.size} tokens, but its text tower has "
            f"{text.config.vocab_size}; put the tokenizer that belongs to the weights there."
        )
    canonical, length = _canonical(vocabulary, text), text.config.length
    if text.config.causal:
        start, end = _clip_ids(vocabulary)
        if len(start) + len(end) >= length:
            raise UserError(
                f"The tokenizer puts {len(start) + len(end)} tokens around a text, but its text tower has room for "
                f"{length}; put the tokenizer that belongs to the weights there."
            )
        return Tokenizer(vocabulary, canonical, length, start, end, padding=0)  # as OpenAI; no pooled token sees it
    end = tuple(number for token in _ENDS if (number := vocabulary.id_of(token)) is not None)[:1]
    return Tokenizer(vocabulary, canonical, length, (), end, _padding(vocabulary, text))


def _clip_ids(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids before, ids behind a text of CLIP): those of its file, else those of its first folders, which say none."""
    if vocabulary.start or vocabulary.end:
        return vocabulary.start, vocabulary.end
    start, end = vocabulary.id_of(CLIP_START), vocabulary.id_of(CLIP_END)
    return (() if start is None else (start,)), (() if end is None else (end,))


def _canonical(vocabulary: Vocabulary, text: TextCheckpoint) -> Callable[[str], str]:
    if text.config.causal:
        # The multilingual MetaCLIP 2 has another vocabulary, and takes texts as they are.
        return str if vocabulary.id_of(CLIP_END) is None else clip_form
    return siglip_form if vocabulary.id_of(_GEMMA) is None else siglip2_form


def _padding(vocabulary: Vocabulary, text: TextCheckpoint) -> int:
    """The id with which SigLIP fills a text to its full length, as the files say."""
    token = read_settings(text.folder / _SETTINGS).get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        token = "</s>" if vocabulary.id_of(_GEMMA) is None else "<pad>"
    number = vocabulary.id_of(token)
    if number is None:
        raise UserError(
            f"The tokenizer has no padding token {token!r:.80}, with which SigLIP fills a text to its full length; put "
            f"the {_SETTINGS} of the model beside the weights."
        )
    return number
