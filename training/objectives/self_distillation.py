"""Self-distillation: a model learns from crops of an image what its own moving average says of other crops of it.

DINO: "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294), and the official code
(facebookresearch/dino `main_dino.py`). The moving average, the teacher, sees two large crops; the model, the student,
sees these and small ones ("multi-crop"). A ViT-S/16, trained so on ImageNet without labels, has 74.5% by nearest
neighbors and 77.0% by a linear probe (Table 2).
"""

import dataclasses
import math
from collections.abc import Callable

from keras import ops

from training.objectives.objective import Objective, averaged, sums_of
from training.objectives.patches import Resized
from training.recipes.recipe import PretrainRecipe

# The student's temperature of the paper. That of the teacher rises to 0.07 there; 0.04 throughout is the default of the
# official code.
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
# Share of the run in which the prototypes keep their initial values: the first of the official code's 100 epochs.
_FIXED_PROTOTYPES = 0.01


class SelfDistillation(Objective):
    """The divergence of the student's probabilities from those of the teacher for another crop of the same image.

    In evaluation, where the model is the moving average and sees the complete image, from its own. "entropy" is that of
    the teacher's probabilities, in nats: when it is 0 or the logarithm of the number of prototypes, the features have
    collapsed.
    """

    metrics = ("loss", "entropy")
    metric_dtype = "float32"
    without_remat = "--target self-distillation"

    def __init__(self, recipe: PretrainRecipe, num_steps: int):
        self._recipe, self._num_steps = recipe, num_steps
        crops = f"2 crops and {recipe.local_crops} small ones of each image"
        self.uncounted = (f"the head of {recipe.prototypes:,} prototypes, the teacher, and {crops}",)

    def averaging(self, decay):
        """Return the teacher's decay after a number of steps: from the recipe's to 1 along half a cosine."""

        def decay_at(step):
            done = ops.cast(step, "float32") / self._num_steps
            return 1.0 - (1.0 - decay) * 0.5 * (1.0 + ops.cos(math.pi * done))

        return decay_at

    def forwards(self, network, trained, step, averages):
        """Return student and teacher on the crops of a batch: (large crops, small crops) -> a dict.

        Large crops (B, 2, height, width, C), small crops (B, n, h, w, C) -> "student" (2 + n, B, K), "teacher" (2, B,
        K). Without small crops, the input is the large ones alone. It is called in a `keras.StatelessScope`, which gets
        the new center. Raises UserError for a model whose weights depend on the image size in other ways than learned
        positions do.
        """
        recipe, fixed_steps = self._recipe, round(_FIXED_PROTOTYPES * self._num_steps)
        prototypes, center = network.get_layer("prototypes").kernel, network.get_layer("center")
        at_small_size: Callable | None = None
        size = (recipe.local_size, recipe.local_size)
        if recipe.local_crops and size == recipe.image_size:
            at_small_size = trained
        elif recipe.local_crops:
            small_recipe = dataclasses.replace(recipe, image_size=size, local_crops=0)
            at_small_size = Resized(network, lambda: small_recipe.build(num_classes=0))

        def outputs(images, training):
            large, small = images if at_small_size is not None else (images, None)
            with averaged(network, averages):
                of_average = trained(_crop_by_crop(large), training=False)
            teacher = ops.stop_gradient(_split(of_average["teacher"], large.shape[1]))
            center.update(ops.stop_gradient(of_average["student"]), recipe.accumulation)

            kernel = ops.convert_to_tensor(prototypes.value)
            # In the caller's scope this is the value that the student has, but the variable does not change.
            prototypes.assign(ops.where(step.value < fixed_steps, ops.stop_gradient(kernel), kernel))
            student = [_split(trained(_crop_by_crop(large), training=training)["student"], large.shape[1])]
            if at_small_size is not None:
                of_small = at_small_size(_crop_by_crop(small), training=training)
                student.append(_split(of_small["student"], small.shape[1]))
            return {"student": ops.concatenate(student, axis=0), "teacher": teacher}

        return [outputs]

    def measure(self, images, labels, outputs, weights):
        student, teacher = (ops.cast(outputs[name], "float32") for name in ("student", "teacher"))
        in_evaluation = len(student.shape) == 2  # (B, K)
        if in_evaluation:
            student, teacher = student[None], teacher[None]
        logarithms = ops.log_softmax(teacher / TEACHER_TEMPERATURE)
        targets = ops.exp(logarithms)
        predicted = ops.log_softmax(student / STUDENT_TEMPERATURE)
        losses = -ops.einsum("tbk,sbk->bts", targets, predicted)
        if in_evaluation:
            losses = losses[:, 0, 0]
        else:
            others = 1.0 - ops.eye(teacher.shape[0], student.shape[0])
            losses = ops.sum(losses * others, axis=(1, 2)) / ops.sum(others)
        entropies = -ops.mean(ops.sum(targets * logarithms, axis=-1), axis=0)
        return sums_of(losses, entropies, weights)


def _crop_by_crop(crops):
    """(B, n, h, w, C) -> (n * B, h, w, C)."""
    return ops.reshape(ops.transpose(crops, (1, 0, 2, 3, 4)), (-1, *crops.shape[2:]))


def _split(outputs, count: int):
    """(n * B, K) -> (n, B, K)."""
    return ops.reshape(outputs, (count, -1, outputs.shape[-1]))
