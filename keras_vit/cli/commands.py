"""The console command `keras-vit NAME …`, which runs the module of the command with the other arguments.

Its script does not put the current folder on Python's path, so it also works in a folder with a `training.py`.
"""

import importlib
from collections.abc import Sequence

from keras_vit import __version__
from keras_vit.cli import start
from keras_vit.errors import UserError, nearest
from keras_vit.published import USUAL, find_models

# The modules are imported by name when a command is run: `keras_vit` imports neither `training` nor `export`.
COMMANDS = {
    "auto": "training.auto",
    "pretrain": "training.pretrain",
    "finetune": "training.finetune",
    "predict": "training.predict",
    "evaluate": "training.evaluate",
    "verify-official": "training.verify_official",
    "fewshot": "training.fewshot",
    "linear-probe": "training.linear_probe",
    "knn": "training.knn",
    "embed": "training.embed",
    "similar": "training.similar",
    "search": "training.search",
    "review": "training.review",
    "soup": "training.soup",
    "unknown": "training.unknown",
    "anomaly": "training.anomaly",
    "segment": "training.segment",
    "detect": "training.detect",
    "study": "training.study",
    "vtab": "training.vtab",
    "shard": "training.shard",
    "prepare": "training.prepare",
    "samples": "training.samples",
    "launch": "training.launch",
    "doctor": "training.doctor",
    "demo": "training.demo",
    "inspect": "keras_vit.inspection.__main__",
    "convert": "keras_vit.convert",
    "saved-model": "export.saved_model.__main__",
    "tflite": "export.tflite.__main__",
    "onnx": "export.onnx.__main__",
    "fastest": "export.fastest.__main__",
    "serving": "export.serving.kit",
}
_LISTS = {"models": "the named models", "recipes": "the recipes for training"}
# What the commands are for, and what each does, in half a line.
_GROUPS = {
    "Train": {
        "auto": "train on your pictures in the way that suits them and this machine",
        "finetune": "train a published model, or a run, on your pictures",
        "pretrain": "train a model from scratch, with or without labels",
        "linear-probe": "fit a linear classifier to frozen features, and save both as a run",
        "detect": "find objects from words, from an example, or of your own classes",
        "segment": "find the class of every pixel, or objects with their outlines",
        "unknown": "teach a run to tell pictures of none of its classes",
        "anomaly": "find defects on parts by a memory of good ones",
        "soup": "average the weights of fine-tuned runs",
        "prepare": "make a clean folder of pictures",
        "shard": "write a data set as TFRecord files",
        "launch": "start several workers of a command on this machine",
        "demo": "train and export a small example",
        "doctor": "check this machine, and say how to repair what does not fit",
    },
    "Look": {
        "predict": "classify pictures",
        "evaluate": "measure a model, and show its mistakes",
        "inspect": "draw what a model attends to",
        "embed": "compute the features of pictures, and keep them in a folder",
        "similar": "find the pictures that look like one",
        "search": "find pictures by words",
        "review": "find wrong labels, duplicates and outliers, and decide on them",
        "samples": "write some pictures of a data set to a file",
        "models": "list the named models, or those with a part of a name or a wildcard",
        "recipes": "list the recipes for training, in the same way",
    },
    "Ship": {
        "saved-model": "export for TF Serving",
        "tflite": "export for phones",
        "onnx": "export for ONNX Runtime, OpenVINO and the browser",
        "fastest": "measure the exports on this machine, and recommend one",
        "serving": "write the configuration and the clients of TF Serving",
        "convert": "write a checkpoint for another library",
    },
    "Measure": {
        "fewshot": "accuracy of frozen features with a few pictures of each class",
        "knn": "accuracy of the nearest neighbors among frozen features",
        "verify-official": "repeat the published accuracy of a checkpoint",
        "vtab": "fine-tune to the 19 tasks of VTAB-1k",
        "study": "repeat a study of the papers on your data",
    },
}
# What other programs call a command -> the commands here.
_OTHER_NAMES = {
    "train": ("pretrain", "finetune"), "fit": ("pretrain", "finetune"), "fine-tune": ("finetune",),
    "export": ("saved-model", "tflite", "onnx"), "serve": ("serving", "saved-model", "predict --serve"),
    "eval": ("evaluate",), "test": ("evaluate",), "validate": ("evaluate",), "classify": ("predict",),
    "infer": ("predict",), "savedmodel": ("saved-model",), "list": ("models", "recipes"), "explain": ("inspect",),
    "features": ("embed",), "index": ("embed",), "nearest": ("similar", "search"), "duplicates": ("review",),
    "clean": ("review", "prepare"),
}  # fmt: skip
# For bash, and for zsh through its emulation.
_COMPLETION = """_keras_vit() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "NAMES" -- "$word"))
  elif [ "${word#-}" != "$word" ]; then
    local names=$(KERAS_VIT_OPTIONS=1 keras-vit "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$names" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _keras_vit keras-vit"""
_DISTRIBUTION = "keras-vision-transformer-application"


def run_command(arguments: Sequence[str]) -> None:
    """Run the command that the first argument names with the other arguments.

    Without arguments and with `--help`, list the commands; with `--version`, print the version. Raises UserError for an
    unknown name, and if a library of the command is not installed.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("usage: keras-vit COMMAND …; keras-vit COMMAND --help lists the options")
        for group, commands in _GROUPS.items():
            print(f"\n{group}")
            for command, summary in commands.items():
                print(f"  {command:15} {summary}")
        print("\nkeras-vit --print-completion bash (or zsh) prints a script for your shell that completes all this.")
        print("keras-vit --version prints the version.")
        return
    if name == "--version":
        print(__version__)
        return
    if name == "--print-completion":
        _print_completion(rest)
        return
    if name not in (*COMMANDS, *_LISTS):
        meant = _OTHER_NAMES.get(name.lower().replace("_", "-"))
        close = ", ".join(meant) if meant else nearest(name, (*COMMANDS, *_LISTS))
        raise UserError(f"There is no command {name!r}; keras-vit --help lists all, the nearest: {close}.")
    try:
        if name in _LISTS:
            _print_list(name, rest)
        else:
            importlib.import_module(COMMANDS[name]).main(rest)
    except ModuleNotFoundError as missing:
        raise _not_installed(name, missing) from missing


def _print_completion(shells: Sequence[str]) -> None:
    """Print the shell's script that completes commands, options and files."""
    if list(shells) not in (["bash"], ["zsh"]):
        raise UserError(f"--print-completion takes bash or zsh, but was given {' '.join(shells) or 'nothing'}.")
    if shells[0] == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")
    print(_COMPLETION.replace("NAMES", " ".join((*COMMANDS, *_LISTS))))


def _print_list(kind: str, arguments: Sequence[str]) -> None:
    """Print the models or the recipes, one line each, or those that fit a wildcard or a part of a name."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: keras-vit {kind} [NAME], a part of a name or a wildcard such as 'vit*16', lists {_LISTS[kind]}")
        return
    if len(arguments) > 1:
        raise UserError(f"keras-vit {kind} takes one wildcard, but was given {len(arguments)}; put it in quotes.")
    wildcard = arguments[0] if arguments else "*"
    lines = _model_lines(wildcard)
    if kind == "recipes":
        lines = importlib.import_module("training.recipes.listing").recipe_lines(wildcard)
    if not lines:
        raise UserError(f"No name fits {wildcard!r}; keras-vit {kind} lists all.")
    print("\n".join(lines))


def _model_lines(wildcard: str) -> list[str]:
    """A line for each model that fits: those that most people use first; those for tests only where they are named."""
    found = find_models(wildcard)
    found = [model for model in found if model.purpose != "tests"] or found
    found.sort(key=lambda model: USUAL.index(model.name) if model.name in USUAL else len(USUAL))
    return [
        f"{model.name:20} {model.pixels} pixels {model.millions:8,.1f} M parameters  {model.purpose:20} "
        + f"{f'{model.accuracy} % ImageNet' if model.accuracy else '':15} {model.license:10} "
        + (", ".join(model.checkpoints) or "no checkpoint")
        for model in found
    ]


def _not_installed(name: str, missing: ModuleNotFoundError) -> UserError:
    return UserError(
        f"keras-vit {name} needs the Python package {missing.name}, which is not installed; install it with "
        f"pip install '{_DISTRIBUTION}[train,export,onnx]', with gpu or tpu instead of train where you use one."
    )


def main() -> None:
    """The entry point of the script `keras-vit`."""
    start.run(run_command)
