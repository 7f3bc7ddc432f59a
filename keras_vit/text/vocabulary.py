"""The vocabulary of a text tower, from the files beside the weights: what splits a text into tokens.

tokenizer.json, as transformers writes it; vocab.json with merges.txt, as the first folders of CLIP have them; or
spiece.model, which is all that transformers writes for SigLIP. keras-hub has the latter two in assets/tokenizer. The
native libraries that read them run in a process of their own, `keras_vit.text.vocabulary_process`.
"""

import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from keras_vit.errors import UserError, needed_package
from keras_vit.files.documents import read_json

FILE, VOCABULARY, MERGES, PIECES = "tokenizer.json", "vocab.json", "merges.txt", "spiece.model"
ASSETS = "assets/tokenizer"
# Bytes; that of SigLIP 2 has 34 MB, CLIP's vocabulary 1 MB.
_LARGEST, _LARGEST_VOCABULARY = 2**26, 2**24
# Texts of a request, seconds until its answer, and bytes of it.
_TEXTS, _PATIENCE, _LONGEST = 256, 15.0, 2**26


class Vocabulary:
    """The tokens of a text tower.

    Attributes:
        size: number of tokens.
        start: ids that the file puts before a text.
        end: ids that the file puts behind a text.
    """

    def __init__(self, files: Sequence[pathlib.Path]) -> None:
        self._name = " and ".join(file.name for file in files)
        script = pathlib.Path(__file__).with_name("vocabulary_process.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(script), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # threads take address space
        )
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._process)
        around = self._answer(files=[os.path.abspath(file) for file in files])
        self.size: int = around["size"]
        self.start, self.end = tuple(around["start"]), tuple(around["end"])

    def split(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of the tokens of texts in the form of the family, without those around a text."""
        parts = (texts[begin : begin + _TEXTS] for begin in range(0, len(texts), _TEXTS))
        return [ids for part in parts for ids in self._answer(texts=list(part))["ids"]]

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        return self._answer(token=token)["id"]

    def _answer(self, **request: Any) -> dict[str, Any]:
        """Return the answer of the process. Raises UserError if it fails, ends, or takes long."""
        with self._lock:
            answer = self._exchanged(json.dumps(request).encode() + b"\n")
        if "error" in answer:
            raise UserError(f"{self._name} cannot be read as a tokenizer ({answer['error']}); download it again.")
        return answer

    def _exchanged(self, request: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        received = bytearray()
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            while not received.endswith(b"\n"):
                if not select.select([self._process.stdout], [], [], _PATIENCE)[0]:
                    return self._failed(f"no answer in {_PATIENCE:.0f} seconds")
                part = os.read(self._process.stdout.fileno(), 2**20)
                received += part
                if not part or len(received) > _LONGEST:
                    return self._failed("its library ended, for example for lack of memory")
        except (BrokenPipeError, ValueError):  # also of a pipe that was closed
            return self._failed("its library ended")
        return json.loads(received)

    def _failed(self, why: str) -> dict[str, Any]:
        _end(self._process)
        return {"error": why}


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()  # closes its pipes


def open_vocabulary(folder: pathlib.Path, path: str) -> Vocabulary:
    """The vocabulary in the folder of a checkpoint; `path` is its name for messages. Raises UserError."""
    file, vocabulary, merges, pieces = (folder / name for name in (FILE, VOCABULARY, MERGES, PIECES))
    if (assets := folder / ASSETS).is_dir():  # whose tokenizer.json has no vocabulary
        vocabulary, merges, pieces = assets / "vocabulary.json", assets / MERGES, assets / "vocabulary.spm"
    elif file.is_file():
        return _opened([file], _LARGEST)
    if vocabulary.is_file() and merges.is_file():
        return _opened([vocabulary, merges], _LARGEST_VOCABULARY)
    if pieces.is_file():
        return _opened([pieces], _LARGEST_VOCABULARY)
    raise UserError(
        f"{path} has no tokenizer: neither {FILE}, nor {VOCABULARY} and {MERGES}, nor {PIECES} lie beside the weights; "
        f"download {FILE} of the model into that folder."
    )


def _opened(files: Sequence[pathlib.Path], most: int) -> Vocabulary:
    package = "sentencepiece" if files[0].suffix in (".model", ".spm") else "tokenizers"
    needed_package(package, f"The tokenizer {files[0].name} needs", package)
    for file in files:
        if (size := file.stat().st_size) > most:
            raise UserError(f"{file.name} is {size:,} bytes, too large for a tokenizer; download it again.")
    return Vocabulary(files)


def read_settings(file: pathlib.Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is none, or no object in it."""
    content = read_json(file, _LARGEST_VOCABULARY) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
