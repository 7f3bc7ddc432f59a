"""The form that each family of towers gives a text before it is split into tokens.

CLIP: `simple_tokenizer` of OpenAI, which repairs texts with ftfy. SigLIP: `canonicalize_text` of big_vision's
`prompt_engineering`. SigLIP 2: lower-case, section 3.1 of arXiv 2502.14786.
"""

import html
import re
import string
import unicodedata

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
