"""`keras-vit embed` as a pipeline: the same files, byte for byte, as on one machine."""

import dataclasses
import functools
from collections.abc import Iterator

import apache_beam
import numpy as np

from keras_vit import UserError
from keras_vit.files.atomic import remove_temporary
from keras_vit.files.file_contents import shown
from keras_vit.files.lock import locked
from keras_vit.files.remote import to_path
from keras_vit.run import Run
from training.beam.picture_list import Group, PictureList, paths_of
from training.beam.pipeline import GroupHandler, counted, infer, print_counts, write_problems
from training.features.embed import Extractor, as_stored, describe_features, embed_rows, listing_of_files, start_folder
from training.features.store import NO_SPLIT, FeatureDescription, Part, part_file, write_part
from training.options.features import EmbedOptions
from training.options.pipeline import PipelineOptions


def embed(run: Run, pictures: PictureList, options: EmbedOptions, pipeline: PipelineOptions) -> str:
    """Write the features of all pictures into a folder, or what is missing there; return the path of the first one.

    Raises UserError for a folder with features of another model or of other pictures.
    """
    summary, folder = pictures.summary(), options.folder
    description, _ = describe_features(run, options, summary.labels, summary.counts, summary.checksum)
    handler = GroupHandler(functools.partial(_load, options, description), _part)

    with locked(folder):
        remove_temporary(folder)
        start_folder(folder, description)
        counts = infer(pipeline, (pictures, summary), folder, handler, _Write(options.output, description))
    features = f"{description.width} features ({description.features}, {description.dtype})"
    print_counts(f"{options.output} has {features} of", folder, sum(summary.counts.values()), counts)
    return summary.first


def _load(options: EmbedOptions, description: FeatureDescription) -> Extractor:
    """The model in a worker. Raises UserError if it is not the one that the pipeline was started with."""
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    found, extractor = describe_features(run, options, description.labels, description.splits, description.checksum)
    if found.fingerprint != description.fingerprint:
        raise UserError(f"The workers find another model at {options.run}; give one address that all of them read.")
    return extractor


def _part(group: Group, extractor: Extractor) -> tuple[str, int, Part]:
    files = paths_of(group.rows)
    part = embed_rows(listing_of_files(files), NO_SPLIT, np.arange(len(files)), extractor)
    label_of = {shown(row.path): row.label for row in group.rows}
    return group.split, group.number, dataclasses.replace(part, labels=[label_of[path] for path in part.paths])


class _Write(apache_beam.DoFn):
    """Writes the file of a part under a temporary name and renames it; a second time, it gives the same bytes."""

    def __init__(self, output: str, description: FeatureDescription):
        self._output, self._description = output, description

    def process(self, element: tuple[str, int, Part]) -> Iterator[None]:
        split, number, part = element
        folder, stored = to_path(self._output), as_stored(part, self._description)
        write_problems(folder, part_file(folder, split, number).stem, part.problems)
        write_part(folder, self._description, split, number, stored)
        counted("written", len(part.paths))
        yield from ()
