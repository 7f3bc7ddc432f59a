"""The work of `keras-vit inspect`: compute, write the report, print a summary."""

from keras_vit.files.labels import read_labels
from keras_vit.inspection.compute import inspect
from keras_vit.inspection.html_report import summary
from keras_vit.inspection.images import read_images
from keras_vit.inspection.options import InspectionOptions
from keras_vit.inspection.report import write
from keras_vit.runs import Run


def run_inspection(run: Run, options: InspectionOptions) -> None:
    """Inspect the model of a run, write the report and print its summary.

    Raises UserError for options that do not fit the model.
    """
    labels = read_labels(options.labels) if options.labels else run.class_names
    result = inspect(
        run.model,
        read_images(options.image_source(run), options.count, labels, options.data_dir, run.preprocessing),
        checkpoint=run.name,
        labels=labels,
        figures=options.figures,
        shown=options.show,
        layers=options.layers,
        heads=options.heads,
        scoring=run.scoring(),
    )
    names = write(result, options.output)
    for sentence in summary(result):
        print(sentence)
    print(f"{len(names)} files in {options.output}; open {options.output / 'index.html'}.")
