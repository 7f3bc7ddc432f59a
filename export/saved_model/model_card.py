"""The model card of a SavedModel: architecture, training data, signatures, and serving."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras

from export.report import versions
from export.source import Provenance
from keras_vit import ViTConfig, config_of, preprocessing_of
from keras_vit.files.tables import markdown_table
from keras_vit.images.formats import format_list
from keras_vit.models.build import saved_classes

_SERVING = """\
docker run -p 8500:8500 -p 8501:8501 -v "$PWD:/models/NAME" -e MODEL_NAME=NAME tensorflow/serving

curl http://localhost:8501/v1/models/NAME:predict \\
  -d "{\\"inputs\\": {\\"image_bytes\\": [{\\"b64\\": \\"$(base64 -w0 picture.jpg)\\"}]}}"

curl http://localhost:8501/v1/models/NAME:classify -d "{\\"signature_name\\": \\"classify\\", \\"examples\\": \\
  [{\\"image/encoded\\": {\\"b64\\": \\"$(base64 -w0 picture.jpg)\\"}}]}"
"""
_OF_TEXTS = (
    "The classes are texts: the embeddings of each in every template, averaged over those of a class, are the head."
)
# Classes whose texts are listed.
_MOST_TEXTS = 1000
# Rules for image files: see keras_vit/images/formats.py.
_FILES = """Image files are {}. Animated WebP is not supported, and WebP not at all by servers with TensorFlow before \
2.21."""
_ALPHA = {
    "white": "Transparent images are blended with white.",
    None: "The alpha channel of images is dropped.",
}


def model_card(
    model: keras.Model,
    labels: Sequence[str],
    origin: Provenance,
    facts: Mapping,
    interface: Sequence[tuple[str, str, str, str, str]],
) -> str:
    """README.md of an exported version.

    Args:
        model: the Keras model.
        labels: class names.
        origin: of the model.
        facts: content of the verification report.
        interface: signature, side (input or output), name, type and shape of each tensor.
    """
    settings = origin.config.get("settings", {})
    config, preprocessing = config_of(model), preprocessing_of(model)
    kind = "Vision Transformer" if isinstance(config, ViTConfig) else "ResNet"
    shown = ", ".join(labels[:20]) + (f", … ({len(labels)} in assets/labels.txt)" if len(labels) > 20 else "")
    rows = {
        "Architecture": f"{kind}: {_differing(config)}",
        "Parameters": f"{model.count_params():,}, stored as {facts['dtype']}",
        **_merging(facts["merge_tokens"]),
        "Origin": origin.name,
        "Weights": origin.weights,
        "Training": _training(settings),
        "Data": f"{_data(settings)}; {len(labels)} classes: {shown}",
        "Last metrics of training": _numbers(origin.metrics) or "unknown",
        "Measured on this artifact": f"{_measured(facts)} ({facts['num_images']:,} {origin.images})",
        "Probabilities": _probabilities(origin, facts["threshold"]),
        "Preprocessing": f"{preprocessing.summary()}; for image files, inside the graph",
        "License": origin.license_text,
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items() if name != "processor"),
    }
    lines = [f"# {model.name}: {len(labels)} classes", ""]
    lines += [markdown_table(("", ""), list(rows.items()), num_text_columns=2)]
    lines += _texts(model)
    lines += ["", "## Signatures", "", "B is the number of images, 0 or more.", ""]
    lines += [markdown_table(("signature", "", "tensor", "type", "shape"), interface, num_text_columns=5)]
    lines += ["", f"{_FILES.format(format_list())} {_ALPHA[preprocessing.background]}", ""]
    lines += ["An image that cannot be decoded is INVALID_ARGUMENT with its index in the batch.", ""]
    lines += ["## Serving", "", "In the parent directory:", "", "```text", _SERVING.rstrip(), "```", ""]
    lines += ["Verification of this version: [report](report.md).", ""]
    return "\n".join(lines)


def _texts(model: keras.Model) -> list[str]:
    """The texts that the head was made of, with their templates; none for other models."""
    classes = saved_classes(model)
    if classes is None or not classes.texts:
        return []
    rows = [(label, " | ".join(texts)) for label, texts in zip(classes.labels, classes.texts, strict=True)]
    lines = ["", "## Texts", "", _OF_TEXTS, ""]
    lines += [f"* `{template}`" for template in classes.templates]
    lines += ["", markdown_table(("class", "texts"), rows[:_MOST_TEXTS], num_text_columns=2)]
    more = len(rows) - _MOST_TEXTS
    return [*lines, "", f"{more:,} more classes, in assets/labels.txt."] if more > 0 else lines


def _merging(merged: int) -> dict[str, str]:
    """A row on merged tokens, if there are any."""
    return {"Token merging": f"{merged} patch tokens merged in each block, which changes the outputs"} if merged else {}


def _differing(config) -> str:
    """Fields that differ from their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in vars(config).items() if value != fields.get(name)
    )


def _probabilities(origin: Provenance, threshold: float | None) -> str:
    text = "softmax of the logits"
    if origin.multi_label:
        text = "sigmoid of each logit, because an image may have several classes"
    if origin.temperature != 1.0:
        text += f" divided by the temperature {origin.temperature:.4g}, which was fitted to the evaluation images"
    return text if threshold is None else f"{text}; accepted from {threshold:g} on"


# Fields of a recipe for the card, where they are set; config.json of the run has them all.
_OF_TRAINING = (
    "epochs", "steps", "examples", "batch_size", "optimizer", "learning_rate", "weight_decay", "clip_norm", "loss",
    "label_smoothing", "ema_decay", "lora", "teacher", "patch_dropout", "sharpness_radius", "balance",
    "class_weights", "flip", "shift",
    "inception_crop", "autoaugment", "randaugment_layers", "randaugment_magnitude", "three_augment", "color_jitter",
    "random_erasing", "mixup", "cutmix",
)  # fmt: skip


def _training(settings: Mapping) -> str:
    if not settings:
        return "unknown"
    recipe = settings.get("recipe")
    known = recipe if isinstance(recipe, Mapping) else {}
    flat = _numbers({name: known[name] for name in _OF_TRAINING if known.get(name)})
    return f"{settings.get('command', '')} {settings.get('recipe_name', '')}: {flat}".strip()


def _data(settings: Mapping) -> str:
    source, images = settings.get("source"), settings.get("images")
    if not isinstance(source, Mapping):
        return "unknown"
    counts = f", {_numbers(images)} images" if isinstance(images, Mapping) else ""
    return f"{source.get('data', 'unknown')}{counts}"


def _numbers(values: Mapping) -> str:
    """Numbers and strings as text."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value if not isinstance(value, float) else format(value, '.4g')}"
        for name, value in values.items()
        if isinstance(value, int | float | str)
    )


def _measured(facts: Mapping) -> str:
    accuracy = "accuracy unknown" if facts["accuracy"] is None else f"accuracy {facts['accuracy']:.4f}"
    return f"{accuracy}, largest difference of a logit from the Keras model {facts['max_abs_diff']:.2g}"
