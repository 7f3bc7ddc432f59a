"""`keras-vit embed` and `predict` as pipelines: the same features, byte for byte, and classes as on one machine."""

import concurrent.futures
import dataclasses
import functools

import numpy as np

from keras_vit import UserError
from keras_vit.files.atomic import atomic_write, locked, remove_temporary
from keras_vit.files.remote import RemotePath, output_folder, to_path
from keras_vit.images.files import decode
from keras_vit.run import Run
from keras_vit.text.classes import Classes
from training.beam.image_list import Group, ImageList
from training.beam.pipeline import GroupHandler, counted, infer, open_output, print_counts, write_problems
from training.data.file_contents import shown
from training.features.extraction import (
    Extractor,
    as_stored,
    describe_features,
    embed_rows,
    fingerprint_of,
    listing_of_files,
    start_folder,
)
from training.features.store import NO_SPLIT, FeatureDescription, Part, part_file, write_part
from training.options.common import PipelineOptions
from training.options.features import EmbedOptions
from training.options.predict import PredictOptions
from training.prediction.classifier import (
    BATCH,
    Classifier,
    Prediction,
    ReadFile,
    classified,
    open_classifier,
    try_to_read,
)
from training.prediction.results import write_parquet

_READS = 64  # objects of a bucket that are read at the same time, for each read mostly waits


def embed(run: Run, options: EmbedOptions, pipeline: PipelineOptions) -> str:
    """Write the features of all images into a folder, or what is missing there; return the path of the first one.

    Raises UserError for a folder with features of another model or of other images.
    """
    images, folder = ImageList(options.images, pipeline.table), options.folder
    summary = images.summary()
    description, _ = describe_features(run, options, summary.labels, summary.counts, summary.checksum)
    handler = GroupHandler(functools.partial(_load_extractor, options, description), _part)
    with locked(folder):
        remove_temporary(folder)
        start_folder(folder, description)
        write = functools.partial(_write_part, options.output, description)
        counts = infer(pipeline, (images, summary), folder, handler, write)
    features = f"{description.width} features ({description.features}, {description.dtype})"
    print_counts(f"{options.output} has {features} of", folder, sum(summary.counts.values()), counts)
    return summary.first


def _load_extractor(options: EmbedOptions, description: FeatureDescription) -> Extractor:
    """Return the model in a worker. Raises UserError if it is not the one that the pipeline was started with."""
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    _, extractor = describe_features(run, options, description.labels, description.splits, description.checksum)
    if extractor.fingerprint != description.fingerprint:
        raise UserError(f"The workers find another model at {options.run}; give one address that all of them read.")
    return extractor


def _part(group: Group, extractor: Extractor) -> tuple[str, int, Part]:
    listing = listing_of_files([row.path for row in group.rows])
    part = embed_rows(listing, NO_SPLIT, np.arange(len(group.rows)), extractor)
    label_of = {shown(row.path): row.label for row in group.rows}
    return group.split, group.number, dataclasses.replace(part, labels=[label_of[path] for path in part.paths])


def _write_part(output: str, description: FeatureDescription, element: tuple[str, int, Part]) -> None:
    split, number, part = element
    folder = to_path(output)
    write_problems(folder, part_file(folder, split, number).stem, part.problems)
    write_part(folder, description, split, number, as_stored(part, description))
    counted("written", len(part.paths))


def predict(run: Run, options: PredictOptions, pipeline: PipelineOptions) -> None:
    """Write the classes of all images as Parquet files into the folder `--output`, or what is missing there.

    Raises UserError for a folder with the results of another model or of other images.
    """
    assert options.output is not None
    folder, images = output_folder(options.output), ImageList(options.images)
    summary = images.summary()
    classifier = open_classifier(run, options.labels, threshold=options.threshold)
    total = sum(summary.counts.values())
    settings = {
        "model": fingerprint_of(run.model, run.preprocessing, "pre_logits"),
        "labels": list(classifier.labels),
        "temperature": classifier.scoring.temperature,
        "threshold": options.threshold,
        **({} if (promise := classifier.scoring.promise) is None else {"promise": dataclasses.asdict(promise)}),
        "pictures": total,
        "checksum": summary.checksum,
    }
    handler = GroupHandler(functools.partial(_load_classifier, options, run.texts), _predictions)
    with locked(folder):
        remove_temporary(folder)
        open_output(folder, settings)
        write = functools.partial(_write_predictions, options.output)
        counts = infer(pipeline, (images, summary), folder, handler, write)
    print_counts(f"{options.output} has the classes of", folder, total, counts)


def _load_classifier(options: PredictOptions, texts: Classes | None) -> Classifier:
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads, texts=texts)
    return open_classifier(run, options.labels, threshold=options.threshold)


def _predictions(group: Group, classifier: Classifier) -> tuple[str, int, list[Prediction]]:
    predictions: list[Prediction] = []
    paths = [to_path(row.path) for row in group.rows]
    with concurrent.futures.ThreadPoolExecutor(_READS) as pool:
        for begin in range(0, len(paths), _READS):
            files = paths[begin : begin + _READS]
            contents = {file: pool.submit(file.read_bytes) for file in files if isinstance(file, RemotePath)}
            for first in range(0, len(files), BATCH):
                batch = [_read(file, contents, classifier) for file in files[first : first + BATCH]]
                predictions += classified(classifier, batch)
    return group.split, group.number, predictions


def _read(file, contents: dict, classifier: Classifier) -> ReadFile:
    """Return the image of a file, whose content is being read if it is in a bucket."""
    preprocessing = classifier.run.preprocessing
    if file not in contents:
        return file, *try_to_read(file, preprocessing)
    try:
        return file, decode(contents[file].result(), file.name, preprocessing=preprocessing), None
    except (UserError, OSError) as error:
        return file, None, shown(str(error))


def _write_predictions(output: str, element: tuple[str, int, list[Prediction]]) -> None:
    split, number, predictions = element
    file = part_file(to_path(output), split, number)
    write_problems(file.parent, file.stem, {each.name: each.problem for each in predictions if each.problem})
    with atomic_write(file) as temporary:
        write_parquet(temporary, predictions)
    counted("written", len(predictions))
