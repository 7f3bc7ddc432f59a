"""The console command `keras-vit NAME …`, which runs the module of the command with the other arguments.

Its script does not put the current folder on Python's path, so it also works in a folder with a `training.py`.
"""

import difflib
import importlib
import shutil
import sys
from collections.abc import Sequence

from keras_vit import __version__
from keras_vit.cli import start
from keras_vit.errors import UserError, check_choice
from keras_vit.published import USUAL, find_models

# What the commands are for -> the module of each, which is imported by name when it is run, since `keras_vit` imports
# neither `training` nor `export`, and what it does, in half a line.
_GROUPS = {
    "Train": {
        "auto": ("training.auto", "train on your images in the way that suits them and this machine"),
        "finetune": ("training.finetune", "train a published model, or a run, on your images"),
        "pretrain": ("training.pretrain", "train a model from scratch, with or without labels"),
        "linear-probe": ("training.linear_probe", "fit a linear classifier to frozen features, and save both as a run"),
        "detect": ("training.detect", "find objects from words, from an example, or of your own classes"),
        "segment": ("training.segment", "find the class of every pixel, or objects with their outlines"),
        "unknown": ("training.unknown", "teach a run to tell images of none of its classes"),
        "anomaly": ("training.anomaly", "learn from good parts, and find defects on others"),
        "soup": ("training.soup", "average the weights of fine-tuned runs"),
        "prepare": ("training.prepare", "make a clean folder of images"),
        "shard": ("training.shard", "write a data set as TFRecord files"),
        "launch": ("training.launch", "start several workers of a command on this machine"),
        "demo": ("training.demo", "train and export a small example"),
        "doctor": ("training.doctor", "check this machine, and print the commands that repair it"),
    },
    "Look": {
        "predict": ("training.predict", "classify images"),
        "evaluate": ("training.evaluate", "measure a model, and show its mistakes"),
        "inspect": ("keras_vit.inspection.__main__", "draw what a model attends to"),
        "embed": ("training.embed", "compute the features of images, and keep them in a folder"),
        "similar": ("training.similar", "find the images that look like one"),
        "search": ("training.search", "find images by words"),
        "review": ("training.review", "find wrong labels, duplicates and outliers, and decide on them"),
        "label-next": ("training.label_next", "choose the images that are most worth a label"),
        "monitor": ("training.monitor", "say whether new images differ from the evaluation images"),
        "samples": ("training.samples", "write some images of a data set to a file"),
        "models": ("", "list the named models, or those with a part of a name or a wildcard"),
        "recipes": ("", "list the recipes for training, in the same way"),
    },
    "Ship": {
        "saved-model": ("export.saved_model.__main__", "export for TF Serving"),
        "tflite": ("export.tflite.__main__", "export for phones"),
        "onnx": ("export.onnx.__main__", "export for ONNX Runtime, OpenVINO and the browser"),
        "fastest": ("export.fastest.__main__", "measure the exports on this machine, and recommend one"),
        "serving": ("export.serving.kit", "write the configuration and the clients of TF Serving"),
        "convert": ("keras_vit.convert", "write a checkpoint for another library"),
    },
    "Measure": {
        "fewshot": ("training.fewshot", "accuracy of frozen features with a few images of each class"),
        "knn": ("training.knn", "accuracy of the nearest neighbors among frozen features"),
        "verify-official": ("training.verify_official", "repeat the published accuracy of a checkpoint"),
        "vtab": ("training.vtab", "fine-tune to the 19 tasks of VTAB-1k"),
        "study": ("training.study", "repeat a study of the papers on your data"),
    },
}
# Those without a module, which print a list.
_LISTS = ("models", "recipes")
COMMANDS = {name: module for group in _GROUPS.values() for name, (module, _) in group.items() if module}
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
            for command, (_, summary) in commands.items():
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
        near = meant or difflib.get_close_matches(name[:100], (*COMMANDS, *_LISTS))
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"There is no command {name[:100]!r}; keras-vit --help lists all.{hint}")
    try:
        if name in _LISTS:
            _print_list(name, rest)
        else:
            importlib.import_module(COMMANDS[name]).main(rest)
    except ModuleNotFoundError as missing:
        raise UserError(
            f"keras-vit {name} needs the Python package {missing.name}, which is not installed; install it with "
            f"pip install '{_DISTRIBUTION}[train,export,onnx]', with gpu or tpu instead of train where you use one."
        ) from missing


def _print_completion(shells: Sequence[str]) -> None:
    check_choice("--print-completion", " ".join(shells), ("bash", "zsh"))
    if shells[0] == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")
    print(_COMPLETION.replace("NAMES", " ".join((*COMMANDS, *_LISTS))))


def _print_list(noun: str, arguments: Sequence[str]) -> None:
    """Print the models or the recipes, one line each, or those that fit wildcards or parts of a name."""
    if {"-h", "--help"} & {*arguments}:
        print(f"usage: keras-vit {noun} [NAME …], parts of names or wildcards such as 'vit*16', lists the {noun}")
        return
    recipes = importlib.import_module("training.recipes.pretrain").recipe_lines if noun == "recipes" else None
    for wildcard in arguments or ["*"]:
        lines = (recipes or _model_lines)(wildcard)
        if not lines:
            raise UserError(f"No name fits {wildcard!r}; keras-vit {noun} lists all.")
        print("\n".join(lines))


def _model_lines(wildcard: str) -> list[str]:
    """Return a table of the models that fit, the usual first: of one all checkpoints, of several the first of each."""
    models = find_models(wildcard)
    models = [model for model in models if model.purpose != "tests"] or models
    models.sort(key=lambda model: USUAL.index(model.name) if model.name in USUAL else len(USUAL))
    lines = [f"{'model':21} {'pixels':>6} {'params':>9} {'GMACs':>7} {'ImageNet':>8}  {'license':14}  checkpoint"]
    for model in models:
        accuracy = f"{model.accuracy:.1f}%" if model.accuracy else ""
        size = f"{model.pixels:6} {model.millions:7,.1f} M {model.gmacs:7,.1f}"
        names = model.checkpoints or ("none",)
        more = f" and {len(names) - 1} more" if names[1:] and models[1:] else ""
        lines.append(f"{model.name:21} {size} {accuracy:>8}  {model.license:14}  {names[0]}{more}")
        lines += [] if models[1:] else [f"{'':74}{name}" for name in names[1:]]
    if not models:
        return []
    if not sys.stdout.isatty() or not models[1:]:
        return lines
    return [line[: shutil.get_terminal_size().columns] for line in lines]


def main() -> None:
    """The entry point of the script `keras-vit`."""
    start.run(run_command)
