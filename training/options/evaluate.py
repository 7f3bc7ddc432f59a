"""Options of `keras-vit evaluate`, `keras-vit verify-official` and `keras-vit soup`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from keras_vit import UserError, run_directory
from keras_vit.checkpoints.fetch.find import check_name
from keras_vit.cli.options import Aliases, Count, MayBeEmpty, MayLead, Positional
from keras_vit.cli.parser import Given
from keras_vit.errors import nearest, refuse_without_effect
from keras_vit.files.remote import is_remote, to_path
from keras_vit.published_accuracy import ACCURACY
from keras_vit.runs import Run, open_run
from keras_vit.text.classes import classes_of_labels, classes_of_options
from training.options.common import DataOptions, InputOptions, StrategyOptions


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Measure a model on the evaluation images of a data set; without --data, of that which a run was trained on."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, official name, SavedModel directory or .tflite
    file."""
    # Without --data, `with_data` takes the options of the run.
    source: DataOptions = dataclasses.field(default_factory=lambda: DataOptions(""))
    classes: Annotated[tuple[str, ...] | None, MayBeEmpty()] = None
    """Of a checkpoint with a text tower (CLIP, SigLIP): texts that are its classes, or a .txt file with one in each
    line; alone: the names of the data's classes, with spaces for underscores."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, whose embeddings are averaged; clip, siglip or a .txt file, as for
    keras-vit predict. Default: the texts as they are."""
    batch_size: Count = 256
    """Images per forward pass; does not change the metrics."""
    output: str | None = None
    """Directory of the report; default the run directory."""
    real_labels: str | None = None
    """JSON file with a list of accepted class indices for each image, as ImageNet's real.json; images with an empty
    list do not count for this accuracy."""
    save_predictions: bool = False
    """Also write predictions.npz: logits (n, K) and labels (n,)."""
    compare: str | None = None
    """Directory of an earlier report on the same images, such as another run: say whether the difference is within the
    noise."""
    calibrate: bool = False
    """Fit a temperature to the evaluation images and store it in the run: keras-vit predict and exports of the run then
    divide the logits by it, so that probabilities agree with frequencies."""
    input: InputOptions = dataclasses.field(default_factory=InputOptions)
    devices: StrategyOptions = dataclasses.field(default_factory=lambda: StrategyOptions("single"))

    def open_run(self) -> Run:
        """The model to measure. Raises UserError for what is no model, and where it cannot be calibrated."""
        refuse_without_effect(self, [(("templates",), self.classes is not None, "--classes")])
        texts = classes_of_options(self.classes, self.templates) if self.classes else None
        run = open_run(self.run, image_size=self.input.image_size, num_heads=self.input.num_heads, texts=texts)
        if self.calibrate and not run.file(run_directory.CONFIG):
            raise UserError(
                f"--calibrate stores the temperature in a run directory, but {run.name} is none; leave it out."
            )
        if self.calibrate:
            self.input.refuse(
                ("image_size", "resize", "crop_from", "value_range"), "--calibrate, which is for the run as it is used"
            )
        return run

    def next_commands(self, run: Run) -> list[tuple[str, ...]]:
        """Commands to go on with after the evaluation of a run or checkpoint."""
        if run.file(run_directory.CONFIG) and self.classes is None:
            return run.next_commands("evaluate")
        start = ("finetune", "--checkpoint", self.run, *(() if self.classes is None else ("--zero-shot-head",)))
        return [(*start, *self.source.arguments(), "--workdir", "runs/finetuned")]

    @property
    def takes_classes_of_data(self) -> bool:
        """Whether --classes stands alone: the names of the data's classes are the texts."""
        return self.classes == ()

    def with_classes(self, run: Run, labels: Sequence[str]) -> Run:
        """The run with these names as the texts of its classes."""
        return dataclasses.replace(run, texts=classes_of_labels(labels, self.templates))


def with_data(given: Given) -> Given:
    """The options that were given; without --data, also the data options of the run, which are printed.

    Raises UserError where the run does not know its data, or where these are gone.
    """
    name = given.get(("run",))
    if name is None or ("source", "data") in given:
        return given
    run = Run(name)
    known = run.settings.get("source") if run.file(run_directory.CONFIG) else None
    if not isinstance(known, dict) or run.data is None:
        check_name(name)
        raise UserError(f"{name} does not say what it was trained on; give --data, such as --data folder:pictures.")
    source = DataOptions(**known)
    if source.kind in ("folder", "csv") and not source.path.exists():
        raise UserError(
            f"{name} was trained on {source.data}, which is not there any more, seen from this folder; give --data "
            f"with its place now, such as --data {source.kind}:PATH."
        )
    print(f"Data: {source.data}, on which {name} was trained; evaluated on its evaluation images.")
    return {**{("source", field): value for field, value in known.items()}, **given}


@dataclasses.dataclass(frozen=True)
class VerifyOfficialOptions:
    """Compare the accuracy of a published checkpoint on ImageNet with the published one."""

    name: Annotated[str, Positional("NAME")]
    """Official name with a published accuracy, such as imagenet21k+imagenet2012/ViT-B_16-224."""
    source: DataOptions
    batch_size: Count = 256
    """Images per forward pass; does not change the result."""
    devices: StrategyOptions = dataclasses.field(default_factory=lambda: StrategyOptions("single"))

    def __post_init__(self) -> None:
        if self.name not in ACCURACY:
            close = nearest(self.name, ACCURACY)
            raise UserError(
                f"There is no published accuracy to compare {self.name!r} with; the nearest names that have one are "
                f"{close}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoupOptions:
    """Average the weights of runs."""

    runs: Annotated[tuple[str, ...], Positional("RUNS")]
    """Run directories of one architecture and the same classes, fine-tuned from one checkpoint."""
    output: str
    """Run directory of the average."""
    greedy: bool = False
    """Begin with the most accurate run, and keep of the others those that make the average no less accurate, on the
    evaluation images of the runs; train the runs with an --eval-split that is not the test images. Default: average
    all."""

    def __post_init__(self) -> None:
        folders = {to_path(run) if is_remote(run) else to_path(run).resolve() for run in self.runs}
        if len(folders) < max(len(self.runs), 2):
            raise UserError(f"A soup takes two different runs or more, but was given {', '.join(self.runs) or 'none'}.")
