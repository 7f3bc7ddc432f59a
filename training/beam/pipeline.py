"""Shared by the pipelines: their start, the groups of images, files that are there already, and the model."""

import collections
import functools
import json
import logging
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam
from apache_beam.metrics import Metrics, MetricsFilter
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions as BeamOptions
from apache_beam.runners.runner import PipelineState

from keras_vit import UserError
from keras_vit.files.atomic import write_text
from training.beam.image_list import Group, ImageList, Summary
from training.data.dataset import check_some_read
from training.features.store import PART, part_file
from training.loop.devices.strategies import CONTINUE_LATER
from training.options.common import PIPELINE, PROBLEMS, PipelineOptions

_NAMESPACE = "keras_vit"
_one_at_a_time = threading.Lock()  # one call of a model at a time in each process: it uses all cores itself


def counted(name: str, number: int) -> None:
    """Add to a number that `run_pipeline` returns."""
    Metrics.counter(_NAMESPACE, name).inc(number)


def _list_groups(images: ImageList, summary: Summary, _: None) -> Iterator[Group]:
    """Read a list of images in one worker, and hand them on in groups."""
    yield from images.groups(summary.splits, PART)


def _is_missing(folder: pathlib.Path, group: Group) -> bool:
    """Whether no earlier pipeline has written the file of a group."""
    is_there = part_file(folder, group.split, group.number).is_file()
    counted("kept", len(group.rows) * is_there)
    return not is_there


class GroupHandler(ModelHandler):
    """Runs a model of ours on groups of images: for `RunInference`, which loads it once for each process.

    A group is read, decoded and batched as on one machine, by the same code and in the same batches. So the numbers are
    the same to the last bit, on processors of one kind.
    """

    def __init__(self, load: Callable[[], Any], compute: Callable[[Group, Any], Any]):
        """`load` returns what `compute` takes beside a group; both are pickled."""
        super().__init__(min_batch_size=1, max_batch_size=1)
        self._load, self._compute = load, compute

    def load_model(self) -> Any:
        return self._load()

    def run_inference(self, batch: Sequence[Group], model: Any, inference_args: dict | None = None) -> Iterator[Any]:
        with _one_at_a_time:
            results = [self._compute(group, model) for group in batch]
        yield from results

    def get_num_bytes(self, batch: Sequence[Group]) -> int:
        return sum(len(row.path) for group in batch for row in group.rows)


def infer(
    pipeline: PipelineOptions,
    images: tuple[ImageList, Summary],
    folder: pathlib.Path,
    handler: GroupHandler,
    write: Callable[[Any], None],
) -> collections.Counter[str]:
    """Run a model on the groups of a list whose files are not in the folder yet; see `run_pipeline`.

    write: writes a result under a temporary name and renames it; a second time, it gives the same bytes.
    """

    def build(root: apache_beam.Pipeline) -> None:
        (
            root
            | apache_beam.Create([None])
            | "List" >> apache_beam.FlatMap(functools.partial(_list_groups, *images))
            | apache_beam.Reshuffle()
            | "Missing" >> apache_beam.Filter(functools.partial(_is_missing, folder))
            | RunInference(handler)
            | "Write" >> apache_beam.Map(write)
        )

    return run_pipeline(pipeline, build)


def print_counts(result: str, folder: pathlib.Path, total: int, counts: Mapping[str, int]) -> None:
    """Print what `infer` has written of all images. Raises UserError if none can be read."""
    check_some_read(total - counts["problems"])
    problems = f"; {counts['problems']:,} cannot be read, see {folder / PROBLEMS}" if counts["problems"] else ""
    print(f"{result} {total:,} images, {counts['kept']:,} of them from an earlier pipeline{problems}.")


def write_problems(folder: pathlib.Path, name: str, problems: Mapping[str, str]) -> None:
    """Write the images that cannot be read as JSON, one in each line; call it before the file without them is there.

    So a pipeline that is started again, and leaves out what is there, leaves out none of these.
    """
    counted("problems", len(problems))
    if problems:
        (folder / PROBLEMS).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"picture": path, "problem": why}) for path, why in problems.items()]
        write_text(folder / PROBLEMS / f"{name}.jsonl", "\n".join(lines) + "\n")


def open_output(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Write what a folder is filled with. Raises UserError for one with files of something else."""
    file, text = folder / PIPELINE, json.dumps(settings, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        known = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name in settings if settings[name] != known.get(name)]
        raise UserError(
            f"{folder} is of another pipeline, which differs in {', '.join(changed)}; give another --output."
        )
    write_text(file, text)


def run_pipeline(options: PipelineOptions, build: Callable[[apache_beam.Pipeline], Any]) -> collections.Counter[str]:
    """Run a pipeline to its end, and return what `counted` has added up.

    Raises UserError for a pipeline that failed because of one. Options that Beam refuses end the process, as argparse
    does.
    """
    logging.getLogger().setLevel(logging.ERROR)  # Beam warns of what is usual, and partly without a name
    others = {}
    if options.runner == "DirectRunner":
        # Else Beam downloads a program for its DirectRunner, Prism. Of the current version, this changes nothing else.
        others = {"update_compatibility_version": apache_beam.__version__}
        threading.excepthook = _end_with_a_worker
    pipeline = apache_beam.Pipeline(options=BeamOptions([*options.arguments], runner=options.runner, **others))
    build(pipeline)
    try:
        result = pipeline.run()
        state = result.wait_until_finish()
    except RuntimeError as error:
        # The error of a worker arrives as text.
        if sentence := re.search(r"keras_vit\.errors\.UserError: (.+?)(?: \[while running|\n)", str(error)):
            raise UserError(sentence[1]) from error
        raise
    if state not in (None, PipelineState.DONE):
        raise UserError(f"The pipeline ended as {state}; see its log, and give the same command again.")
    counters = result.metrics().query(MetricsFilter().with_namespace(_NAMESPACE))["counters"]
    return collections.Counter({counter.key.metric.name: counter.result for counter in counters})


def _end_with_a_worker(thread: threading.ExceptHookArgs) -> None:
    """End this process, for Beam's DirectRunner waits for ever for a worker process that was killed."""
    if "Worker subprocess exited" not in str(thread.exc_value):
        threading.__excepthook__(thread)
        return
    print(
        f"A worker process has ended ({thread.exc_value}), perhaps for want of memory; give the same command again, "
        "which makes what is missing.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(CONTINUE_LATER)  # a worker that is left may finish its share, whose files are the same
