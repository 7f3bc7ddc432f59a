"""Print what a run trains when it begins, save the images that it keeps, and plot its metrics at the end."""

import keras
import matplotlib.figure
import numpy as np

from keras_vit import Preprocessing
from keras_vit.files.atomic import atomic_write
from keras_vit.run import CALIBRATION, SAMPLES, Run
from training.data.sources import DataSet
from training.data.write import save_samples
from training.loop.plan import Plan
from training.recipes.auto import advice

# Training images saved for the exports, which calibrate quantization ranges on them.
_CALIBRATION_IMAGES = 512
# Class names in the first lines of a log.
_SHOWN_CLASSES = 10


def print_summary(plan: Plan, network: keras.Model) -> None:
    """Print what will be trained on what, and advice where images are few or classes uneven."""
    recipe, data, labels = plan.recipe, plan.data, plan.data.labels
    print(
        f"{plan.settings['recipe_name']}: {network.count_params():,} parameters, {data.train.num_examples:,} training "
        f"images of {len(labels)} classes, {data.evaluation.num_examples:,} evaluation images, "
        f"{plan.num_steps:,} steps of {recipe.batch_size}."
    )
    shown, more = ", ".join(label[:60] for label in labels[:_SHOWN_CLASSES]), len(labels) - _SHOWN_CLASSES
    print(f"Classes: {shown}{f' and {more:,} more' if more > 0 else ''}.")
    if recipe.teacher is not None and recipe.distillation == "soft" and recipe.label_smoothing:
        print(f"The recipe's label smoothing of {recipe.label_smoothing} has no effect with a soft teacher.")
    if (weights := plan.class_weights) is not None:
        least, most = int(weights.argmin()), int(weights.argmax())
        print(
            f"Class weights: {weights[least]:.2f} ({labels[least]}) to {weights[most]:.2f} ({labels[most]}), 1 on "
            "average over the images."
        )
    is_own_folder = plan.options.source.data.startswith(("folder:", "csv:"))
    is_evened = recipe.balance or recipe.class_weights
    if is_own_folder and data.train.labels is not None and not is_evened and recipe.uses_labels:
        counts = np.bincount(data.train.labels).tolist()
        for sentence in advice(counts, from_scratch=plan.settings["command"] == "pretrain"):
            print(sentence)


def save_images(run: Run, source: DataSet, preprocessing: Preprocessing) -> None:
    """Save what a run keeps of its images: before the model, which marks the run as finished."""
    if source.train.digests is not None:
        run.save_training_images(source.train.digests)
    save_samples(source.evaluation, preprocessing, run.path / SAMPLES)
    save_samples(source.train, preprocessing, run.path / CALIBRATION, most=_CALIBRATION_IMAGES)


def write_curves(run: Run) -> None:
    """Plot the loss and the accuracy over the epochs to curves.png."""
    records = run.metrics()
    epochs = [record["epoch"] for record in records]
    names = [name for name in ("loss", "accuracy", "binary_accuracy") if name in records[-1]]
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot(epochs, [record[name] for record in records], color="tab:blue", label="training")
        axes.plot(epochs, [record[f"val_{name}"] for record in records], color="tab:orange", label="evaluation")
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_write(run.path / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)
