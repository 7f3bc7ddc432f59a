"""The work of `keras-vit inspect`: compute, write the report, print a summary."""

from collections.abc import Sequence

import numpy as np

from keras_vit.files.labels import read_labels
from keras_vit.inspection.compute import inspect, logits_of, model_inputs
from keras_vit.inspection.images import Image, read_images
from keras_vit.inspection.options import InspectionOptions
from keras_vit.inspection.relevance import classifies
from keras_vit.inspection.report import is_mistake, sentences, write
from keras_vit.inspection.source import image_source
from keras_vit.models.build import logits_model
from keras_vit.runs import Run

# Images of one forward pass.
_BATCH = 32


def run_inspection(run: Run, options: InspectionOptions) -> None:
    """Inspect the model of a run, write the report and print its summary.

    Raises UserError for options that do not fit the model.
    """
    labels = read_labels(options.labels) if options.labels else run.class_names
    images = read_images(image_source(options, run), options.count, labels, options.data_dir, run.preprocessing)
    result = inspect(
        run.model,
        images if run.is_multi_label else _mistakes_first(run, images, labels, options.show // 2),
        checkpoint=run.name,
        labels=labels,
        figures=options.figures,
        shown=options.show,
        layers=options.layers,
        heads=options.heads,
        scoring=run.scoring(),
    )
    names = write(result, options.output)
    for sentence in sentences(result):
        print(sentence)
    print(f"{len(names)} files in {options.output}; open {options.output / 'index.html'}.")


def _mistakes_first(run: Run, images: Sequence[Image], labels: Sequence[str], count: int) -> list[Image]:
    """The images, with up to `count` that the model takes for another class at the start, the surest mistakes first."""
    model = logits_model(run.model)
    if not classifies(model) or all(image.label is None for image in images):
        return list(images)
    inputs = model_inputs(images, run.preprocessing)[1]
    logits = np.concatenate([logits_of(model, inputs[n : n + _BATCH]) for n in range(0, len(images), _BATCH)])
    ranked = run.scoring().rank(logits, labels)
    wrong = [n for n, image in enumerate(images) if is_mistake(image.label, ranked[n])]
    wrong = sorted(wrong, key=lambda n: -ranked[n].likeliest[0][1])[:count]
    return [images[n] for n in wrong] + [image for n, image in enumerate(images) if n not in wrong]
