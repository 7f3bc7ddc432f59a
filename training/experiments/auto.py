"""Choose how to train on a data set: frozen features, fine-tuning, or from scratch."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable

import keras
import numpy as np
import sklearn.model_selection
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError
from keras_vit.checkpoints.checkpoint import rows_of
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.cli.progress import Progress, duration
from keras_vit.errors import refuse_without_effect
from keras_vit.images.resizing import Resize
from keras_vit.models.build import logits_model
from keras_vit.run import Run
from keras_vit.text.checkpoint import has_text_tower
from keras_vit.text.classes import classes_of_labels
from training.data.dataset import Split, random_subset, typical_image
from training.data.sources import DataSet, open_source
from training.evaluation.evaluate import evaluate
from training.evaluation.predictors import accuracy, open_predictor
from training.experiments import by_recipe
from training.features.extraction import open_extractor
from training.features.linear_models import new_probe, note_split, probe, quiet_fits
from training.features.probe import cached_features, save_probe
from training.loop.build import rebuilt
from training.options.evaluate import EvaluateOptions
from training.options.features import LinearProbeOptions
from training.options.train import AutoOptions
from training.recipes.auto import DataFacts, auto_finetune_recipe

# Small, and without labels, so that its features suit any images. Apache license 2.0.
DEFAULT_CHECKPOINT = "hf:facebook/dinov2-small"
# Below it a single split says little.
FEW_IMAGES = 2000
# Training images on which two ways of resizing are compared.
_COMPARED = 200
# Ways of resizing that cut nothing off.
_WHOLE = ("stretch", "pad")
_FOLDS = 5
# Fewer epochs of fine-tuning than these hardly change the backbone.
_FEWEST_EPOCHS = 3
# The sentence around the name of a class, for checkpoints with a text tower.
_TEMPLATE = "a photo of a {}."
# Inverse strength of the penalty for that, and images per forward pass.
_C, BATCH = 0.1, 64
# Images on which the time of the features is measured.
_TIMED = 16


def usable_checkpoint(name: str | None) -> str | None:
    """Return the checkpoint to start from; None, with a printed reason, if the default is meant but unavailable."""
    if name is not None:
        return name
    try:
        find_checkpoint(DEFAULT_CHECKPOINT)
    except UserError as error:
        print(
            f"Could not download {DEFAULT_CHECKPOINT}, so a small model is trained from scratch, which is usually less "
            f"accurate than --checkpoint FOLDER. {error}"
        )
        return None
    return DEFAULT_CHECKPOINT


def unfinished_recipe(workdir: str) -> dict | None:
    """Return the settings of the recipe of a fine-tuning that was interrupted in this directory; None without one."""
    settings = Run.at(workdir).settings
    recipe = settings.get("recipe") if settings.get("command") == "finetune" else None
    return recipe if isinstance(recipe, dict) and {"epochs", "resize"} <= recipe.keys() else None


def zero_shot_accuracy(checkpoint: str, source: DataSet) -> float | None:
    """Return the accuracy on the evaluation images of the names of the classes as texts; print it, as the baseline.

    None for a checkpoint without text tower or tokenizer, and for images of several classes each.
    """
    if source.multi_label or not has_text_tower(checkpoint):
        return None
    try:
        run = Run.open(checkpoint, texts=classes_of_labels(source.labels, (_TEMPLATE,)))
        share = _accuracy(run.model, source, source.evaluation, run.preprocessing)
    except UserError as error:
        print(f"No zero-shot accuracy: {error}")
        return None
    print(
        f"Zero-shot accuracy, without training: {share:.1%} on {source.evaluation.num_examples:,} evaluation images, "
        f"with the names of the {len(source.labels)} classes in {_TEMPLATE!r}."
    )
    return share


def finetuning_epochs(run: Run, source: DataSet, minutes: float | None, resize: Resize | None = None) -> int:
    """Return the epochs for which to train all weights; 0 if the backbone should stay frozen. Print the reason.

    Times a training step on this machine, or the features of some images. Without `resize`, `resize_for` compares two
    ways, whose features take time, too.
    """
    count = source.train.num_examples
    recipe = auto_finetune_recipe(DataFacts(count, *typical_image(source.train)))
    steps_per_epoch = max(count // recipe.batch_size, 1)
    most = max(recipe.num_steps(count) // steps_per_epoch, 1)
    if minutes is None and tf.config.list_physical_devices("GPU"):
        print("Fine-tuning all weights, because there is a GPU.")
        return most
    if minutes is None:
        compared = 0 if resize or run.preprocessing.resize in _WHOLE else min(count, 2 * _COMPARED)
        images = count + source.evaluation.num_examples + compared
        print(
            f"The backbone stays frozen, because there is no GPU; its features take about "
            f"{duration(max(images * image_seconds(run.model), 1.0))} here. To fine-tune it, add --minutes 30 or so."
        )
        return 0
    seconds = step_seconds(run.model, recipe.batch_size)
    epochs = min(int(minutes * 60 / (seconds * steps_per_epoch)), most)
    measured = f"a step of {recipe.batch_size} images takes {seconds:.1f} s here"
    if epochs < _FEWEST_EPOCHS:
        print(f"The backbone stays frozen: {measured}, so {minutes:g} minutes allow only {epochs} epochs.")
        return 0
    print(f"Fine-tuning all weights for {epochs} epochs: {measured}.")
    return epochs


def step_seconds(model: keras.Model, batch_size: int) -> float:
    """Return the seconds of a training step of all weights, measured on random images."""
    images = tf.random.stateless_uniform((batch_size, *model.input_shape[1:]), (0, 0))

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        return tf.add_n([tf.reduce_sum(g) for g in tape.gradient(loss, model.trainable_variables) if g is not None])

    return _seconds(step)


def image_seconds(model: keras.Model) -> float:
    """Return the seconds for the features of an image, measured on random ones."""
    images = tf.random.stateless_uniform((_TIMED, *model.input_shape[1:]), (0, 0))
    return _seconds(tf.function(lambda: model(images, training=False), autograph=False)) / _TIMED


def _seconds(compute: Callable) -> float:
    compute()  # traces
    begin = time.perf_counter()
    keras.tree.flatten(compute())[0].numpy()
    return time.perf_counter() - begin


def resize_for(run: Run, source: DataSet) -> Resize | None:
    """Return "pad" unless the model's own crops are classified better than whole images; None keeps the model's own.

    Compares both by cross-validation of a linear classifier on the frozen features of some training images. A
    difference below the standard error of an accuracy is noise, and then nothing is cut off.
    """
    own, some = run.preprocessing, _compared(source)
    if own.resize in _WHOLE:
        return None
    with Progress("Crops"):
        cropped = _probed(run, some, own)
    with Progress("Whole images"):
        padded = _probed(run, some, own.with_resize("pad", None))
    if cropped is None or padded is None:
        return None
    noise = (cropped * (1.0 - cropped) / some.num_examples) ** 0.5
    is_padded = padded >= cropped - noise
    chosen = "Whole images (--resize pad)" if is_padded else "Cropped images"
    print(
        f"{chosen}: on {some.num_examples} training images a linear classifier reaches {padded:.1%} with whole "
        f"images and {cropped:.1%} with crops ({_FOLDS}-fold cross-validation)"
        + ("; the difference is within the noise, so nothing is cut off." if is_padded and padded < cropped else ".")
    )
    return "pad" if is_padded else None


def with_own_head(run: Run, source: DataSet, given: Resize | None, of_probe: Resize | None) -> keras.Model | None:
    """Return the model with its own head for the classes of the data, where that head is no worse than a new one.

    None if the model does not know all classes, or if a linear classifier on its frozen features is better on some
    training images, by cross-validation.

    given: how the user wants images to be resized, of_probe: how they are for the linear classifier; None as the model
    does.
    """
    names = keras_vit.classes_of(run.model)
    if source.multi_label or names is None or None in rows_of(source.labels, names):
        return None
    own, some = run.preprocessing, _compared(source)
    preprocessing, probed_with = (
        own if resize in (None, own.resize) else own.with_resize(resize, None) for resize in (given, of_probe)
    )
    model = logits_model(keras_vit.adapt(run.model, classes=source.labels))
    kept, probed = _accuracy(model, source, some, preprocessing), _probed(run, some, probed_with) or 0.0
    is_kept = kept >= probed
    print(
        f"On {some.num_examples} training images the model's own head reaches {kept:.1%}, and a new one {probed:.1%} "
        f"({_FOLDS}-fold cross-validation), so auto {'keeps its own' if is_kept else 'fits a new one'}."
    )
    return rebuilt(model, preprocessing) if is_kept else None


def _compared(source: DataSet) -> Split:
    """Return some training images; all if there are hardly more, whose features are in the cache then."""
    train = source.train
    return train if train.num_examples <= 2 * _COMPARED else random_subset(train, _COMPARED, seed=0)


def _accuracy(model: keras.Model, source: DataSet, split: Split, preprocessing: Preprocessing) -> float:
    return accuracy(model, split, preprocessing, num_classes=len(source.labels), batch_size=BATCH)


def _probed(run: Run, split: Split, preprocessing: Preprocessing) -> float | None:
    """Return the cross-validated accuracy of a linear classifier on frozen features; None of too few images."""
    features = cached_features(open_extractor(run.model, preprocessing, batch_size=BATCH), split)
    kept = np.isin(features.labels, np.flatnonzero(np.bincount(features.labels) >= _FOLDS))
    if len(np.unique(features.labels[kept])) < 2:
        return None
    folds = sklearn.model_selection.StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    with quiet_fits():
        scores = sklearn.model_selection.cross_val_score(
            new_probe(_C), features.values[kept], features.labels[kept], cv=folds
        )
    return float(scores.mean())


def auto(options: AutoOptions) -> list[tuple[str, ...]]:
    """Train in the way that suits data and machine, evaluate the run, and return commands to go on with."""
    checkpoint = usable_checkpoint(options.checkpoint)
    source, baseline = _train(options, checkpoint)
    measured = EvaluateOptions(run=options.workdir, source=options.source)
    run = Run.open(options.workdir)
    if source is None:
        with contextlib.redirect_stdout(io.StringIO()):  # the training has said how the data are divided
            source = open_source(options.source, multi_label=True)
    evaluate(open_predictor(run, measured.input, measured.devices), source, measured)
    commands = run.next_commands("evaluate")
    if checkpoint is not None and baseline is not None:  # the classes' names are a better start than zeros
        words = ("finetune", "--checkpoint", checkpoint, "--zero-shot-head", *options.source.arguments())
        commands[-1] = (*words, "--workdir", f"{options.workdir}-from-words")
    return commands


def _train(options: AutoOptions, checkpoint: str | None) -> tuple[DataSet | None, float | None]:
    """Train in one of three ways; return the data, if they were opened, and the accuracy of the classes' names."""
    training = [*options.source.arguments(), "--workdir", options.workdir, "--seed", str(options.seed)]
    more = [] if options.unlabelled is None else ["--unlabelled", options.unlabelled]
    if checkpoint is None:
        refuse_without_effect(options, [(("unlabelled",), False, "--checkpoint")])
        by_recipe.pretrain(["auto", *training, *_resize(options.resize)])
        return None, None

    def finetune(epochs: int, resize: Resize | None, source: DataSet | None = None) -> None:
        start = ["--checkpoint", checkpoint, "--recipe", "auto", "--epochs", str(epochs)]
        by_recipe.finetune([*start, *_resize(resize), *more, *training], source=source)

    first = f"{options.workdir}-labels" if more else options.workdir  # of the fine-tuning with the labels alone
    if recipe := unfinished_recipe(first):  # another timing might choose other epochs
        finetune(recipe["epochs"], recipe["resize"])
        return None, None
    run, source = Run.open(checkpoint), open_source(options.source)
    baseline = zero_shot_accuracy(checkpoint, source)
    epochs = finetuning_epochs(run, source, options.minutes, options.resize)
    resize = options.resize or resize_for(run, source)
    refuse_without_effect(options, [(("unlabelled",), epochs > 0, "training of all weights in --minutes 30 or so")])
    if epochs:
        finetune(epochs, resize, source)
        return source, baseline
    probed = LinearProbeOptions(
        run=checkpoint, source=options.source, workdir=options.workdir, batch_size=BATCH, resize=resize,
        folds=_folds(source),
    )  # fmt: skip
    if (kept := with_own_head(run, source, options.resize, resize)) is None:
        probe(run, source, probed)
    else:
        share = _accuracy(kept, source, source.evaluation, keras_vit.preprocessing_of(kept))
        save_probe(run, kept, source, dataclasses.replace(probed, resize=options.resize, folds=None), share)
        note_split(Run.at(options.workdir), source, run)
    return source, baseline


def _folds(source: DataSet) -> int | None:
    """Return the folds of a cross-validation, no more than the largest class has images; None of many images."""
    labels = source.train.labels
    folds = 0 if labels is None else min(_FOLDS, int(np.bincount(labels).max()))
    return folds if folds > 1 and source.train.num_examples < FEW_IMAGES else None


def _resize(resize: Resize | None) -> list[str]:
    return [] if resize is None else ["--resize", resize]
