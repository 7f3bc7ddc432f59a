"""Command-line helpers: parse dataclasses, and end with one sentence and exit code 2 for a user error.

The module of a command has a `main` that parses its options. It then imports the module that does the work with
TensorFlow and Keras, so that help and wrong options are fast.
"""

import atexit
import contextlib
import dataclasses
import difflib
import errno
import gc
import importlib
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated

from keras_vit.errors import ParityError, UserError
from keras_vit.native_stderr import native_stderr_silenced

# Errors of the operating system that a user can fix: no permission, no space, no such path, name too long.
_USERS_DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
# Of these, those of a full disk.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

_HELP = "--help lists all options."
_MOST_NEAR = 5  # names of options to offer for a mistyped one
_LEAST_NEAR = 0.7  # of the letters of a value: mirrored for mirored, but not tpu for gpu
# What other codes call an option, where the letters do not tell.
_OTHER_NAMES = {
    "--lr": "--learning-rate", "--bs": "--batch-size", "--wd": "--weight-decay", "--opt": "--optimizer",
    "--drop-path": "--model.stochastic-depth-rate", "--amp": "--precision",
    "--dtype": "--precision", "--dataset": "--data", "--data-path": "--data", "--output-dir": "--workdir",
    "--output": "--workdir", "--gpus": "--replicas", "--smoothing": "--label-smoothing", "--reprob": "--random-erasing",
}  # fmt: skip
_OTHER_VALUES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "int4": "int4-weights"}
_TITLES = ("Unrecognized options", "Missing argument")  # of tyro's messages
_SCRIPT = "keras-vit"  # that pip installs
# The modules are imported by name when a command is run: `keras_vit` imports neither `training` nor `export`.
COMMANDS = {
    "pretrain": "training.pretrain",
    "finetune": "training.finetune",
    "predict": "training.predict",
    "evaluate": "training.evaluate",
    "verify-official": "training.verify_official",
    "fewshot": "training.fewshot",
    "linear-probe": "training.linear_probe",
    "knn": "training.knn",
    "soup": "training.soup",
    "segment": "training.segment",
    "study": "training.study",
    "vtab": "training.vtab",
    "shard": "training.shard",
    "prepare": "training.prepare",
    "samples": "training.samples",
    "launch": "training.launch",
    "demo": "training.demo",
    "inspect": "keras_vit.inspection.__main__",
    "convert": "keras_vit.convert",
    "saved-model": "export.saved_model.__main__",
    "tflite": "export.tflite.__main__",
    "onnx": "export.onnx.__main__",
    "serving": "export.serving.kit",
}
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ALL_MESSAGES, _NONE = "0", "3"  # every error that ends an operation is an exception too


def parse(arguments_class: type, arguments: Sequence[str], *, prog: str, default=None):
    """Parse shell arguments into a dataclass with tyro. The docstrings of the fields are the help texts.

    Raises UserError with the parser's message as one sentence. `--help` prints the help and exits with 0.
    """
    import tyro  # imported here: building a model does not need it

    _refuse_twice(arguments_class, arguments)
    complaint, help_text = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(help_text):
            return tyro.cli(
                arguments_class,
                args=_with_sizes_last(arguments),
                prog=as_typed(prog),
                default=default,
                config=(tyro.conf.AvoidSubcommands,),  # a field with a union type has the type of its default
            )
    except SystemExit as stop:
        if not stop.code:
            print(_rewrapped(help_text.getvalue()))
            print("Every command also takes --verbose, which shows the log messages of TensorFlow.")
            raise
        raise (_own_error(stop) or UserError(_one_sentence(complaint.getvalue(), arguments_class))) from None


def _rewrapped(help_text: str) -> str:
    """Tyro's help with the text of each option as one paragraph, where it keeps the line breaks of a docstring.

    That an option may be None, and is by default, says nothing to a user: the text says what happens without it.
    """
    help_text = re.sub(r"\[*\[(\w+) \[\1 \.\.\.\]+", r"\1 ...", help_text)  # any number of values
    rows = [line.rstrip() for line in help_text.splitlines()]
    margin, width = " " * 2, max(map(len, help_text.splitlines()), default=0)
    continued = [len(row) - len(row.lstrip()) for row in rows if row.startswith(margin * 4)]
    column = min(continued, default=width // 3)
    lines: list[str] = []
    for row in rows:
        if re.match(rf"{margin}(-|STR)", row):  # an option, or the arguments without one
            name, _, text = row.strip().partition(margin)  # a long name has a line of its own
            lines += [margin + name.replace("{None}|", ""), text.strip()]
        elif row.startswith(" " * column):
            lines[-1] = f"{lines[-1]} {row.strip()}".lstrip()
        else:
            lines += [row, ""]
    found = []
    for name, text in zip(lines[::2], lines[1::2], strict=True):
        wrapped = textwrap.wrap(re.sub(r" \(default: (None)?\)", "", text), width - column, break_on_hyphens=False)
        beside = wrapped[:1] if len(name) < column - 1 else []
        found += [f"{name.ljust(column)}{beside[0]}" if beside else name]
        found += [" " * column + line for line in wrapped[len(beside) :]]
    return "\n".join(found)


def _refuse_twice(arguments_class: type, arguments: Sequence[str]) -> None:
    """Raise UserError for an option that is given twice, or by both of its names: tyro would take the last one."""
    other_names = _other_names(arguments_class)
    given: dict[str, str] = {}
    for argument in arguments:
        option = argument.partition("=")[0].replace("_", "-")
        if not option.startswith("--") or option == "--help":
            continue
        name = other_names.get(option, option)
        if name in given and given[name] != option:
            raise UserError(f"{given[name]} and {option} are two names of one option; give one of them.")
        if name in given:
            raise UserError(f"{option} is given twice; give it once.")
        given[name] = option


def _other_names(arguments_class: type) -> dict[str, str]:
    """The options by their other names: {"--checkpoint": "--run"}."""
    return {
        alias: f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(arguments_class)
        for part in getattr(field.type, "__metadata__", ())
        for alias in getattr(part, "aliases", None) or ()
    }


def _own_error(error: BaseException | None) -> UserError | None:
    """The UserError of a dataclass that tyro caught, whose text it would wrap and frame; None if it caught none."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def named(arguments: Sequence[str], option: str, default: str) -> tuple[str, list[str]]:
    """Return the value of an option on which other defaults depend, and the remaining arguments."""
    rest = list(arguments)
    if sum(argument.partition("=")[0] == option for argument in rest) > 1:
        raise UserError(f"{option} is given twice; give it once.")
    for index, argument in enumerate(rest):
        if argument == option and index + 1 < len(rest):
            return rest[index + 1], rest[:index] + rest[index + 2 :]
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}="), rest[:index] + rest[index + 1 :]
    return default, rest


def _with_sizes_last(arguments: Sequence[str]) -> list[str]:
    """Move every --image-size behind the other arguments, and repeat its number if it has only one: a square.

    In the middle, tyro would take file names behind the two numbers as more of them.
    """
    others, sizes, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, side = argument.partition("=")
        if option.replace("_", "-") != "--image-size":
            others.append(argument)
            continue
        if not equals and rest:
            side = rest.pop(0)
        if side != "None" and not re.fullmatch(r"-?\d+", side):
            found = "nothing" if not side or side.startswith("--") else side
            raise UserError(
                f"--image-size takes pixels, as in --image-size 96 or --image-size 96 128, but was given {found}."
            )
        size = [side]
        if side.isdecimal():
            size.append(rest.pop(0) if rest and re.fullmatch(r"-?\d+", rest[0]) else side)
            if rest and rest[0].isdecimal() and not os.path.exists(rest[0]):  # else it may be a folder of pictures
                given = " ".join([*size, *itertools.takewhile(str.isdecimal, rest)])
                raise UserError(f"--image-size takes one or two numbers, but was given {given}; {_HELP}")
        for number in size:
            if re.fullmatch(r"-?\d+", number) and int(number) < 1:
                raise UserError(f"--image-size takes a number of pixels above 0, but was given {number}.")
        sizes += [option, *size]
    return [*others, *sizes]


def _options_of(arguments_class: type, prefix: str = "--") -> Iterator[str]:
    """The names of the options of a dataclass and of the dataclasses in it, as tyro makes them."""
    for name, hint in typing.get_type_hints(arguments_class, include_extras=True).items():
        own, *parts = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        option = f"{prefix}{name.replace('_', '-')}"
        kinds = [kind for kind in (own, *typing.get_args(own)) if isinstance(kind, type)]  # of a union, each
        nested = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        is_flat = any(getattr(part, "name", None) == "" for part in parts)
        for kind in nested:
            yield from _options_of(kind, prefix if is_flat else f"{option}.")
        if not nested:
            yield option


def _one_sentence(boxes: str, arguments_class: type) -> str:
    """Extract the error from tyro's framed messages, without frames, titles and help texts."""
    # On ASCII terminals, the frames consist of hyphens.
    lines = [re.sub(r"[\u2500-\u257f]+|-{3,}", "", line).strip() for line in boxes.splitlines() if "\u256d" not in line]
    complaints, goes_on, takes_options = [], False, False
    other_names = _other_names(arguments_class)
    for line in lines:
        line, closing, _ = line.partition("For full helptext")
        line = line.strip()
        flag = re.match(r"--[\w.-]+", line)
        if re.match(r"(?i)(missing|unrecognized|error|perhaps|arguments similar|invalid|unexpected|expected)", line):
            complaints.append(line)
            goes_on = takes_options = True
        elif flag and takes_options:
            option = other_names.get(flag[0], flag[0])
            complaints[-1] += f" {option}" if option not in complaints[-1] else ""
            goes_on = False
        elif line and goes_on:
            complaints[-1] += f" {line}"
        else:
            goes_on = False
        if closing:  # the command that follows may be on several lines, and has an option
            goes_on = takes_options = False
    if sentence := _mistyped(complaints, {*_options_of(arguments_class)}) or _no_choice(" ".join(complaints)):
        return sentence
    # A message with a title may say the same again.
    said = [complaint for complaint in complaints if complaint.rstrip(".:") not in _TITLES] or complaints
    text = "; ".join(complaint.rstrip(".") for complaint in said) or " ".join(lines)
    # tyro's message for an optional value.
    text = re.sub(r"no type matching (.+?) could be instantiated from \[(.*?)\]", r"expected \1, but found \2", text)
    text = re.sub(r"\{None\}\|(\w+|\{.*?\})", lambda match: match[1].strip("{}"), text)
    text = re.sub(r"but found (?=$|;)", "but found nothing", text)
    return f"{text}; {_HELP}"


def _no_choice(complaint: str) -> str | None:
    """A sentence on a value that is none of those that an option takes; None if that is not the complaint."""
    found = re.search(r"invalid choice '(.*?)' for argument '(--[\w.-]+).*?Expected one of \((.*?)\)", complaint)
    if found is None:
        return None
    value, option, listed = found.groups()
    choices = re.findall(r"[\w.-]+", listed)
    if "None" in choices:  # of an option that needs none, tyro lists a set
        choices = sorted({*choices} - {"None"})
    near = [_OTHER_VALUES.get(value.lower(), ""), *difflib.get_close_matches(value.lower(), choices, 1, _LEAST_NEAR)]
    meant = [choice for choice in near if choice in choices]
    advice = f"did you mean {meant[0]}? {_HELP}" if meant else _HELP
    return f"{option} takes {', '.join(choices[:-1])} or {choices[-1]}, but was given {value!r}; {advice}"


def _mistyped(complaints: Sequence[str], known: Collection[str]) -> str | None:
    """A sentence on options that do not exist; None if all do. They may also be missing: what was mistyped says more.

    `known` are the options that exist. Values of a mistyped one are among what tyro does not recognize, and are not
    named.
    """

    def options(*beginnings: str) -> list[str]:
        found = [complaint for complaint in complaints if complaint.lower().startswith(beginnings)]
        text = " ".join(complaint.partition(":")[2] for complaint in found)
        return list(dict.fromkeys(re.findall(r"(?:^|[\s,])(--\w[\w.-]*)", text)))

    unknown, near = options("unrecognized"), options("perhaps", "arguments similar")
    if not unknown:
        return None
    missing = options("missing")
    near = near or [name for option in unknown for name in difflib.get_close_matches(option, missing, 1)]
    other = {name: _OTHER_NAMES[name] for name in unknown if _OTHER_NAMES.get(name) in known}
    if other:  # tyro does not say which of the options its near ones are for
        near = [*other.values()]
        for name in unknown:
            near += [] if name in other else difflib.get_close_matches(name, known, 1)
    sentence = f"There {'are no options' if unknown[1:] else 'is no option'} {', '.join(unknown)}"
    return f"{sentence}; did you mean {' or '.join(near[:_MOST_NEAR])}? {_HELP}" if near else f"{sentence}; {_HELP}"


def import_keras() -> None:
    """Import Keras, without the log messages of its backend unless `--verbose` asks for them.

    TensorFlow logs messages about oneDNN on import, before it reads the log level. Raises UserError if the backend is
    not installed.
    """
    is_verbose = os.environ.get(_LOG_LEVEL) == _ALL_MESSAGES
    try:
        with contextlib.nullcontext() if is_verbose else native_stderr_silenced():
            importlib.import_module("keras")
    except ValueError as error:  # of Keras, for a name that is none of its backends
        source = "KERAS_BACKEND" if os.environ.get("KERAS_BACKEND") else "the file keras.json in KERAS_HOME or ~/.keras"
        raise UserError(
            f"Keras cannot be imported ({error}); {source} must name a backend: set KERAS_BACKEND to tensorflow or jax."
        ) from error
    except ModuleNotFoundError as missing:
        if missing.name == "keras":
            raise
        raise UserError(
            f"The backend of Keras needs the Python package {missing.name}, which is not installed; install it, or set "
            "KERAS_BACKEND to tensorflow or jax."
        ) from missing


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
    takes `--verbose`, which shows the log messages of TensorFlow.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    if len(arguments) < len(sys.argv[1:]):
        os.environ[_LOG_LEVEL] = _ALL_MESSAGES
    os.environ.setdefault(_LOG_LEVEL, _NONE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # print any file name on any terminal
    # Else Python looks for cycles among the million objects of TensorFlow and Keras as it exits, which takes seconds.
    atexit.register(gc.freeze)
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


def command_line() -> str:
    """The command of this process as it is typed into a shell."""
    return f"{_script()} {shlex.join(sys.argv[1:])}" if _is_script() else shlex.join(sys.orig_argv)


def as_typed(text: str) -> str:
    """A text with every `python -m MODULE` as the user types it, which may be `keras-vit predict` or `python3 -m …`."""
    names = {module.removesuffix(".__main__"): name for name, module in COMMANDS.items()}

    def typed(found: re.Match) -> str:
        module, flag = found[1], sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
        started = "".join(sys.orig_argv[flag + 1 : flag + 2])
        if _is_script() or started == "keras_vit":
            return f"{_script() if _is_script() else shlex.join(sys.orig_argv[: flag + 2])} {names[module]}"
        return f"{shlex.join(sys.orig_argv[: flag + 1])} {module}" if started in names else found[0]

    return re.sub(rf"\bpython -m ({'|'.join(map(re.escape, names))})\b", typed, text)


def _is_script() -> bool:
    return os.path.basename(sys.argv[0]) == _SCRIPT  # Python's command line has its whole path, and Python's


def _script() -> str:
    """The script as a shell finds it: by its name, or by its path where that is not on PATH."""
    found = shutil.which(_SCRIPT)
    is_elsewhere = os.path.exists(sys.argv[0]) and not (found and os.path.samefile(found, sys.argv[0]))
    return shlex.quote(sys.argv[0]) if is_elsewhere else _SCRIPT


def _call(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    try:
        command(arguments)
    except UserError as mistake:
        print(as_typed(" ".join(str(mistake).split())), file=sys.stderr)
        sys.exit(2)
    except ParityError as difference:
        print(as_typed(" ".join(str(difference).split())), file=sys.stderr)
        sys.exit(os.EX_SOFTWARE)
    except MemoryError as error:
        print(f"The memory of this machine does not suffice ({error}); give smaller sizes.", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _USERS_DISK:
            raise
        if error.filename is None and error.errno in _FULL_DISK:
            _end_on_full_disk()
        print(f"{error.filename or 'The disk'}: {error.strerror}; use another path or fix this one.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        # TensorFlow's error of a full disk, and also of a full memory, is no OSError.
        full = type(error).__name__ == "ResourceExhaustedError"
        if not full or not any(os.strerror(number) in str(error) for number in _FULL_DISK):
            raise
        _end_on_full_disk()
    finally:
        sys.stdout.flush()


def _end_on_full_disk() -> typing.NoReturn:
    print("No space is left on the disk; free some, or give another output directory.", file=sys.stderr)
    sys.exit(2)
