"""`keras-vit predict` as a pipeline: Parquet files with the same rows as on one machine."""

import concurrent.futures
import functools
from collections.abc import Iterator

import apache_beam

from keras_vit import UserError
from keras_vit.files.atomic import atomic_write, remove_temporary
from keras_vit.files.lock import locked
from keras_vit.files.remote import RemotePath, output_folder, to_path
from keras_vit.images.files import decode
from keras_vit.run import Run
from keras_vit.text.classes import Classes
from training.beam.picture_list import Group, PictureList, paths_of
from training.beam.pipeline import (
    GroupHandler,
    counted,
    infer,
    open_output,
    print_counts,
    write_problems,
)
from training.features.extractors import fingerprint_of
from training.features.store import part_file
from training.options.pipeline import PipelineOptions
from training.options.predict import PredictOptions
from training.prediction.classifier import (
    BATCH,
    Classifier,
    Picture,
    Prediction,
    as_utf8,
    classified,
    open_classifier,
    read_picture,
    write_parquet,
)

# Objects of a bucket that are read at the same time, for each read mostly waits.
_READS = 64


def predict(run: Run, pictures: PictureList, options: PredictOptions, pipeline: PipelineOptions) -> None:
    """Classify all pictures, or those that are missing in the folder `--output`.

    Raises UserError for a folder with the results of another model or of other pictures.
    """
    assert options.output is not None
    output = options.output
    folder, summary = output_folder(output), pictures.summary()
    classifier = open_classifier(run, options.labels, threshold=options.threshold)
    settings = {
        "model": fingerprint_of(run.model, run.preprocessing, "pre_logits"),
        "labels": list(classifier.labels),
        "temperature": classifier.scoring.temperature,
        "threshold": options.threshold,
        "pictures": sum(summary.counts.values()),
        "checksum": summary.checksum,
    }
    handler = GroupHandler(functools.partial(_load, options, run.texts), _predictions)

    with locked(folder):
        remove_temporary(folder)
        open_output(folder, settings)
        counts = infer(pipeline, (pictures, summary), folder, handler, _Write(output))
    print_counts(f"{output} has the classes of", folder, sum(summary.counts.values()), counts)


def _load(options: PredictOptions, texts: Classes | None) -> Classifier:
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads, texts=texts)
    return open_classifier(run, options.labels, threshold=options.threshold)


def _predictions(group: Group, classifier: Classifier) -> tuple[str, int, list[Prediction]]:
    found: list[Prediction] = []
    paths = [to_path(path) for path in paths_of(group.rows)]
    with concurrent.futures.ThreadPoolExecutor(_READS) as pool:
        for begin in range(0, len(paths), _READS):
            files = paths[begin : begin + _READS]
            contents = {file: pool.submit(file.read_bytes) for file in files if isinstance(file, RemotePath)}
            for first in range(0, len(files), BATCH):
                batch = [_read(file, contents, classifier) for file in files[first : first + BATCH]]
                found += classified(classifier, batch)[0]
    return group.split, group.number, found


def _read(file, contents: dict, classifier: Classifier) -> Picture:
    """The picture of a file, whose content is being read if it is in a bucket."""
    preprocessing = classifier.run.preprocessing
    if file not in contents:
        return file, *read_picture(file, preprocessing)
    try:
        return file, decode(contents[file].result(), file.name, preprocessing=preprocessing), None
    except (UserError, OSError) as error:
        return file, None, as_utf8(str(error))


class _Write(apache_beam.DoFn):
    """Writes the file of a group under a temporary name and renames it; a second time, it gives the same bytes."""

    def __init__(self, output: str):
        self._output = output

    def process(self, element: tuple[str, int, list[Prediction]]) -> Iterator[None]:
        split, number, predictions = element
        file = part_file(to_path(self._output), split, number)
        write_problems(file.parent, file.stem, {each.file: each.problem for each in predictions if each.problem})
        with atomic_write(file) as temporary:
            write_parquet(temporary, predictions)
        counted("written", len(predictions))
        yield from ()
