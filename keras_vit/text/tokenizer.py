"""Texts -> token ids, as each family of text towers has them: its form of a text, length, start, end and padding.

The form of CLIP is that of OpenAI's `simple_tokenizer`, which repairs texts with ftfy; of SigLIP `canonicalize_text` of
big_vision's `prompt_engineering`; of SigLIP 2 lower-case, section 3.1 of arXiv 2502.14786.
"""

import dataclasses
import html
import os
import re
import string
import unicodedata
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from keras_vit.checkpoints.find import download_tokenizer, parse_hub_name
from keras_vit.checkpoints.formats import open_clip
from keras_vit.errors import UserError
from keras_vit.text.checkpoint import OPEN_CLIP_LAYOUT, TextCheckpoint, open_text
from keras_vit.text.vocabulary import Vocabulary, open_vocabulary, read_settings
from keras_vit.text.vocabulary_process import CLIP_END, CLIP_START

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
    """Splits a text in the form of the family."""
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
    if (name := parse_hub_name(os.fspath(path))) is not None:
        download_tokenizer(name, folder)
    vocabulary = open_vocabulary(folder, os.fspath(path))
    is_clip, start = text.config.pooling != "last", tuple[int, ...]()
    if is_clip:
        start, end = _clip_ids(vocabulary)
    else:
        end = tuple(number for token in _ENDS if (number := vocabulary.id_of(token)) is not None)[:1]
    sizes = vocabulary.size, text.config.vocab_size, len(start) + len(end), text.config.length
    if sizes[0] != sizes[1] or sizes[2] >= sizes[3]:
        raise UserError(
            f"The tokenizer of {os.fspath(path)} has {sizes[0]} tokens and puts {sizes[2]} of them around a text, but "
            f"its text tower has {sizes[1]} and room for {sizes[3]}; put the one of the weights there."
        )
    padding = 0 if is_clip else _padding(vocabulary, text)  # as OpenAI; no token that is pooled sees it
    return Tokenizer(vocabulary, _canonical(vocabulary, text), text.config.length, start, end, padding)


def _clip_ids(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids before, ids behind a text of CLIP): those of its file, else those of its first folders, which say none."""
    if vocabulary.start or vocabulary.end:
        return vocabulary.start, vocabulary.end
    start, end = vocabulary.id_of(CLIP_START), vocabulary.id_of(CLIP_END)
    return (() if start is None else (start,)), (() if end is None else (end,))


def _canonical(vocabulary: Vocabulary, text: TextCheckpoint) -> Callable[[str], str]:
    if text.layout is OPEN_CLIP_LAYOUT and open_clip.canonicalizes(read_settings(text.folder / open_clip.CONFIG)):
        return lambda words: siglip_form(clip_form(words).replace("_", " "))
    if text.config.pooling != "last":
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


# The forms of a text

# Characters that ftfy replaces by what Unicode calls compatible: ligatures, full and half width, the ideographic space.
_COMPATIBLE = (
    *(range(0xFB00, 0xFB05), range(0xFB06, 0xFB07), range(0xFF01, 0xFFF0), range(0x3000, 0x3001), range(0x132, 0x134)),
    *(range(0x149, 0x14A), range(0x1C4, 0x1CD), range(0x1F1, 0x1F4)),
)
_QUOTES = dict.fromkeys((0x2BC, *range(0x2018, 0x201C)), "'") | dict.fromkeys(range(0x201C, 0x2020), '"')
# Control characters but for the white space among them, and the marks that no text should have.
_CONTROLS = (*range(0x9), 0xB, *range(0xE, 0x20), 0x7F, *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD))
# Most of the C1 controls, which are characters of Windows' encoding in texts that were taken for Latin-1.
_WINDOWS = {code: bytes([code]).decode("cp1252", "ignore") or chr(code) for code in range(0x80, 0xA0)}
_REPAIRS: dict[int, str | None] = {
    code: unicodedata.normalize("NFKC", chr(code)).translate(_QUOTES) for part in _COMPATIBLE for code in part
}
_REPAIRS |= {code: character.translate(_QUOTES) for code, character in _WINDOWS.items()}
_REPAIRS |= _QUOTES | {0xFB05: "ſt"}
_REPAIRS |= dict.fromkeys(_CONTROLS)
# What colors the text of a terminal.
_TERMINAL = re.compile(r"\x1b\[[\d;]*[a-zA-Z]")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def clip_form(text: str) -> str:
    """Lower-case, with single spaces, without HTML entities; typographic characters become plain ones.

    The same as OpenAI's but for texts that were decoded in a wrong encoding, which ftfy guesses and this does not.
    """
    if "<" not in text:  # ftfy leaves the entities of what may be HTML
        text = html.unescape(text)
    text = unicodedata.normalize("NFC", _TERMINAL.sub("", text).translate(_REPAIRS))
    return _single_spaces(html.unescape(html.unescape(text))).lower()


def siglip_form(text: str) -> str:
    """Lower-case, with single spaces, without punctuation."""
    return _single_spaces(text.translate(_NO_PUNCTUATION)).lower()


def siglip2_form(text: str) -> str:
    """Lower-case, each character by itself as in the library `tokenizers`: the sigma that ends a word is no other."""
    return "".join(character.lower() for character in text)


def _single_spaces(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
