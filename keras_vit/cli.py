"""The shell side of every command: typed dataclasses in, one sentence and exit code 2 for a user's mistake.

The module of a command declares its arguments and has a `main` that parses them; what does the work with TensorFlow and
Keras is in another module, which `main` imports when they are right.
"""

import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from keras_vit.errors import ParityError, UserError
from keras_vit.native_stderr import native_stderr_silenced

# What the operating system says of a path that the user chose badly: no permission, no space, no such place, too long.
_USERS_DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


def parse(arguments_class: type, arguments: Sequence[str], *, prog: str, default=None):
    """Parse shell arguments into a dataclass (tyro); the fields' docstrings are the help.

    Raises UserError with the parser's complaint as one sentence; `--help` prints and exits with 0.
    """
    import tyro  # here, so that building a model needs no command-line library

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                arguments_class,
                args=list(arguments),
                prog=prog,
                default=default,
                config=(tyro.conf.AvoidSubcommands,),  # a field that may be of several kinds is of its default's
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_sentence(complaint.getvalue())) from None


def named(arguments: Sequence[str], option: str, default: str) -> tuple[str, list[str]]:
    """The value of an option on which the other options' defaults depend, and the other arguments."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument == option and index + 1 < len(rest):
            return rest[index + 1], rest[:index] + rest[index + 2 :]
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}="), rest[:index] + rest[index + 1 :]
    return default, rest


def _one_sentence(boxes: str) -> str:
    """What tyro's framed messages complain of, without frames, titles and the help of the options they name."""
    # Where the terminal has ASCII alone, the rules of the frames are hyphens.
    lines = [re.sub(r"[\u2500-\u257f]+|-{3,}", "", line).strip() for line in boxes.splitlines() if "\u256d" not in line]
    complaints, goes_on = [], False
    for line in lines:
        line = line.split("For full helptext")[0].strip()
        flag = re.match(r"--[\w.-]+", line)
        if re.match(r"(?i)(missing|unrecognized|error|perhaps|invalid|unexpected|expected)", line):
            complaints.append(line)
            goes_on = True
        elif flag and complaints:
            complaints[-1] += f" {flag[0]}" if flag[0] not in complaints[-1] else ""
            goes_on = False
        elif line and goes_on:
            complaints[-1] += f" {line}"
        else:
            goes_on = False
    text = "; ".join(complaint.rstrip(".") for complaint in complaints) or " ".join(lines)
    # tyro's words for a value that may also be left out.
    text = re.sub(r"no type matching (\S+) could be instantiated from \[(.*?)\]", r"expected \1, but found \2", text)
    return f"{text}; --help lists all options."


def import_keras() -> None:
    """Import Keras without the build remarks of its backend, under which an error of one sentence would be buried.

    TensorFlow prints remarks on oneDNN while it is loaded, before it reads any log level.
    """
    with native_stderr_silenced():
        importlib.import_module("keras")


def require_tensorflow() -> None:
    """Raise UserError unless Keras, which this imports, has the TensorFlow backend."""
    import_keras()
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"Training and export need the TensorFlow backend of Keras, but it is {keras.backend.backend()}; "
            "set KERAS_BACKEND=tensorflow."
        )


def run(command: Callable[[Sequence[str]], None]) -> None:
    """Call a command with the shell's arguments and leave the process with its exit code.

    2 for a user's mistake, os.EX_SOFTWARE (70) for an artifact that differs from its model.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's errors, no remarks
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show stops nothing
    try:
        _call(command)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # nobody reads any more: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        sys.exit(128 + signal.SIGPIPE)


def _call(command: Callable[[Sequence[str]], None]) -> None:
    try:
        command(sys.argv[1:])
    except UserError as mistake:
        print(" ".join(str(mistake).split()), file=sys.stderr)
        sys.exit(2)
    except ParityError as difference:
        print(" ".join(str(difference).split()), file=sys.stderr)
        sys.exit(os.EX_SOFTWARE)
    except OSError as error:
        if error.errno not in _USERS_DISK:
            raise
        print(f"{error.filename or 'The disk'}: {error.strerror}; give another path, or mend this.", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.stdout.flush()
