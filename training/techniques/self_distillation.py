"""Self-distillation: a model learns from crops of an image what its own moving average says of other crops of it.

DINO: "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294), and the official code
(facebookresearch/dino `main_dino.py`). The moving average, the teacher, sees two large crops; the model, the student,
sees these and small ones ("multi-crop"). A ViT-S/16, trained so on ImageNet without labels, has 74.5 % by nearest
neighbors and 77.0 % by a linear probe (Table 2).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from training.recipes.recipe import PretrainRecipe
from training.techniques.resized import Resized

# The student's temperature of the paper. That of the teacher rises to 0.07 there; 0.04 throughout is the default of the
# official code.
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
# Share of the run in which the prototypes keep their initial values: the first of the official code's 100 epochs.
_FIXED_PROTOTYPES = 0.01


class MultiCrop:
    """Student and teacher on the crops of a batch: (large crops, small crops), training -> a dict.

    Large crops (B, 2, height, width, C), small crops (B, n, h, w, C) -> "student" (2 + n, B, K), "teacher" (2, B, K).
    Without small crops, the input is the large ones alone. Call it in a `keras.StatelessScope`, which gets the new
    center.
    """

    def __init__(
        self,
        network: keras.Model,
        trained: Callable,
        averages: Sequence[keras.Variable],
        step: keras.Variable,
        recipe: PretrainRecipe,
        num_steps: int,
    ):
        """Create it under the strategy of the network.

        Args:
            network: built by the recipe.
            trained: the same network, perhaps with faster kernels.
            averages: moving averages of its trainable variables, the weights of the teacher.
            step: training steps done.
            recipe: of the run.
            num_steps: of the run.

        Raises UserError for a model whose weights depend on the image size in other ways than learned positions do.
        """
        self._network, self._trained, self._averages = network, trained, averages
        self._accumulation = recipe.accumulation
        self._step, self._fixed_steps = step, round(_FIXED_PROTOTYPES * num_steps)
        self._prototypes, self._center = network.get_layer("prototypes").kernel, network.get_layer("center")
        self._small: Callable | None = None
        size = (recipe.local_size, recipe.local_size)
        if recipe.local_crops and size == recipe.image_size:
            self._small = trained
        elif recipe.local_crops:
            small = dataclasses.replace(recipe, image_size=size, local_crops=0)
            self._small = Resized(network, lambda: small.build(num_classes=0))

    def __call__(self, images, training):
        large, small = images if self._small is not None else (images, None)
        with keras.StatelessScope(list(zip(self._network.trainable_variables, self._averages, strict=True))):
            outputs = self._trained(_crop_by_crop(large), training=False)
        teacher = tf.stop_gradient(_split(outputs["teacher"], large.shape[1]))
        self._center.update(tf.stop_gradient(outputs["student"]), self._accumulation)

        kernel = tf.convert_to_tensor(self._prototypes.value)
        # In the caller's scope this is the value that the student has, but the variable does not change.
        self._prototypes.assign(tf.where(self._step.value < self._fixed_steps, tf.stop_gradient(kernel), kernel))
        student = [_split(self._trained(_crop_by_crop(large), training=training)["student"], large.shape[1])]
        if self._small is not None:
            student.append(_split(self._small(_crop_by_crop(small), training=training)["student"], small.shape[1]))
        return {"student": tf.concat(student, axis=0), "teacher": teacher}


class SelfDistillation:
    """The divergence of the student's probabilities from those of the teacher for another crop of the same image.

    In evaluation, where the model is the moving average and sees the complete image, from its own. "entropy" is that of
    the teacher's probabilities, in nats: when it is 0 or the logarithm of the number of prototypes, the features have
    collapsed.
    """

    metrics = ("loss", "entropy")
    metric_dtype = "float32"

    def measure(self, images, labels, outputs, weights) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """As `Classification.measure`; the sums are those of loss, entropy and weights."""
        student, teacher = (tf.cast(outputs[name], tf.float32) for name in ("student", "teacher"))
        in_evaluation = len(student.shape) == 2  # (B, K)
        if in_evaluation:
            student, teacher = student[None], teacher[None]
        logarithms = tf.nn.log_softmax(teacher / TEACHER_TEMPERATURE)
        targets = tf.exp(logarithms)
        predicted = tf.nn.log_softmax(student / STUDENT_TEMPERATURE)
        losses = -tf.einsum("tbk,sbk->bts", targets, predicted)
        if in_evaluation:
            losses = losses[:, 0, 0]
        else:
            others = 1.0 - tf.eye(teacher.shape[0], student.shape[0])
            losses = tf.reduce_sum(losses * others, axis=(1, 2)) / tf.reduce_sum(others)
        entropies = -tf.reduce_mean(tf.reduce_sum(targets * logarithms, axis=-1), axis=0)
        return weights * losses, [tf.reduce_sum(x) for x in (weights * losses, weights * entropies, weights)]


def averaging_decay(start: float, num_steps: int) -> Callable:
    """Return the teacher's decay after a number of steps: from `start` to 1 along half a cosine."""

    def decay(step):
        done = tf.cast(step, tf.float32) / num_steps
        return 1.0 - (1.0 - start) * 0.5 * (1.0 + tf.cos(math.pi * done))

    return decay


def _crop_by_crop(crops: tf.Tensor) -> tf.Tensor:
    """(B, n, h, w, C) -> (n * B, h, w, C)."""
    return tf.reshape(tf.transpose(crops, (1, 0, 2, 3, 4)), (-1, *crops.shape[2:]))


def _split(outputs: tf.Tensor, count: int) -> tf.Tensor:
    """(n * B, K) -> (n, B, K)."""
    return tf.reshape(outputs, (count, -1, outputs.shape[-1]))
