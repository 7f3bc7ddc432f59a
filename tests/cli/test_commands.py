"""The console command `keras-vit`, and the wheel that installs it."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.cli.commands import COMMANDS, run_command
from tests.cli.test_start import COMMANDS as MODULES

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_every_module_with_a_command_has_one_name():
    modules = [module.removesuffix(".__main__") for module in COMMANDS.values()]
    assert sorted(modules) == sorted(name for name in MODULES if not name.startswith("benchmarks"))


def test_the_list_of_commands_names_each(capsys):
    run_command([])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted([*COMMANDS, "models", "recipes"])


def test_the_version_is_an_option_that_the_help_lists(capsys):
    run_command(["--help"])
    assert "keras-vit --version" in capsys.readouterr().out


_LISTED_WITHOUT_TENSORFLOW = """
import sys
from keras_vit.cli.commands import run_command
for number, command in enumerate(sys.argv[1:]):
    print(end="\\0" if number else "")
    run_command(command.split())
sys.exit(bool({"tensorflow", "keras", "jax"} & set(sys.modules)))
"""


def test_models_and_recipes_are_listed_by_a_wildcard_without_tensorflow():
    listed = {
        "models vit-b_16": (["ViT-B_16", "224", "86.6", "M", "17.6", "84.6%"], 7),
        "recipes PHOTOS-FINE*": (["photos-finetune", "finetune", "224x224", "pixels", "500", "steps"], 1),
        "models *deit*": (["DeiT3-S_16", "224"], 8),
        "models testing": (["testing", "224"], 1),
    }
    command = [sys.executable, "-c", _LISTED_WITHOUT_TENSORFLOW, *listed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for (arguments, (first_line, count)), printed in zip(listed.items(), done.stdout.split("\0"), strict=True):
        lines = printed.splitlines()[arguments.startswith("models") :]  # a header
        assert lines[0].split()[: len(first_line)] == first_line
        assert len(lines) == count


def test_the_package_runs_commands_without_its_script():
    done = subprocess.run([sys.executable, "-m", "keras_vit", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, keras_vit.__version__, "")


def test_bash_completes_commands_options_and_files(tmp_path):
    completed = {
        "fin": "finetune",
        "rec": "recipes",
        "convert --lay": "--layout",
        "pretrain digits --batch": "--batch-size",
        "convert pic": "picture.npz",
    }
    script = """
keras-vit() { "$PYTHON" -c "from keras_vit.cli.commands import main; main()" "$@"; }
eval "$(keras-vit --print-completion bash)"
for words in "$@"; do
    COMP_WORDS=(keras-vit $words) COMPREPLY=()
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _keras_vit
    echo "${COMPREPLY[@]}"
done
"""
    (tmp_path / "picture.npz").touch()
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", script, "bash", *completed]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == ([*completed.values()], "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--print-completion"], "one of bash, zsh, but is ''"),
        (["--print-completion", "fish"], "one of bash, zsh, but is 'fish'"),
        (["models", "nothing"], "'nothing'; keras-vit models lists all"),
        (["recipes", "nothing"], "'nothing'; keras-vit recipes lists all"),
        (["pretrain", "digts"], "no recipe named 'digts'"),
        (["fine-tune"], "'fine-tune'; .* finetune"),
        (["train"], "'train'; .* Did you mean pretrain or finetune?"),
        (["Serve"], "'Serve'; .* Did you mean serving or saved-model"),
        (["evalute"], "'evalute'; .* Did you mean evaluate?"),
        (["zero"], "'zero'; keras-vit --help lists all.$"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        run_command(arguments)


def test_one_model_is_listed_with_all_its_checkpoints(capsys):
    run_command(["models", "ViT-B_16"])
    _, first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("ViT-B_16 ")
    assert "84.6%" in first
    assert "augreg:B_16" in [line.strip() for line in others]


def test_a_mistyped_auto_is_answered_with_auto_and_at_most_three_names():
    for command in (["pretrain", "autp"], ["finetune", "--recipe", "autp"]):
        with pytest.raises(UserError) as refused:
            run_command(command)
        names = str(refused.value).split("nearest names are ")[1].rstrip(".").split(", ")
        assert names[0] == "auto"
        assert len(names) <= 3


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_vit.convert", None)
    with pytest.raises(UserError, match="needs the Python package keras_vit.convert, .* pip install"):
        run_command(["convert", "a", "b"])


@pytest.mark.slow
def test_the_wheel_works_in_its_own_environment_beside_a_training_py_of_the_user(tmp_path):
    """The environment borrows the libraries of this one through a .pth file, and has its own keras_vit."""
    source = tmp_path / "source"  # a build writes into the folder of its source
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for file in filter(None, files):
        if file.startswith(("keras_vit/", "training/", "export/")) or file in ("pyproject.toml", "README.md"):
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((ROOT / file).read_bytes())
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    scripts = tmp_path / "env" / "bin"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command, **options):
        folder = tmp_path / "elsewhere"
        return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, **options)

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "training.py").write_text("raise SystemExit('the module of the user was imported')\n")
    run(scripts / "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    run(scripts / "pip", "install", "--no-deps", wheel, check=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    version = run(scripts / "python", "-c", "import keras_vit; print(keras_vit.__version__, keras_vit.__file__)")
    assert version.stdout.split() == [keras_vit.__version__, str(packages / "keras_vit" / "__init__.py")]
    for name in COMMANDS:
        shown = run(scripts / "keras-vit", name, "--help")
        assert shown.returncode == 0, (name, shown.stderr)
        assert "usage" in shown.stdout
    mistake = run(scripts / "keras-vit", "evaluate", "--run", "nowhere", "--data", "digits")
    assert mistake.returncode == 2
    assert mistake.stderr.startswith("There is no")
    samples = run(scripts / "keras-vit", "samples", "--data", "digits", "--count", "2", "--output", "pictures")
    assert samples.returncode == 0, samples.stderr
