"""`keras-vit shard` as a pipeline: the same files, byte for byte, as on one machine from a table in its order."""

import concurrent.futures
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator

import apache_beam
import numpy as np
import tensorflow as tf

from keras_vit.cli.start import native_stderr_silenced
from keras_vit.files.atomic import atomic_write, locked, remove_temporary, write_text
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.remote import output_folder, to_path
from keras_vit.images.decode import error_reason
from training.beam.image_list import ImageList, Summary
from training.beam.pipeline import counted, open_output, run_pipeline, write_problems
from training.data.dataset import decoding_problem
from training.data.tfrecord import scan, shard_name, write_index
from training.data.write import check_shards, print_written, record
from training.options.common import PROBLEMS, PipelineOptions, ShardOptions

_READS = 64  # images that are read at the same time, for each read from a bucket mostly waits
# (split, number of the file), and (number in the split, path, label) of an image.
Shard = tuple[str, int]
Item = tuple[int, str, int]


def shard(options: ShardOptions, pipeline: PipelineOptions) -> None:
    """Write train-*, eval-*, labels.txt and the index of the records, or what of it is missing.

    An image that cannot be decoded is left out. Raises UserError for a folder with other TFRecord files.
    """
    directory, images = output_folder(options.output), ImageList(table=pipeline.table, evaluation="eval")
    summary, shards = images.summary(), options.shards
    settings = {"counts": summary.counts, "checksum": summary.checksum, "labels": [*summary.labels], "shards": shards}
    check_shards(summary.counts, shards)

    def build(root: apache_beam.Pipeline) -> None:
        (
            root
            | apache_beam.Create([None])
            | "List" >> apache_beam.FlatMap(functools.partial(_list, images, summary, shards))
            | apache_beam.GroupByKey()
            | "Write" >> apache_beam.Map(functools.partial(_write, options.output, shards))
            | apache_beam.combiners.ToList()
            | "Index" >> apache_beam.Map(functools.partial(_write_index, options.output))
        )

    with locked(directory):
        remove_temporary(directory)
        open_output(directory, settings)
        write_text(directory / LABELS, labels_text(summary.labels))
        counts = run_pipeline(pipeline, build)
    if counts["problems"]:
        print(f"{counts['problems']:,} images cannot be read and are left out, see {directory / PROBLEMS}.")
    print_written(directory, summary.counts["train"], summary.counts["eval"], len(summary.labels), shards)


def _list(images: ImageList, summary: Summary, shards: int, _: None) -> Iterator[tuple[Shard, Item]]:
    """Read the table in one worker: image i of a split goes to file i mod N."""
    number_of = {name: number for number, name in enumerate(summary.labels)}
    numbers = {split: itertools.count() for split in summary.splits.values()}
    for row in images.rows():
        if (split := summary.splits.get(row.split)) is not None:
            number = next(numbers[split])
            yield (split, number % shards), (number, row.path, number_of[row.label or ""])


def _write(output: str, shards: int, element: tuple[Shard, Iterable[Item]]) -> tuple[str, np.ndarray]:
    """Write a file, the second time the same bytes; return its name and the length of each record."""
    (split, number), items = element
    file = to_path(output) / shard_name(split, number, shards)
    if not file.is_file():
        _write_records(file, sorted(items))
    return file.name, scan(str(file))


def _write_records(file: pathlib.Path, items: list[Item]) -> None:
    problems: dict[str, str] = {}
    with (
        atomic_write(file) as temporary,
        tf.io.TFRecordWriter(str(temporary)) as writer,
        concurrent.futures.ThreadPoolExecutor(_READS) as pool,
        native_stderr_silenced(),
    ):
        for begin in range(0, len(items), _READS):
            some = items[begin : begin + _READS]
            for (_, path, label), (content, problem) in zip(some, pool.map(_read, some), strict=True):
                if problem is None:
                    writer.write(record(content, label))
                else:
                    problems[path] = problem
        write_problems(file.parent, file.stem, problems)
    counted("written", len(items) - len(problems))


def _read(item: Item) -> tuple[bytes, str | None]:
    """Return the content of an image, and why it cannot be decoded."""
    try:
        data = tf.io.read_file(os.fsencode(item[1]))
        return data.numpy(), decoding_problem(data)
    except tf.errors.OpError as error:
        return b"", error_reason(error)


def _write_index(output: str, lengths: list[tuple[str, np.ndarray]]) -> None:
    """Write the index in the order of one machine: the files to train on come first."""
    write_index(output, dict(sorted(lengths, key=lambda file: (not file[0].startswith("train"), file[0]))))
