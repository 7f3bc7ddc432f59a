"""The model card of a SavedModel: architecture, training data, signatures, and serving."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras

from export.report import versions
from export.source import Provenance
from export.texts import render
from keras_vit import ViTConfig, config_of, preprocessing_of
from keras_vit.files.tables import markdown_table
from keras_vit.images.formats import format_list
from keras_vit.models.build import saved_classes
from keras_vit.models.config import Classes

_MOST_TEXTS = 1000  # classes whose texts are listed
# Fields of a recipe for the card, where they are set; config.json of the run has them all.
_OF_TRAINING = (
    "epochs", "steps", "examples", "batch_size", "optimizer", "learning_rate", "weight_decay", "clip_norm", "loss",
    "label_smoothing", "ema_decay", "lora", "teacher", "patch_dropout", "sharpness_radius", "balance",
    "class_weights", "flip", "shift",
    "inception_crop", "autoaugment", "randaugment_layers", "randaugment_magnitude", "three_augment", "color_jitter",
    "random_erasing", "mixup", "cutmix",
)  # fmt: skip


def model_card(
    model: keras.Model,
    labels: Sequence[str],
    origin: Provenance,
    facts: Mapping,
    interface: Sequence[tuple[str, str, str, str, str]],
) -> str:
    """Return README.md of an exported version.

    facts: content of report.json. interface: signature, side (input or output), name, type and shape of each tensor.
    """
    classes = saved_classes(model) or Classes(())
    texts = [(label, " | ".join(each)) for label, each in zip(classes.labels, classes.texts, strict=False)]
    return render(
        "model_card.md",
        name=model.name,
        num_classes=len(labels),
        facts=markdown_table(("", ""), list(_facts(model, labels, origin, facts).items()), num_text_columns=2),
        templates=classes.templates,
        texts=markdown_table(("class", "texts"), texts[:_MOST_TEXTS], num_text_columns=2) if texts else "",
        more_texts=len(texts) - _MOST_TEXTS,
        interface=markdown_table(("signature", "", "tensor", "type", "shape"), interface, num_text_columns=5),
        formats=format_list(),
        background=preprocessing_of(model).background,
    )


def _facts(model: keras.Model, labels: Sequence[str], origin: Provenance, facts: Mapping) -> dict[str, str]:
    settings = origin.config.get("settings", {})
    config, preprocessing = config_of(model), preprocessing_of(model)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name: value for name, value in vars(config).items() if value != defaults.get(name)}
    architecture = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed.items())
    merged = f"{facts['merge_tokens']} patch tokens merged in each block, which changes the outputs"
    shown = ", ".join(labels[:20]) + (f", … ({len(labels)} in assets/labels.txt)" if len(labels) > 20 else "")
    accuracy = "unknown" if facts["accuracy"] is None else f"{facts['accuracy']:.1%}"
    return {
        "Architecture": f"{'Vision Transformer' if isinstance(config, ViTConfig) else 'ResNet'}: {architecture}",
        "Parameters": f"{model.count_params():,}, stored as {facts['dtype']}",
        **({"Token merging": merged} if facts["merge_tokens"] else {}),
        "Origin": origin.name,
        "Weights": origin.weights,
        "Training": _training(settings),
        "Data": f"{_data(settings)}; {len(labels)} classes: {shown}",
        "Last metrics of training": _numbers(origin.metrics) or "unknown",
        "Measured on this artifact": f"accuracy {accuracy}, largest difference of a logit from the Keras model "
        f"{facts['max_abs_diff']:.2g} ({facts['num_images']:,} {origin.images})",
        "Probabilities": _probabilities(origin, facts["threshold"]),
        **({} if origin.promise is None else {"Promise": " ".join(origin.promise.sentences())}),
        "Preprocessing": f"{preprocessing.summary()}; for image files, inside the graph",
        "License": origin.license_text,
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items() if name != "processor"),
    }


def _probabilities(origin: Provenance, threshold: float | None) -> str:
    text = "softmax of the logits"
    if origin.multi_label:
        text = "sigmoid of each logit, because an image may have several classes"
    if origin.temperature != 1.0:
        text += f" divided by the temperature {origin.temperature:.4g}, which was fitted to the evaluation images"
    return text if threshold is None else f"{text}; accepted from {threshold:g} on"


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
    return ", ".join(
        f"{name.replace('_', ' ')} {value if not isinstance(value, float) else format(value, '.4g')}"
        for name, value in values.items()
        if isinstance(value, int | float | str)
    )
