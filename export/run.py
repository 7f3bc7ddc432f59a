"""Open the model to export, and check the place to export to. Imports no TensorFlow."""

import pathlib

from export.options import FastestOptions, OnnxOptions, SavedModelOptions, SourceOptions, TFLiteOptions
from keras_vit import cli
from keras_vit.files.remote import output_folder
from keras_vit.run import Run, check_no_run


def open_run(source: SourceOptions) -> Run:
    """Open the model to export. Raises UserError for what is none, such as an export."""
    size, heads, groups = source.image_size, source.num_heads, source.num_groups
    run = Run.open(source.run, image_size=size, num_heads=heads, num_groups=groups)
    run.refuse_export()
    if source.labels is not None:
        run.check_label_file(source.labels)
    return run


def export_folder(output: str) -> pathlib.Path:
    """The path of --output. Raises UserError for a place where nothing can be written, and for a run directory."""
    folder = output_folder(output)
    check_no_run(folder)
    return folder


def open_for_export(options: SavedModelOptions | TFLiteOptions | OnnxOptions | FastestOptions) -> Run:
    """Open the model of a command, and check what can be checked before TensorFlow is loaded. Raises UserError."""
    run = open_run(options.source)
    export_folder(options.output)
    cli.require_tensorflow()
    return run
