"""The shell: every mistake ends in one sentence on stderr, exit code 2 and no traceback."""

import concurrent.futures
import contextlib
import errno
import io
import json
import logging
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

import training.evaluate
import training.finetune
import training.pretrain
import training.study
from export.saved_model import __main__ as saved_model
from export.tflite import __main__ as tflite
from keras_vit import UserError, cli, convert
from keras_vit.cli import start
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.errors import ParityError
from keras_vit.run import Run
from tests.support import FIXTURES, options_of
from training import knn
from training.recipes.pretrain import RECIPES

ROOT = pathlib.Path(__file__).parent.parent.parent
COMMANDS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): path
    for room in ("keras_vit", "training", "export", "benchmarks")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "\n    cli.run(main)\n" in path.read_text()
}
PRETRAIN = ("digits", "--data", "digits", "--workdir", "runs/never")


def test_options_have_the_names_that_other_codes_use():
    arguments = ["digits", "--data", "digits", "--output-dir", "x", "--lr", "0.5", "--wd=0.25"]
    options = options_of(training.pretrain.main, arguments)
    assert (options.workdir, options.recipe.learning_rate, options.recipe.weight_decay) == ("x", 0.5, 0.25)


def test_a_command_prints_the_sentence_alone_and_exits_with_2():
    command = [sys.executable, "-m", "training.pretrain", "mnist", "--data", "digits", "--workdir", "runs/never"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"There is no recipe named 'mnist'; the nearest names are mnist-[\w, -]+\.\n", done.stderr)


@pytest.fixture(name="type_command")
def _type_command(monkeypatch) -> Callable[..., None]:
    """Makes `sys.argv`, and `sys.orig_argv` if given, those of a command that was typed."""

    def make(argv: Sequence[str], orig_argv: Sequence[str] | None = None) -> None:
        typed = {"argv": argv} if orig_argv is None else {"argv": argv, "orig_argv": orig_argv}
        for name, words in typed.items():
            monkeypatch.setattr(sys, name, [*words])

    return make


def test_messages_and_help_name_the_command_that_was_typed(monkeypatch, capsys, type_command):
    monkeypatch.setenv("PATH", "")  # without the script
    for argv, name in ((["/training/knn.py"], "py -m keras_vit knn"), (["/env/bin/keras-vit", "knn"], "keras-vit knn")):
        type_command(argv, ["py", "-m", "training.knn"])
        with pytest.raises(SystemExit):
            knn.main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {name} ")
        with pytest.raises(SystemExit):
            knn.main([])
        assert f"{name} --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("orig_argv", "argv", "typed"),
    [
        (["python3", "/env/bin/keras-vit", "knn"], ["/env/bin/keras-vit", "knn"], "keras-vit inspect --run 'a b'"),
        (["python3", "-m", "keras_vit", "knn"], ["/x/__main__.py", "knn"], "python3 -m keras_vit inspect --run 'a b'"),
        (["a b/py", "-m", "training.knn"], ["/x/knn.py"], "'a b/py' -m keras_vit inspect --run 'a b'"),
    ],
)
def test_a_message_names_commands_as_this_one_was_typed(orig_argv, argv, typed, monkeypatch, capsys, type_command):
    def refuse(_) -> None:
        raise UserError("look at it with keras-vit inspect --run 'a b'.")

    monkeypatch.setenv("PATH", "")  # without the script
    type_command(argv, orig_argv)
    assert stopped(refuse, capsys, 2) == f"look at it with {typed}.\n"


def test_a_script_that_is_not_on_the_path_is_named_by_its_path(tmp_path, monkeypatch, type_command):
    script = tmp_path / "my env" / "keras-vit"
    script.parent.mkdir()
    script.touch(mode=0o755)
    type_command([str(script), "knn"])
    assert cli.as_typed("keras-vit knn") == f"'{script}' knn"
    monkeypatch.setenv("PATH", str(script.parent))
    assert cli.as_typed("keras-vit knn") == "keras-vit knn"


def test_the_next_commands_run_when_they_are_pasted(tmp_path, monkeypatch, capsys):
    names = ["my images", "Äpfel (rot) & 'süß'", "$HOME", "a*b"]
    (tmp_path / "keras-vit").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "keras-vit").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cli.print_next([("predict", "--run", *names), ("evaluate", "--run", "runs/a")])
    heading, *commands = capsys.readouterr().out.splitlines()
    assert heading == "Next:"
    pasted = subprocess.run(["sh", "-c", commands[0]], capture_output=True, text=True, check=True)
    assert pasted.stdout.splitlines() == ["predict", "--run", *names]
    assert commands[1] == "  keras-vit evaluate --run runs/a"


@pytest.mark.parametrize(("run", "output"), [("runs/a", "runs/a/saved_model"), ("images [new]/run", "saved_model")])
def test_the_next_export_goes_where_tensorflow_can_load_it(run, output):
    commands = Run.at(run).next_commands("predict")
    assert ("saved-model", "--run", run, "--output", output) in commands


@pytest.mark.parametrize("where", ["environment", "keras.json"])
def test_an_unknown_backend_of_keras_is_one_sentence(where, tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "theano"}' if where == "keras.json" else "{}")
    unset = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment = {**unset, "KERAS_HOME": str(tmp_path)} | ({"KERAS_BACKEND": "cntk"} if where == "environment" else {})
    command = [sys.executable, "-m", "training.shard", "--data", "digits", "--output", str(tmp_path / "shards")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert ("theano" if where == "keras.json" else "cntk") in done.stderr
    assert "KERAS_BACKEND" in done.stderr


def stopped(command, capsys, code: int = 2) -> str:
    """What `cli.run` prints on stderr of a command that is to end with this exit code."""
    with pytest.raises(SystemExit) as stop:
        cli.run(command)
    assert stop.value.code == code
    return capsys.readouterr().err


def test_an_artifact_that_differs_is_one_sentence_and_no_mistake_of_the_users(capsys):
    def command(_):
        raise ParityError("The logits of the file differ from the model's,\nso it was not kept.")

    assert not issubclass(ParityError, UserError)
    assert stopped(command, capsys, 70) == "The logits of the file differ from the model's, so it was not kept.\n"


# Native libraries that print to stderr.


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("os.write(2, b'noise')", "after\n"),
        ("os.write(2, b'noise\\n' * 20_000)", "after\n"),
        ("os.write(2, b'why it died\\n'); os.abort()", "why it died\n"),
        ("os.write(2, b'why it died\\n'); os._exit(3)", "why it died\n"),
    ],
)
def test_what_a_library_says_is_held_back_unless_the_process_dies_of_it(body, printed):
    script = f"""
import os
from keras_vit.cli.start import native_stderr_silenced
with native_stderr_silenced():
    {body}
os.write(2, b"after\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == printed


def test_stderr_is_back_after_the_last_of_many_threads(capfd):
    def silence(number: int) -> None:
        with native_stderr_silenced():
            time.sleep(0.01 * (number % 3))
            os.write(2, b"noise")

    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(silence, range(8)))
        os.write(2, b"heard ")
    assert capfd.readouterr().err == "heard heard heard "
    assert len(os.listdir("/dev/fd")) == before


def test_importing_the_package_leaves_stderr_and_the_log_level_alone():
    """A script of the user's may want to hear what TensorFlow says; only our commands need not."""
    script = """
import importlib.machinery, os, sys, types
from export.saved_model import __main__ as saved_model
from export.tflite import __main__ as tflite
import keras_vit
class Loader:
    def create_module(spec):
        return types.ModuleType("keras")
    def exec_module(module):
        os.write(2, b"heard\\n")
        print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
        os._exit(0)
spec = importlib.machinery.ModuleSpec("keras", Loader)
sys.meta_path.insert(1, types.SimpleNamespace(find_spec=lambda name, *_: spec if name == "keras" else None))
import keras
"""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-u", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("None\n", "heard\n")


class XlaRuntimeError(Exception):
    """As JAX raises it."""


FULL_DISK = "No space is left on the disk; free some, or give another output directory."
FULL_MEMORY = r"Not enough memory \(\w[^;{\n]*\); choose smaller sizes\."


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), "a/b: No such file; choose another path."),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 3000), "x{1000}…: File name too long; .*"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", b"a"), "a: Not a directory; choose another path."),
        (OSError(errno.ENOSPC, "full"), FULL_DISK),
        (OSError(errno.EDQUOT, "full"), FULL_DISK),
        (tf.errors.ResourceExhaustedError(None, None, f"out/train.tfrecord; {os.strerror(errno.ENOSPC)}"), FULL_DISK),
        (MemoryError("Unable to allocate 112. GiB for an array with shape (120000000064,)"), FULL_MEMORY),
        (
            tf.errors.ResourceExhaustedError(None, None, "{{node}} OOM when allocating tensor with shape[64,9] and"),
            FULL_MEMORY,
        ),
        (XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nBufferAssignment OOM"), FULL_MEMORY),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error, sentence, capsys):
    def command(_):
        raise error

    assert re.fullmatch(f"{sentence}\n", stopped(command, capsys))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (training.pretrain, PRETRAIN),
        (training.evaluate, ["--run", "augreg:B_16", "--data", "digits", "--output", "x"]),
        (saved_model, ["--checkpoint", "augreg:B_16", "--output", "x"]),
    ],
)
def test_another_backend_is_refused_before_anything_is_done(command, arguments, on_jax, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert stopped(lambda _: command.main(arguments), capsys).startswith(
        "This command needs the TensorFlow backend of Keras, but it is jax;"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_needs_no_tensorflow_runs_on_any_backend(on_jax, tmp_path):
    convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / "x.npz"), "--layout", "npz"])
    assert (tmp_path / "x.npz").is_file()


# In a process of its own: of every command the exit codes, what was printed, and the modules that take long there then.
_AT_THE_DOOR = """
import contextlib, io, json, runpy, sys
slow = "tensorflow keras jax torch sklearn scipy matplotlib pandas tensorflow_datasets ai_edge_quantizer ai_edge_litert"
slow = {*slow.split(), "onnx", "onnxruntime", "openvino", "tf2onnx", "PIL"}
found = {}
for command in sys.argv[1:]:
    for option in "--help", "--no-such-option":
        sys.argv[1:], code, printed, errors = [option], 0, io.StringIO(), io.StringIO()
        sys.modules.pop(command, None)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            code = stop.code or 0
        found[f"{command} {option}"] = code, printed.getvalue(), errors.getvalue(), sorted(slow & set(sys.modules))
print(json.dumps(found))
"""


def test_help_and_a_wrong_option_wait_for_nothing():
    done = subprocess.run([sys.executable, "-c", _AT_THE_DOOR, *COMMANDS], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    for command in COMMANDS:
        code, printed, errors, slow = found[f"{command} --help"]
        assert (code, errors, slow) == (0, "", []), command
        assert "--help" in printed, command
        code, printed, errors, slow = found[f"{command} --no-such-option"]
        assert (code, printed, slow) == (2, "", []), command
        assert "Traceback" not in errors, command


@pytest.mark.slow  # processors differ in speed; the test before this one sees what help must not import
@pytest.mark.parametrize("arguments", ["finetune --help", "pretrain digits --lurning"])
def test_help_and_a_wrong_option_of_the_largest_commands_take_little_processor_time(arguments):
    command = [sys.executable, "-m", "keras_vit", *arguments.split()]

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.6 for _ in range(4))  # other load makes a run slower, never faster


def test_a_reader_that_goes_away_stops_a_command_silently():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "training.pretrain", "--help"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_an_interrupted_command_ends_as_the_shell_expects_and_says_how_to_continue(capsys, type_command):
    def interrupt(_) -> None:
        raise KeyboardInterrupt

    arguments = ["--run", "a run"]
    module, script = ["python", "-m", "training.evaluate"], ["/env/bin/python3", "/env/bin/keras-vit", "evaluate"]
    for typed, argv, printed in (
        (module, ["/training/evaluate.py"], "python -m training.evaluate --run 'a run'"),
        (script, script[1:], "keras-vit evaluate --run 'a run'"),
    ):
        type_command([*argv, *arguments], [*typed, *arguments])
        assert stopped(interrupt, capsys, 130) == (
            f"\nInterrupted; finished files are kept, unfinished ones are removed. To run it again: {printed}\n"
        )


@pytest.mark.parametrize(("options", "heard"), [([], ""), (["--verbose"], "a message of TensorFlow")])
def test_the_messages_of_tensorflow_are_shown_only_if_verbose(options, heard, monkeypatch, capfd, type_command):
    def command(arguments):
        assert arguments == ["--run", "x"]
        cli.import_keras()

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "to be restored")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    type_command(["command", "--run", *options, "x"])
    monkeypatch.setattr(start.importlib, "import_module", lambda _: os.write(2, b"a message of TensorFlow"))
    cli.run(command)
    assert capfd.readouterr().err == heard
    assert logging.getLogger("absl").isEnabledFor(logging.WARNING) == bool(options)


def test_a_warning_is_a_line_without_the_code_that_gave_it(monkeypatch, type_command):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    type_command(["command"])
    cli.run(lambda _: None)
    assert warnings.formatwarning("It is cut.", UserWarning, "runs.py", 1) == "Warning: It is cut.\n"
    assert "runs.py:1" in warnings.formatwarning("It is old.", DeprecationWarning, "runs.py", 1, "")


def test_what_the_terminal_cannot_show_is_escaped():
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")) as stream:
        cli.run(lambda _: print("Skipped: \xe9\x1b[2J\x9b.png"))
    assert stream.buffer.getvalue() == rb"Skipped: \xe9\x1b[2J\x9b.png" + b"\n"


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (training.pretrain, ["--help"], ["Recipes: auto", *RECIPES, "--data", "recipe options"]),
        (training.pretrain, ["digits", "--help"], ["--learning-rate", "pixels", "(default: 0.002)", "model options"]),
        (training.finetune, ["--help"], ["photos-finetune", "--checkpoint", "(required)", "recipe options"]),
        (tflite, ["--help"], ["--formats", "int8-dynamic"]),
    ],
)
def test_help_names_options_defaults_and_units(command, arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


def test_the_usual_options_of_training_come_first(capsys):
    with pytest.raises(SystemExit):
        training.finetune.main(["--help"])
    first = capsys.readouterr().out.partition(" source options ")[0]
    assert 0 < len(first.splitlines()) < 75
    for name in ("checkpoint", "data", "workdir", "epochs", "batch-size", "learning-rate", "image-size", "precision"):
        assert f"--{name} " in first


_STAGES_AND_WAITS = """
import pathlib, signal, sys, time
from keras_vit import cli
from keras_vit.files.atomic import staged

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so do the processes that it starts

def main(arguments):
    with staged(pathlib.Path("out")) as stage:
        (stage / "model.tflite").touch()
        print("writing", flush=True)
        time.sleep(60)

cli.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_leaves_nothing_behind(number, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _STAGES_AND_WAITS]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not list(tmp_path.iterdir())
