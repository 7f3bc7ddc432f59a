"""Open the model, and name the images, that the options of `keras-vit inspect` give. Imports no Keras."""

from keras_vit import run_directory, runs
from keras_vit.errors import UserError
from keras_vit.files.remote import to_path
from keras_vit.inspection.options import InspectionOptions
from keras_vit.runs import Run

# How the name of a data set begins, as `--data` of the training commands takes it.
DATA_SETS = ("digits", "tfds:", "folder:", "csv:", "tfrecord:", "tar:")


def open_run(options: InspectionOptions) -> Run:
    """Open the model to inspect. Raises UserError for what is none."""
    size, heads, groups = options.image_size, options.num_heads, options.num_groups
    return runs.open_run(options.run, image_size=size, num_heads=heads, num_groups=groups)


def image_source(options: InspectionOptions, run: Run) -> str:
    """Return --images, or the samples of the run directory without it. Raises UserError unless it is there."""
    if options.images:
        check_images(options.images)
        return options.images
    if (samples := run.file(run_directory.SAMPLES)) is None:
        raise UserError(
            f"{run.name} has no images of its own; give --images, an image, a folder of images, or a data set."
        )
    return str(samples)


def check_images(source: str) -> None:
    """Raise UserError unless `source` is an image, a folder of images, a samples.npz or the name of a data set."""
    if not to_path(source).exists() and not source.startswith(DATA_SETS):
        raise UserError(
            f"There is no image or folder {source!r}; --images takes one of these, a run's samples.npz, digits, "
            "tfds:NAME, folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB."
        )
