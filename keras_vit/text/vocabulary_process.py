"""A process that reads a tokenizer and splits texts, with limits of memory and time.

The libraries are native code that ends the process, or takes all memory, for some files and texts. The requests and
answers are JSON, one a line: files to open -> number of tokens and the ids around a text; texts -> ids; a token -> id.
"""

import contextlib
import json
import pathlib
import resource
import sys
from typing import Any

# Bytes of address space, and seconds of computing.
_MEMORY, _SECONDS = 2 * 2**30, 1200
# Where a text is split before byte pairs are merged (OpenAI's simple_tokenizer).
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"


class _Pieces:
    """The vocabulary of spiece.model."""

    def __init__(self, data: bytes) -> None:
        import sentencepiece

        if not data:
            raise ValueError("it is empty")
        self._library = sentencepiece.SentencePieceProcessor(model_proto=data)
        self.around = {"size": self._library.get_piece_size(), "start": [], "end": []}

    def split(self, text: str) -> list[int]:
        return self._library.encode(text)

    def id_of(self, token: str) -> int | None:
        number = self._library.piece_to_id(token)
        return number if self._library.id_to_piece(number) == token else None  # that of <unk> for others


class _Tokens:
    """The vocabulary of a `tokenizers.Tokenizer`."""

    def __init__(self, library: Any) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        alone, whole = self.split("a"), library.encode("a").ids
        before = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
        size = library.get_vocab_size(with_added_tokens=True)
        self.around = {"size": size, "start": whole[:before], "end": whole[before + len(alone) :]}

    def split(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)


def _byte_pairs(vocabulary: str, merges: str) -> Any:
    """CLIP's tokenizer from its vocabulary and its merges."""
    import tokenizers

    ids = json.loads(vocabulary)
    if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < 2**31 for number in ids.values()):
        raise ValueError("it should give a number for each token")
    lines = merges.split("\n")
    pairs: Any = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(ids, pairs, unk_token=CLIP_END, end_of_word_suffix="</w>", continuing_subword_prefix="")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "removed", invert=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.add_special_tokens([token for token in (CLIP_START, CLIP_END) if token in ids])
    return library


def _opened(files: list[str]) -> "_Pieces | _Tokens":
    contents = [pathlib.Path(file).read_bytes() for file in files]
    if files[0].endswith((".model", ".spm")):
        return _Pieces(contents[0])
    texts = [content.decode("utf-8") for content in contents]
    if len(texts) == 2:
        return _Tokens(_byte_pairs(*texts))
    import tokenizers

    return _Tokens(tokenizers.Tokenizer.from_str(texts[0]))


def main() -> None:
    """Answer requests until there are no more. The argument is Python's path as JSON."""
    sys.path[:] = json.loads(sys.argv[1])
    with contextlib.suppress(OSError, ValueError):  # a system without such limits
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    vocabulary: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "files" in request:
                vocabulary = _opened(request["files"])
                answer = vocabulary.around
            elif "texts" in request:
                answer = {"ids": [vocabulary.split(text) for text in request["texts"]]}
            else:
                answer = {"id": vocabulary.id_of(request["token"])}
        except BaseException as error:  # the panic of a library in Rust is no Exception
            answer = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
