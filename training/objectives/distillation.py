"""Distillation: a model learns from what a trained model, the teacher, says of the same crops and mixtures.

soft: "Knowledge distillation: A good teacher is patient and consistent" (arXiv 2106.05237): nothing but the divergence
from the teacher's probabilities; a ResNet-50 reaches 82.8 % on ImageNet. hard: DeiT (2012.12877), Table 3: a ViT-B/16
reaches 81.8 % on ImageNet without a teacher, and 83.4 % with a second token that learns the teacher's classes.
"""

import keras
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, preprocessing_of
from keras_vit.run import Run
from training.loop.devices.cpu_kernels import on_cpu, with_cpu_kernels
from training.objectives.classification import Classification
from training.objectives.objective import Objective, is_right, sums_of


def open_teacher(teacher: str, student: keras.Model) -> keras.Model:
    """Load a teacher under the strategy that is in scope: images in the range of the student -> logits (B, K).

    A teacher is a run directory, .keras file, or checkpoint of any layout, by path, address or official name. Raises
    UserError if its images or classes are not those of the student.
    """
    model = Run.open(teacher).model
    own, other = preprocessing_of(student), preprocessing_of(model)
    if (own.image_size, own.channels) != (other.image_size, other.channels):
        sizes = f"sees images of {_shown(other)}, but this model those of {_shown(own)}"
        raise UserError(f"The teacher {teacher} {sizes}; give another teacher, or --image-size.")
    classes = student.output_shape[-1]
    if model.output_shape != (None, classes) or "logits" not in keras_vit.intermediates(model).output:
        shape = f"must have a head of {classes} classes, but its output has the shape {model.output_shape}"
        raise UserError(f"The teacher {teacher} {shape}; give one that was trained on these classes.")
    images = keras.Input(student.input_shape[1:])
    network = with_cpu_kernels(model) if on_cpu() else model
    return keras.Model(images, network(rescaled(images, own, other)), name="teacher")


class SoftDistillation(Objective):
    """The divergence of the model's probabilities from those of the teacher; logits (B, K).

    The temperature divides both logits; the loss is multiplied by its square ("Distilling the Knowledge in a Neural
    Network", 1503.02531). The smoothed labels count only for the evaluation.
    """

    def __init__(self, teacher: str, label_smoothing: float, temperature: float = 1.0):
        self._name, self._label_smoothing, self._temperature = teacher, label_smoothing, temperature
        self.uncounted = (f"the weights and the forward pass of the teacher {teacher}",)

    @classmethod
    def of(cls, recipe, num_steps):
        return None if recipe.teacher is None else cls(recipe.teacher, recipe.label_smoothing, recipe.temperature)

    def prepare(self, model):
        self._teacher = open_teacher(self._name, model)
        return model

    def evaluation(self):
        return Classification("softmax", self._label_smoothing)

    def measure(self, images, labels, outputs, weights):
        logits = tf.cast(outputs, tf.float32)
        expected = tf.nn.log_softmax(self._teacher_logits(images) / self._temperature)
        own = tf.nn.log_softmax(logits / self._temperature)
        losses = self._temperature**2 * tf.reduce_sum(tf.exp(expected) * (expected - own), axis=-1)  # (B,)
        return sums_of(losses, is_right(logits, labels), weights)

    def _teacher_logits(self, images) -> tf.Tensor:
        return tf.stop_gradient(tf.cast(self._teacher(images, training=False), tf.float32))


class HardDistillation(SoftDistillation):
    """The class token learns the labels, the distillation token the teacher's classes, by half each."""

    @classmethod
    def of(cls, recipe, num_steps):
        return super().of(recipe, num_steps) if recipe.distillation == "hard" else None

    def prepare(self, model):
        """Open the teacher. Raises UserError for a model without the second head."""
        config = keras_vit.config_of(model)
        if not isinstance(config, ViTConfig) or config.distillation != "head":
            other = "give --model.distillation head or a distilled checkpoint, or --distillation soft"
            raise UserError(f"--distillation hard trains the head of a second token, which is not here; {other}.")
        return super().prepare(model)

    def forwards(self, network, trained, step, averages):
        """Return the model with the logits (B, K) of both tokens as its outputs, instead of their mean."""
        heads = [trained.get_layer(name).output for name in ("head", "head_distillation")]
        return [keras.Model(trained.input, heads)]

    def measure(self, images, labels, outputs, weights):
        by_label, by_teacher = (tf.cast(logits, tf.float32) for logits in outputs)
        classes = tf.argmax(self._teacher_logits(images), axis=-1)  # (B,)
        losses = 0.5 * keras.losses.categorical_crossentropy(labels, by_label, True, self._label_smoothing)
        losses += 0.5 * tf.nn.sparse_softmax_cross_entropy_with_logits(classes, by_teacher)
        return sums_of(losses, is_right(by_label + by_teacher, labels), weights)


def rescaled(images, own: Preprocessing, other: Preprocessing):
    """Images in the value range of the student -> in that of the teacher."""
    if own.channel_ranges() == other.channel_ranges():
        return images
    (low, high), (new_low, new_high) = (map(tf.constant, each.channel_ranges()) for each in (own, other))
    return (images - low) * ((new_high - new_low) / (high - low)) + new_low


def _shown(preprocessing: Preprocessing) -> str:
    height, width = preprocessing.image_size
    return f"{height}x{width} pixels in {preprocessing.channels} channels"
