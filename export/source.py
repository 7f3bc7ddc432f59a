"""The model to export, from a run or a checkpoint, with its labels, its sample images, and its origin."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from export.options import CALIBRATED, EIGHT_BIT_WEIGHTS, SourceOptions, TFLiteOptions
from keras_vit import Preprocessing, UserError, classes_of, preprocessing_of
from keras_vit.checkpoints.describe import license_of
from keras_vit.errors import Rules, explained, refuse_first
from keras_vit.files.labels import LABELS, check_number, read_labels
from keras_vit.files.remote import existing_file, existing_folder
from keras_vit.files.tables import short_name
from keras_vit.images.files import SAMPLES, Samples
from keras_vit.images.formats import format_list, image_files
from keras_vit.models.build import classifier_head, classifies, has_own_call, logits_model
from keras_vit.models.layers import ModelSpec
from keras_vit.promise import Promise
from keras_vit.run import CALIBRATION, MONITOR, Run, check_head
from keras_vit.scores import Scoring, UnknownScorer

_MOST_CALIBRATION_IMAGES = 256
# Number of random images, and their sizes relative to the input of the model.
_NUM_RANDOM, _RANDOM_SCALES = 16, (1.0, 1.5, 0.7)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Origin of a model, for its model card and its reports."""

    name: str = "a model in memory"
    """Run directory or checkpoint."""
    images: str = "sample images"
    """Description of the sample images."""
    config: dict = dataclasses.field(default_factory=dict)
    """Content of config.json of the run."""
    metrics: dict = dataclasses.field(default_factory=dict)
    """Last line of metrics.jsonl of the run."""
    weights: str = "unknown"
    """Where the weights come from: a checkpoint, or training from scratch."""
    license: str | None = None
    """License of the weights; None if nothing states it."""

    temperature: float = 1.0
    """Divides the logits before the softmax, if the run is calibrated."""
    multi_label: bool = False
    """Whether an image may have several classes: the probabilities are the sigmoid of the logits."""
    promise: Promise | None = None
    """The promise of the run for its answers."""
    monitor: bytes | None = None
    """The summary of its evaluation images, for `keras-vit monitor`."""

    @property
    def license_text(self) -> str:
        return self.license or "not specified; add the license of the weights and of the data"

    def scoring(self, threshold: float | None = None) -> Scoring:
        """How the logits become probabilities and decisions."""
        return Scoring(self.temperature, threshold, self.multi_label, self.promise)

    def as_json(self) -> dict[str, Any]:
        """The fields of report.json."""
        return {
            "model": self.name,
            "weights": self.weights,
            "license": self.license,
            "temperature": self.temperature,
            "multi_label": self.multi_label,
            **({} if self.promise is None else {"promise": dataclasses.asdict(self.promise)}),
        }


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A model with its labels, sample images and origin, as all exports take it."""

    model: keras.Model
    labels: tuple[str, ...]
    samples: Samples
    """Images to verify the export on; the label is -1 if the class is unknown."""
    origin: Provenance = dataclasses.field(default_factory=Provenance)
    unknown: UnknownScorer | None = None
    """The score of images of none of the classes; exports have it as one more output."""

    @property
    def preprocessing(self) -> Preprocessing:
        return preprocessing_of(self.model)

    def with_logits(self) -> "ExportedModel":
        """Return it with logits as the model's output. Raises UserError unless it is a classifier of these labels."""
        refuse_first(_rules_of_a_classifier(self.model))
        model = logits_model(self.model)
        if not (isinstance(model.input, keras.KerasTensor) and isinstance(model.output, keras.KerasTensor)):
            # Without names of its own, such as {"image": …}.
            model = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        check_head(model, self.labels)
        return dataclasses.replace(self, model=model)


def open_model(run: Run, options: SourceOptions) -> ExportedModel:
    """The model of a run, with what exports need beside it. Raises UserError unless it is a classifier with labels."""
    refuse_first(_rules_of_a_classifier(run.model))
    labels = _labels_of(run, options)
    run.warn_of_missing_files(labels_given=options.labels is not None)
    samples, seen = _images_of(run, options, labels)
    weights, terms = _weights(run.config) if run.config else (short_name(run.name), license_of(run.name))
    origin = Provenance(
        name=run.name,
        images=seen,
        config=run.config,
        metrics=run.metrics()[-1] if run.metrics() else {},
        weights=weights,
        license=terms if options.license is None else options.license,
        temperature=run.temperature,
        multi_label=run.is_multi_label,
        promise=run.promise,
        monitor=file.read_bytes() if (file := run.file(MONITOR)) else None,
    )
    return ExportedModel(run.model, labels, samples, origin, run.unknown)


def open_without_classes(run: Run, options: SourceOptions) -> ExportedModel:
    """The model of a run or checkpoint, with or without a head, and images to verify its export on."""
    samples, seen = _images_of(run, options, ())
    terms = options.license or license_of(run.name)
    return ExportedModel(
        run.model, (), samples, Provenance(run.name, seen, weights=short_name(run.name), license=terms)
    )


def open_with_classes(run: Run, options: SourceOptions, num_classes: int) -> ExportedModel:
    """The model of a further task, whose classes are named by --labels, by its own labels.txt, or by their numbers."""
    exported = open_without_classes(run, options)
    if options.labels is not None:
        labels = labels_of_file(run, options.labels, num_classes)
    elif file := run.file(LABELS):
        labels = labels_of_file(run, str(file), num_classes)
    else:
        labels = tuple(map(str, range(num_classes)))
    samples = dataclasses.replace(exported.samples, labels=np.full(len(exported.samples.encoded), -1))
    return dataclasses.replace(exported, labels=labels, samples=samples)


def _images_of(run: Run, options: SourceOptions, labels: Sequence[str]) -> tuple[Samples, str]:
    if options.images is not None:
        samples, seen = read_folder(options.images, labels), f"images of {options.images}"
    elif file := run.file(SAMPLES):
        samples, seen = Samples.from_file(file), "evaluation images of the run"
    else:
        samples, seen = random_images(run.preprocessing), "random images"
    some, count = samples.some(options.verify_images), len(samples.encoded)
    return some, seen if some is samples else f"of {count:,} {seen}"


def _weights(config: dict) -> tuple[str, str | None]:
    weights, settings = config.get("weights"), config.get("settings")
    if isinstance(weights, dict):
        return f"fine-tuned from {short_name(str(weights.get('checkpoint')))}", weights.get("license")
    is_from_scratch = isinstance(settings, dict) and settings.get("command") == "pretrain"
    return "trained from scratch" if is_from_scratch else "unknown", None


def _labels_of(run: Run, options: SourceOptions) -> tuple[str, ...]:
    """The class names of --labels, else those of the run, else those that the model knows."""
    number = run.model.output_shape[1]
    if options.labels is not None:
        return labels_of_file(run, options.labels, number)
    # A labels.txt beside a file that is not the model of a run may be of something else.
    names = run.class_names if run.file(LABELS) else classes_of(run.model) or ()
    if not names:
        raise UserError(
            f"{run.name} does not name its {number} classes; pass --labels FILE with one name per line, or name them "
            "in Python by keras_vit.set_classes and save the model."
        )
    return names


def _rules_of_a_classifier(model: keras.Model) -> Rules:
    """It maps images, as its preprocessing gives them, to one vector of logits each."""
    preprocessing = preprocessing_of(model)
    yield (  # it need not have inputs
        has_own_call(model),
        f"The model {model.name!r} is of the class {type(model).__name__}, whose call may compute something else than "
        "its layers; export a keras.Model(inputs, outputs) of them.",
    )
    yield (
        len(model.outputs) != 1 or len(model.inputs) != 1,
        f"The model has {len(model.inputs)} inputs and {len(model.outputs)} outputs, but an export is of one each; "
        "export keras.Model(model.input, logits) with the output that is to be served.",
    )
    with explained(
        lambda reason: f"A layer of the model cannot be copied ({reason}); write its get_config.", NotImplementedError
    ):
        model.get_config()
    spec = next(each for each in model.layers if isinstance(each, ModelSpec))
    expected = (*preprocessing.image_size, preprocessing.channels)
    yield (
        spec.input is not model.inputs[0] or model.inputs[0].shape[1:] != expected,
        f"The model changes its images before its layer {spec.name!r}, which says how they are preprocessed; export it "
        f"with {spec.name!r} as the first layer, of images {expected} in the range {preprocessing.value_range}.",
    )
    yield (
        classifier_head(model) is None or (len(model.outputs[0].shape) == 2 and not classifies(model)),
        f"The model ends with its features, of shape {model.outputs[0].shape}, and has no classes to serve; export the "
        "features by --embeddings features, or add a head by keras_vit.adapt(model, num_classes=…) and train it.",
    )
    yield (
        len(model.outputs[0].shape) != 2,
        f"The model classifies every token, into shape {model.outputs[0].shape}; an export needs one prediction per "
        "image.",
    )


def labels_of_file(run: Run, path: str, number: int) -> tuple[str, ...]:
    """Class names of a checkpoint. Raises UserError unless the file has one line per class."""
    labels = read_labels(existing_file(path, "--labels accepts a text file with one class per line"))
    check_number(labels, path, number, run.name)
    return labels


def read_folder(folder: str, labels: Sequence[str], most: int | None = None) -> Samples:
    """Image files of a folder and its subfolders, whose names are the classes; at most so many, evenly spaced."""
    files = image_files(existing_folder(folder, "give one of images"))
    if not files:
        raise UserError(f"{folder} holds no image files ({format_list()}).")
    if most is not None:
        files = [files[index] for index in np.linspace(0, len(files) - 1, min(most, len(files))).astype(int)]
    indices = {label: index for index, label in enumerate(labels)}
    encoded = tuple(path.read_bytes() for path in files)
    named = [indices.get(path.parent.name, -1) for path in files]
    return Samples(encoded, np.array(named), tuple(map(str, files)))


def read_calibration(run: Run, options: TFLiteOptions, labels: Sequence[str]) -> Samples | None:
    """Return the images for calibration: those of a folder, or the training images in the run directory.

    None if the formats need none, or there are none.
    """
    if {*CALIBRATED, *EIGHT_BIT_WEIGHTS}.isdisjoint(options.formats):
        return None
    if options.calibration is not None:
        return read_folder(options.calibration, labels, most=_MOST_CALIBRATION_IMAGES)
    if (stored := run.file(CALIBRATION)) is None:
        return None
    images = Samples.from_file(stored)
    return Samples(images.encoded[:_MOST_CALIBRATION_IMAGES], images.labels[:_MOST_CALIBRATION_IMAGES])


def random_images(preprocessing: Preprocessing) -> Samples:
    """Smooth random images in several sizes, without labels. They are the same in every call."""
    rng = np.random.default_rng(0)
    encoded = []
    for index in range(_NUM_RANDOM):
        scale = _RANDOM_SCALES[index % len(_RANDOM_SCALES)]
        sides = [max(1, round(side * scale)) for side in preprocessing.image_size]
        channels = 3 if preprocessing.channels == 3 else 1
        colors = rng.uniform(0, 255, (1, *rng.integers(2, 9, 2), channels))
        image = tf.image.resize(colors, sides, method="bicubic")[0]
        encoded.append(tf.io.encode_png(tf.saturate_cast(tf.round(image), tf.uint8)).numpy())
    return Samples(tuple(encoded), np.full(_NUM_RANDOM, -1))
