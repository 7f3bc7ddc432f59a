"""Commands in messages, as they run when they are pasted into this shell; and control characters as codes."""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from keras_vit.errors import printable

_SCRIPT = "keras-vit"  # that pip installs
_MODULE = "keras_vit"  # that Python runs where the script is not installed


def show_controls(stream: TextIO) -> None:
    """Print control characters, which names may contain and a terminal would obey, as codes."""
    if isinstance(stream, io.TextIOWrapper):
        write = stream.write
        vars(stream)["write"] = lambda text: write(printable(text))


@contextlib.contextmanager
def colors_allowed() -> Iterator[None]:
    """Undo `show_controls` inside, for what a library prints in colors of its own."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    writes = [vars(stream).pop("write", None) for stream in streams]
    try:
        yield
    finally:
        for stream, write in zip(streams, writes, strict=True):
            if write is not None:
                vars(stream)["write"] = write


def command_line() -> str:
    """The command of this process as it is typed into a shell."""
    return f"{_script()} {shlex.join(sys.argv[1:])}" if _is_script() else shlex.join(sys.orig_argv)


def as_typed(text: str) -> str:
    """Return a text with every `keras-vit COMMAND` as it runs in this shell."""
    return re.sub(rf"(?<![\w/-]){_SCRIPT}(?= [a-z])", lambda _: _program(), text)


def print_next(commands: Sequence[Sequence[str]]) -> None:
    """Print commands to go on with, each of which runs when it is pasted into the shell.

    commands: of each, its name and its arguments, as they are without quotes.
    """
    print("Next:")
    for command in commands:
        print(f"  {_program()} {shlex.join(command)}")


def _program() -> str:
    """Return how a command starts in this shell: by the script or, without one, by Python with this package."""
    if _is_script():
        return _script()
    return _SCRIPT if shutil.which(_SCRIPT) else f"{shlex.quote(sys.orig_argv[0])} -m {_MODULE}"


def _is_script() -> bool:
    return os.path.basename(sys.argv[0]) == _SCRIPT  # Python's command line has its whole path, and Python's


def _script() -> str:
    """The script as a shell finds it: by its name, or by its path where that is not on PATH."""
    found = shutil.which(_SCRIPT)
    is_elsewhere = os.path.exists(sys.argv[0]) and not (found and os.path.samefile(found, sys.argv[0]))
    return shlex.quote(sys.argv[0]) if is_elsewhere else _SCRIPT
