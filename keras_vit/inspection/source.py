"""Open the model, and name the images, that the options of `keras-vit inspect` give. Imports no Keras."""

from keras_vit import run_directory, runs
from keras_vit.errors import UserError
from keras_vit.files.remote import to_path
from keras_vit.inspection.options import InspectionOptions
from keras_vit.runs import Run

# How the name of a data set begins, as `--data` of the training commands takes it.
DATA_SETS = ("digits", "tfds:", "folder:", "csv:", "tfrecord:", "tar:")


def open_run(options: InspectionOptions) -> Run:
    """Open the model to inspect. Raises UserError unless one of --run and --checkpoint names it."""
    name = options.run or options.checkpoint
    if name is None or (options.run is not None and options.checkpoint is not None):
        raise UserError("Give either --run DIR or --checkpoint FILE, the model to inspect, and images behind --images.")
    if options.run is not None and not name.endswith(".keras"):
        run_directory.find(name, run_directory.MODEL)
    size, heads, groups = options.image_size, options.num_heads, options.num_groups
    return runs.open_run(name, image_size=size, num_heads=heads, num_groups=groups)


def image_source(options: InspectionOptions, run: Run) -> str:
    """Return --images, or the samples of the run directory without it. Raises UserError unless it is there."""
    if options.images:
        check_images(options.images)
        return options.images
    if options.run is None or options.run.endswith(".keras"):
        raise UserError(
            "--images is needed with a checkpoint or .keras file: give an image, a folder of images, or a data set."
        )
    return str(run_directory.find(run.place, run_directory.SAMPLES))


def check_images(source: str) -> None:
    """Raise UserError unless `source` is an image, a folder of images, a samples.npz or the name of a data set."""
    if not to_path(source).exists() and not source.startswith(DATA_SETS):
        raise UserError(
            f"There is no image or folder {source!r}; --images takes one of these, a run's samples.npz, digits, "
            "tfds:NAME, folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB."
        )
