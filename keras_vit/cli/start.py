"""The start of all commands, their messages, and their end with one sentence and exit code 2 for a user error.

The module of a command has a `main`, which parses its options with `keras_vit/cli/parser.py`. It then imports the
module that does the work with TensorFlow and Keras, so that help and wrong options are fast.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import io
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from keras_vit.errors import ParityError, UserError, check_choice, printable

_SCRIPT = "keras-vit"  # that pip installs
_MODULE = "keras_vit"  # that Python runs where the script is not installed
# Errors of the operating system that a user can fix: no permission, no space, no such path, name too long.
_USERS_DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
# Of these, those of a full disk.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE = "No space is left on the disk; free some, or give another output directory."
# Characters of a path in a message.
_LONGEST_NAME = 1000
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_PYTHONS_FORMAT = warnings.formatwarning
# Keeps the last 64 KiB of its input and prints them at the end of the input.
_HOLDER = """
import sys
kept = b""
while piece := sys.stdin.buffer.raw.read(65536):
    kept = (kept + piece)[-65536:]
sys.stderr.buffer.write(kept)
"""
_ALL_MESSAGES, _NONE = "0", "3"  # every error that ends an operation is an exception too


def is_verbose() -> bool:
    """Return whether `--verbose` asks for all messages."""
    return os.environ.get(_LOG_LEVEL) == _ALL_MESSAGES


def import_keras() -> None:
    """Import Keras, without the log messages of its backend unless `--verbose` asks for them.

    TensorFlow logs messages about oneDNN on import, before it reads the log level. Raises UserError if the backend is
    not installed.
    """
    try:
        with contextlib.nullcontext() if is_verbose() else native_stderr_silenced():
            importlib.import_module("keras")
    except (ValueError, ModuleNotFoundError) as error:  # a name that is none of its backends, or one not installed
        if getattr(error, "name", None) == "keras":
            raise
        raise UserError(
            f"Keras cannot be imported ({error}); set KERAS_BACKEND, which goes before keras.json, to tensorflow or "
            "jax, and install it."
        ) from error
    # Of absl, which Keras has imported. TensorFlow Datasets warns of each data set.
    logging.getLogger("absl").setLevel(logging.WARNING if is_verbose() else logging.ERROR)


def require_tensorflow() -> None:
    """Import Keras and raise UserError unless its backend is TensorFlow."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow":
        import_keras()
        import keras

        backend = keras.backend.backend()  # keras.json may name another
    if backend != "tensorflow":
        raise UserError(
            f"This command needs the TensorFlow backend of Keras, but it is {backend}; set KERAS_BACKEND=tensorflow "
            "for it."
        )


def run(command: Callable[[Sequence[str]], None]) -> None:
    """Run a command with the shell's arguments and exit with its exit code.

    The code is 2 for a user error and os.EX_SOFTWARE (70) for an artifact that differs from its model. Every command
    takes `--verbose`, which shows the log messages of TensorFlow, and all settings in a dry run.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    if len(arguments) < len(sys.argv[1:]):
        os.environ[_LOG_LEVEL] = _ALL_MESSAGES
    os.environ.setdefault(_LOG_LEVEL, _NONE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # print any file name on any terminal
    for stream in (sys.stdout, sys.stderr):
        show_controls(stream)
    warnings.formatwarning = _format_warning
    # Else Python looks for cycles among the million objects of TensorFlow and Keras as it exits, which takes seconds.
    atexit.register(gc.freeze)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        _call(command, arguments)
    except KeyboardInterrupt:
        print(
            "\nInterrupted; finished files are kept, unfinished ones are removed. To run it again: " + command_line(),
            file=sys.stderr,
        )
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        sys.exit(128 + signal.SIGPIPE)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning for the user of a command without the line of code that gave it; others as Python shows them."""
    if category is UserWarning:
        return f"Warning: {message}\n"
    return _PYTHONS_FORMAT(message, category, filename, lineno, line)


def _end(number: int, _) -> typing.NoReturn:
    """End by a signal, but remove unfinished files first."""
    sys.exit(128 + number)


def run_job(
    prog: str, about: str, jobs: Mapping[str, Callable[[Sequence[str], str, str], None]], arguments: Sequence[str]
) -> None:
    """Run a command of several jobs, such as `keras-vit detect predict`: its first argument names one.

    jobs: functions of the other arguments, the command with the job, and `about`, which --help shows.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {as_typed(prog)} {'|'.join(jobs)} [OPTIONS]\n\n{as_typed(about)}")
        return
    check_choice(f"The first argument of {prog}", name, jobs)
    jobs[name](rest, f"{prog} {name}", about)


def _call(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    try:
        command(arguments)
    except (UserError, ParityError) as error:
        _fail(as_typed(" ".join(str(error).split())), os.EX_SOFTWARE if isinstance(error, ParityError) else 2)
    except MemoryError as error:
        _end_on_full_memory(str(error))
    except OSError as error:
        if error.errno not in _USERS_DISK:
            raise
        if error.filename is None and error.errno in _FULL_DISK:
            _fail(_NO_SPACE)
        name = os.fsdecode(error.filename or "The disk")
        name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        _fail(f"{name}: {error.strerror}; choose another path.")
    except Exception as error:
        # TensorFlow's error of a full disk is also that of a full memory; JAX has one of its own.
        if type(error).__name__ == "ResourceExhaustedError":
            if any(os.strerror(number) in str(error) for number in _FULL_DISK):
                _fail(_NO_SPACE)
        elif not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        _end_on_full_memory(getattr(error, "message", str(error)))
    finally:
        sys.stdout.flush()


def _end_on_full_memory(reason: str) -> typing.NoReturn:
    oom = re.search(r"OOM when allocating tensor with shape\[[\d,]*\]|[Oo]ut of memory.*", reason)
    what = oom[0] if oom else reason.split("\n")[0]
    _fail(f"Not enough memory ({what.strip('. ')}); choose smaller sizes.")


def _fail(sentence: str, code: int = 2) -> typing.NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(code)


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
    """Return the command of this process as it is typed into a shell."""
    return f"{_script()} {shlex.join(sys.argv[1:])}" if _is_script() else shlex.join(sys.orig_argv)


def as_typed(text: str) -> str:
    """Return a text with every `keras-vit COMMAND` as it runs in this shell."""
    return re.sub(rf"(?<![\w/-]){_SCRIPT}(?= [a-z])", lambda _: _program(), text)


def print_next(commands: Sequence[Sequence[str]]) -> None:
    """Print commands to go on with, each of its name and arguments, as they are pasted into the shell."""
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
    """Return the script as a shell finds it: by its name, or by its path where that is not on PATH."""
    usual = shutil.which(_SCRIPT)
    is_elsewhere = os.path.exists(sys.argv[0]) and not (usual and os.path.samefile(usual, sys.argv[0]))
    return shlex.quote(sys.argv[0]) if is_elsewhere else _SCRIPT


# What native libraries write to stderr: suppressed, but printed if the process dies.


@contextlib.contextmanager
def native_stderr_silenced() -> Iterator[None]:
    """Suppress writes to file descriptor 2 inside the block. Python exceptions are raised as usual.

    A separate process buffers the text and is killed at the end of the block. If this process dies within the block,
    for example by an abort in a library, the other process prints the text. Blocks may overlap in threads: the
    descriptor is restored at the end of the last one.
    """
    _silence.begin()
    try:
        yield
    finally:
        _silence.end()


class _Silence:
    """The number of active blocks, and the state to restore stderr."""

    def __init__(self) -> None:
        self._lock, self._blocks = threading.Lock(), 0
        self._saved: int | None = None
        self._holder: subprocess.Popen | None = None

    def begin(self) -> None:
        with self._lock:
            if not self._blocks:
                self._redirect()
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and self._holder is not None:
                self._holder.kill()  # before restoring stderr: at the end of its input it would print
                self._holder.wait()
                assert self._saved is not None
                os.dup2(self._saved, 2)
                os.close(self._saved)
                self._holder = None

    def _redirect(self) -> None:
        try:
            saved = os.dup(2)
        except OSError:  # the process has no stderr
            return
        reading, writing = os.pipe()
        try:
            # In a session of its own, so that Ctrl-C does not end it before this process.
            self._holder = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _HOLDER],
                stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            os.dup2(writing, 2)
            self._saved = saved
        except OSError:  # no process can be started: leave stderr as it is
            os.close(saved)
        finally:
            os.close(reading)
            os.close(writing)


_silence = _Silence()
