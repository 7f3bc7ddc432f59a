"""Fine-tune with few labels and many images, beside the same with the labels alone.

noisy-student: "Self-training with Noisy Student improves ImageNet classification" (arXiv 1911.04252). A trained model
labels the images with probabilities, calibrated on the evaluation images; a new model learns them for strongly
changed images; it labels them for the next. Unlike the paper's, the student is as large as the teacher, and classes
are not balanced. ema-teacher: Semi-ViT, see `training.objectives.pseudo_labels`.
"""

import contextlib
import dataclasses
import functools
import shutil
from typing import Any

import numpy as np

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from keras_vit.errors import refuse_without_effect
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.keras_model import load_model
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.tables import markdown_table
from keras_vit.run import Run
from keras_vit.scores import softmax
from training.data.checks import unlabelled_path
from training.data.dataset import Split
from training.data.image_folder import unlabelled_folder
from training.data.unlabelled import strong, with_pseudo_labels
from training.evaluation.metrics import fit_temperature
from training.evaluation.predictors import outputs
from training.loop.build import rebuilt
from training.loop.finetune import finetune
from training.loop.plan import Setup
from training.loop.train import run_training
from training.options.train import FinetuneOptions
from training.recipes.recipe import DURATIONS, PseudoLabelRecipe

# Pseudo-labeled images for each labeled image; the paper's batches have 3 to 14.
_PER_IMAGE = 3
# The rate of stochastic depth that a student has at least, the noise of a Vision Transformer beside the images'.
_DEPTH_RATE = 0.1
# Decay of Semi-ViT's average, and the share of a short run that the average goes back at most.
_DECAY, _LONGEST = 0.9999, 0.1
_BATCH = 250
REPORT = "few_labels.md"


def finetune_with_unlabelled(options: FinetuneOptions, recipe_name: str, setup: Setup) -> Run:
    """Train with the labels alone, then with the images too; copy the better run to the workdir, and say which it is.

    The runs are beside the workdir, as WORKDIR-labels, WORKDIR-round-1 … or WORKDIR-ema-teacher. When the same command
    continues, what is finished is not done again.
    """
    assert options.unlabelled is not None  # as the command checks
    unlabelled = unlabelled_folder(unlabelled_path(options.unlabelled), options.source.on_bad_image)
    refuse_without_effect(options, [(("unlabelled",), not setup.source.multi_label, "images of one class each")])
    print(f"{unlabelled.num_examples:,} images without labels. The first run uses the labels alone.")
    alone = dataclasses.replace(options, workdir=f"{options.workdir}-labels", **_WITHOUT)
    runs = {"labels alone": finetune(alone, recipe_name, setup)}
    if options.learn_by == "ema-teacher":
        runs["ema-teacher"] = _semi_supervised(options, recipe_name, setup, unlabelled, runs["labels alone"])
    else:
        teacher = runs["labels alone"]
        for number in range(1, options.rounds + 1):
            teacher = _student(options, recipe_name, setup, unlabelled, teacher, number)
            runs[f"round {number}"] = teacher
    accuracies = {name: run.metrics()[-1]["val_accuracy"] for name, run in runs.items()}
    best = max(accuracies, key=lambda name: accuracies[name])  # the first of equals: the labels alone
    gain = accuracies[best] - accuracies["labels alone"]
    rows = [(name, f"{value:.1%}", f"{value - accuracies['labels alone']:+.1%}") for name, value in accuracies.items()]
    verdict = (
        f"Kept: {best}, {gain:+.1%} on the {setup.source.evaluation.num_examples:,} evaluation images that chose it."
        if gain > 0.0
        else "Kept: the labels alone, because no run with the images is better on the evaluation images."
    )
    table = markdown_table(("training", "evaluation accuracy", "gain"), rows)
    print(f"{table}\n{verdict}")
    not_kept = shutil.ignore_patterns("checkpoints", _LABELS)
    with atomic_folder(options.directory) as folder:
        shutil.copytree(runs[best].path, folder, dirs_exist_ok=True, ignore=not_kept)
        report = f"# Labels alone and with images\n\n{table}\n\n{verdict}\n"
        (folder / REPORT).write_text(report, encoding="utf-8")
    return Run.at(options.directory)


# The options of a run with the labels alone.
_WITHOUT: dict[str, Any] = {"unlabelled": None, "learn_by": "noisy-student", "confidence": 0.6, "rounds": 2}


# Noisy student

# The logits of a teacher for the images, in its run directory.
_LABELS = "unlabelled_logits.npz"


def _student(
    options: FinetuneOptions, recipe_name: str, setup: Setup, unlabelled: Split, teacher: Run, number: int
) -> Run:
    """Return the run of a round: from the checkpoint, with the labels and what the teacher is sure of."""
    shares = _probabilities(teacher, setup, unlabelled)
    kept = np.flatnonzero(shares.max(axis=-1) >= options.confidence)
    print(
        f"Round {number}: {len(kept):,} of {unlabelled.num_examples:,} images have a class with a probability of at "
        f"least {options.confidence:g}."
    )
    if not len(kept):
        raise UserError(
            f"The teacher {teacher.path} is sure of no image; give a lower --confidence than {options.confidence:g}."
        )
    source = with_pseudo_labels(setup.source, unlabelled, kept, shares[kept], _PER_IMAGE)
    num_steps = options.recipe.num_steps(setup.source.train.num_examples)
    # Each labeled image is seen as often as with the labels alone.
    durations: dict[str, Any] = {**dict.fromkeys(DURATIONS), "steps": (1 + _PER_IMAGE) * num_steps}
    recipe = dataclasses.replace(strong(options.recipe), **durations)
    rate = options.stochastic_depth_rate
    if isinstance(keras_vit.config_of(Run.open(teacher.path).model), ViTConfig):
        rate = max(rate, _DEPTH_RATE)
    student = dataclasses.replace(
        options, workdir=f"{options.workdir}-round-{number}", recipe=recipe, stochastic_depth_rate=rate, rounds=number
    )
    return finetune(student, recipe_name, dataclasses.replace(setup, source=source))


def _probabilities(teacher: Run, setup: Setup, unlabelled: Split) -> np.ndarray:
    """Return probabilities (n, K), by the temperature that fits the evaluation images best, if one does."""
    model, source = load_model(teacher.path), setup.source
    compute = functools.partial(
        outputs,
        model.predict_on_batch,
        batch_size=_BATCH,
        preprocessing=preprocessing_of(model),
        num_classes=len(source.labels),
    )
    file = teacher.path / _LABELS
    key = np.array([unlabelled.fingerprint, unlabelled.num_examples])
    found = read_npz(file) if file.is_file() else {}
    # An interrupted student continues with these very numbers.
    if not np.array_equal(found.get("key", 0), key):
        print(f"{teacher.path} labels {unlabelled.num_examples:,} images:")
        found = {"logits": compute(unlabelled)[0], "key": key, "temperature": np.array(1.0)}
        with contextlib.suppress(UserError):  # all evaluation images are right, so there is nothing to fit
            found["temperature"] = np.array(fit_temperature(*compute(source.evaluation)))
        write_npz(file, found)
    return softmax(found["logits"] / float(found["temperature"]))


# Semi-ViT


def _semi_supervised(options: FinetuneOptions, recipe_name: str, setup: Setup, unlabelled: Split, start: Run) -> Run:
    """Go on from the run with the labels alone, with images in every batch and its moving average as the teacher."""
    recipe, count = options.recipe, setup.source.train.num_examples
    num_steps = recipe.num_steps(count)
    decay = recipe.ema_decay or min(_DECAY, 1.0 - 1.0 / max(_LONGEST * num_steps, 2.0))
    print(f"The teacher is the average of the weights with a decay of {decay:.6g} per step.")
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)} | {"ema_decay": decay}
    semi = PseudoLabelRecipe(**fields, confidence=options.confidence)

    rates = {"dropout_rate": options.dropout_rate, "stochastic_depth_rate": options.stochastic_depth_rate}
    return run_training(
        dataclasses.replace(options, workdir=f"{options.workdir}-ema-teacher", recipe=semi),
        dataclasses.replace(setup, source=dataclasses.replace(setup.source, unlabelled=unlabelled)),
        lambda _: rebuilt(load_model(start.path), rates=rates),
        command="finetune",
        recipe_name=recipe_name,
    )
