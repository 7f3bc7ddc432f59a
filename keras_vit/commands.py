"""The console command `keras-vit NAME …`, which is the same as `python -m MODULE …` for every command.

Its script does not put the current folder on Python's path, so it also works in a folder with a `training.py`.
"""

import importlib
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.errors import UserError, nearest

# The modules are imported by name when a command is run: this package imports neither `training` nor `export`.
COMMANDS = {
    "pretrain": "training.pretrain",
    "finetune": "training.finetune",
    "predict": "training.predict",
    "evaluate": "training.evaluate",
    "fewshot": "training.fewshot",
    "linear-probe": "training.linear_probe",
    "knn": "training.knn",
    "soup": "training.soup",
    "segment": "training.segment",
    "study": "training.study",
    "vtab": "training.vtab",
    "shard": "training.shard",
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
_DISTRIBUTION = "keras-vision-transformer-application"


def run_command(arguments: Sequence[str]) -> None:
    """Run the command that the first argument names with the other arguments.

    Without arguments and with `--help`, list the commands. Raises UserError for an unknown name, and if a library of
    the command is not installed.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("usage: keras-vit COMMAND …; keras-vit COMMAND --help lists the options\n")
        for command, module in COMMANDS.items():
            print(f"  {command:13} python -m {module.removesuffix('.__main__')}")
        return
    if name not in COMMANDS:
        raise UserError(
            f"There is no command {name!r}; keras-vit --help lists all, the nearest are {nearest(name, COMMANDS)}."
        )
    try:
        importlib.import_module(COMMANDS[name]).main(rest)
    except ModuleNotFoundError as missing:
        raise UserError(
            f"keras-vit {name} needs the Python package {missing.name}, which is not installed; install it with "
            f"pip install '{_DISTRIBUTION}[train,export,onnx]'."
        ) from missing


def main() -> None:
    """The entry point of the script `keras-vit`."""
    cli.run(run_command)
