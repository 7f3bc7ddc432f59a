"""Open and check what options name before TensorFlow is imported, which takes seconds."""

import dataclasses
import importlib.util
import os
import pathlib
import socket
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.checkpoints.find import check_name
from keras_vit.cli.parser import Given
from keras_vit.errors import explained, refuse_without_effect
from keras_vit.files.atomic import check_unlocked
from keras_vit.files.labels import check_classes
from keras_vit.files.remote import existing_file, is_remote, output_folder, to_path
from keras_vit.run import CONFIG, Run, check_no_run
from keras_vit.text.classes import classes_of_options
from training.data.checks import check_data, listed_classes
from training.data.known_images import check_split
from training.loop.devices.backend import may_be_slice
from training.options.common import DataOptions, PipelineOptions, Runner, TrainingOptions
from training.options.evaluate import EvaluateOptions
from training.options.features import FeatureOptions, ProbeOptions

_CONNECT_SECONDS = 5  # until a host that does not answer counts as absent


def check_data_service(options: TrainingOptions) -> None:
    """Raise UserError unless something listens at `--data-service`."""
    if options.data_service is None:
        return
    protocol, _, place = options.data_service.partition("://")
    host, _, port = place.rpartition(":")
    with explained(
        lambda reason: (
            f"No data service answers at {options.data_service} ({reason}); start its dispatcher, give its address, "
            "such as grpc://host:5050, or leave --data-service out."
        ),
        *(OSError, OverflowError, ValueError),
    ):
        if protocol != "grpc":
            raise OSError("no address of gRPC")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def check_outside(workdir: str, data: str) -> None:
    """Raise UserError for a run directory in the folder of the images, where it would be taken for one of a class."""
    kind, _, folder = data.partition(":")
    inner, outer = (to_path(path) if is_remote(path) else pathlib.Path(path).resolve() for path in (workdir, folder))
    if kind == "folder" and inner.is_relative_to(outer):
        raise UserError(
            f"--workdir must not lie in the folder of the data, but {workdir} is in {folder}; give one outside of it, "
            "such as runs/mine."
        )


def check_new_workdir(workdir: str) -> None:
    """Raise UserError for the directory of a finished run, and if something exists that is no run directory."""
    run = Run.at(workdir)
    run.check_free()
    if run.is_finished:
        raise UserError(f"{workdir} holds a finished run; choose another --workdir, or delete {workdir}.")


def check_workdir(options: TrainingOptions, command: str, recipe_name: str, *, is_final: bool) -> None:
    """Raise UserError if a workdir holds something else, or a run with other settings, is locked, or lies in the data.

    is_final: whether the recipe of the options is that of the run, and does not depend on the data.
    """
    check_outside(options.workdir, options.source.data)
    if is_remote(options.workdir):
        return  # the rest is checked where TensorFlow reads it
    run = Run.at(options.workdir)
    run.check_free()
    try:
        saved = run.config["settings"]
        now = options.settings(command, recipe_name) | {"images": saved["images"]}
        if not is_final:
            now["recipe"] = saved["recipe"]
        elif saved["recipe"]["loss"] == "multi-label":  # which images of several classes each choose
            now["recipe"]["loss"] = "multi-label"
    except (ValueError, KeyError, TypeError):
        pass  # there is none, or it is reported later
    else:
        run.check_settings(now)
    hosts_of_slice = os.environ.get("KERAS_BACKEND") == "jax" and may_be_slice()
    if not (run.is_finished or options.devices.may_be_one_of_several() or hosts_of_slice):
        check_unlocked(run.path)


def open_backbone(options: FeatureOptions) -> Run:
    """Open the model whose features are measured. Raises UserError for it, its data, and an unusable output."""
    check_data(options.source)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    workdir = options.workdir if isinstance(options, ProbeOptions) else None
    if workdir is not None:
        check_outside(workdir, options.source.data)
        check_new_workdir(workdir)
    if workdir is None or options.output is not None:
        report_directory(run, options.output)
    check_split(run, options.source)
    return run


def check_measured(run: Run, source: DataOptions, output: str | None) -> None:
    """Raise UserError unless a model can be measured on data that it does not know, and the report written."""
    check_data(source)
    report_directory(run, output)
    check_split(run, source)
    if run.labels and (classes := listed_classes(source)) is not None:
        check_classes(sorted(run.labels), sorted(classes))  # in whatever order


def report_directory(run: Run, output: str | None) -> pathlib.Path:
    """Return the directory of a report: `--output`, or that of the run; creates nothing.

    Raises UserError if there is neither, if it cannot be written, and for the directory of another run.
    """
    own = run.directory if run.file(CONFIG) else None
    if output is None and own is None:
        raise UserError(f"{run.name!r} is not a run directory to put the report into; give --output a directory.")
    directory = output_folder(output or own or "")
    if not (own and directory.is_dir() and directory.samefile(own)):
        check_no_run(directory)
    return directory


def with_data(given: Given) -> Given:
    """Return the options that were given; without --data, also the data options of the run, which are printed.

    Raises UserError where the run does not know its data, or where these are gone.
    """
    name = given.get(("run",))
    if name is None or ("source", "data") in given:
        return given
    run = Run.open(name)
    known = run.settings.get("source") if run.file(CONFIG) else None
    if not isinstance(known, dict) or "data" not in known:
        check_name(name)
        raise UserError(f"{name} does not say what it was trained on; give --data, such as --data folder:pictures.")
    print(f"Data: {known['data']}, on which {name} was trained; evaluated on its evaluation images.")
    fields = dataclasses.asdict(DataOptions.of_settings(known))
    return {**{("source", field): value for field, value in fields.items()}, **given}


def open_measured(options: EvaluateOptions) -> Run:
    """Open the model to measure. Raises UserError for what is no model, and where it cannot be calibrated."""
    texts = classes_of_options(options.classes, options.templates) if options.classes else None
    size, heads = options.input.image_size, options.input.num_heads
    run = Run.open(options.run, image_size=size, num_heads=heads, texts=texts)
    fitted = ("calibrate", "max_error", "coverage")
    if options.calibrate or options.max_error or options.coverage:
        refuse_without_effect(options, [(fitted, run.file(CONFIG) is not None, "a run directory")])
        changed = ("image_size", "resize", "crop_from", "value_range")
        owner = "evaluations without --calibrate, --max-error or --coverage"
        refuse_without_effect(options.input, [(changed, False, owner)])
    return run


def next_commands(options: EvaluateOptions, run: Run) -> list[tuple[str, ...]]:
    """Return commands to go on with after the evaluation of a run or checkpoint."""
    if run.file(CONFIG) and options.classes is None:
        return run.next_commands("evaluate")
    head = () if options.classes is None else ("--zero-shot-head",)
    start = ("finetune", "--checkpoint", options.run, *head)
    return [(*start, *options.source.arguments(), "--workdir", "runs/finetuned")]


def pipeline_options(
    runner: Runner | None, arguments: tuple[str, ...], run: str | None, paths: Sequence[str | None], data: str = ""
) -> PipelineOptions | None:
    """Return how a command runs as a pipeline, with Beam's arguments; None without --runner.

    Args:
        run: `--run`, which may also be a name that each worker downloads.
        paths: what the workers read and write: images, labels and the output; of these None is left out.
        data: `--data` of the command; "" without it.

    Raises UserError for Beam's options without a runner, for data that a pipeline does not read, if Beam is not
    installed, and for paths that the workers of Dataflow cannot reach.
    """
    if runner is None:
        if arguments:
            raise UserError(f"Options behind -- are those of a pipeline, as {arguments[0]!r}; give --runner, too.")
        return None
    table = data.removeprefix("csv:") if data else None
    if table is not None and not is_remote(table):
        existing_file(table, "with --runner, --data takes csv:FILE with the columns path, label and split")
    if importlib.util.find_spec("apache_beam") is None:
        raise UserError(
            "--runner needs Apache Beam, which is not installed; install it in an environment of its own, by "
            "pip install '.[train,beam]' in a checkout."
        )
    local = [path for path in (table, *paths) if path is not None and not is_remote(path)]
    local += [run] if run is not None and not is_remote(run) and pathlib.Path(run).exists() else []
    if runner == "DataflowRunner" and local:
        raise UserError(
            f"The workers of Dataflow have no {local[0]!r}, which is on this machine; copy it into a bucket, and give "
            "that address."
        )
    return PipelineOptions(runner, arguments, table)
