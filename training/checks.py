"""Checks of options that commands make before TensorFlow is imported, which takes seconds."""

import pathlib
import socket

from keras_vit import UserError, run_directory
from keras_vit.checkpoints.find import check_name
from keras_vit.errors import explained
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import existing_folder, is_remote
from keras_vit.images.formats import is_hidden
from training.options.common import TrainingOptions
from training.options.data import RECORD_INDEX
from training.options.features import DESCRIPTION
from training.options.pipeline import PIPELINE, PROBLEMS

# Until a host that does not answer counts as absent.
_CONNECT_SECONDS = 5


def check_checkpoint(name: str) -> None:
    """Raise UserError for the name of a checkpoint that there cannot be, and for a file that holds no model."""
    check_name(name)
    run_directory.check_model_file(name)


def check_data_service(options: TrainingOptions) -> None:
    """Raise UserError unless something listens at `--data-service`."""
    if options.service_place is not None:
        with explained(
            lambda reason: (
                f"No data service answers at {options.data_service} ({reason}); start its dispatcher there, "
                "or leave --data-service out."
            ),
            OSError,
            UnicodeError,
        ):
            socket.create_connection(options.service_place, _CONNECT_SECONDS).close()


def index_folder(index: str) -> pathlib.Path:
    """Return the path of a folder of features. Raises UserError unless it is there."""
    folder = existing_folder(index, "make it by keras-vit embed, whose --output is this folder")
    if not (folder / DESCRIPTION).is_file():
        raise UserError(
            f"There are no features in {index!r}; make them by keras-vit embed, whose --output is this folder."
        )
    return folder


def check_shards(output: str) -> None:
    """Raise UserError for a folder with files of something else, such as pictures: they would be mixed."""
    if is_remote(output) or not (folder := run_directory.output_folder(output)).is_dir():
        return
    ours = (RECORD_INDEX, run_directory.LABELS, PIPELINE, PROBLEMS)
    for entry in sorted(folder.iterdir()):
        is_ours = entry.suffix == ".tfrecord" or entry.name in ours
        if not (is_ours or is_temporary(entry) or is_hidden(entry.name)):
            raise UserError(
                f"{folder} should be new or empty, but holds {entry.name}; give --output a folder of its own."
            )
