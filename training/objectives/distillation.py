"""Distillation: a model learns from what a trained model, the teacher, says of the same crops and mixtures.

soft: "Knowledge distillation: A good teacher is patient and consistent" (arXiv 2106.05237): nothing but the divergence
from the teacher's probabilities; a ResNet-50 reaches 82.8% on ImageNet. hard: DeiT (2012.12877), Table 3: a ViT-B/16
reaches 81.8% on ImageNet without a teacher, and 83.4% with a second token that learns the teacher's classes.

features: a small model learns the class token and the patch tokens of a large one, without labels, by the losses of
"AM-RADIO: Agglomerative Vision Foundation Model" (arXiv 2312.06709), section 3.3: the cosine for the summary of an
image; 0.9 times the cosine and 0.1 times the smooth L1 distance for its patches. The model has a linear projection of
each to the width of the teacher, which the trained model leaves out. Each channel of the teacher's features has mean 0
and deviation 1, as in "UNIC: Universal Classification Models via Multi-teacher Distillation" (arXiv 2408.05088) and its
code (naver/unic `utils.standard_normalize`): the mean is most of what a published model says of any image.
"""

import copy

import keras
import numpy as np
from keras import ops

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, preprocessing_of
from keras_vit.models.layers import TokenDense
from keras_vit.run import Run
from training.loop.devices.kernels import fast_here
from training.objectives.objective import Classification, Objective, is_right, sums_of

# Shares of the two losses of the patches.
_COSINE, _SMOOTH_L1 = 0.9, 0.1
# Of the moving statistics of the teacher, which remember about 100 batches, or micro-batches. A choice of ours: UNIC's
# share of the newest batch falls from 1 to 0.001 over the run.
_MOMENTUM = 0.99


class SoftDistillation(Objective):
    """The divergence of the model's probabilities from those of the teacher; logits (B, K).

    The temperature divides both logits; the loss is multiplied by its square ("Distilling the Knowledge in a Neural
    Network", 1503.02531). The smoothed labels count only for the evaluation.
    """

    def __init__(self, teacher: str, label_smoothing: float, temperature: float = 1.0):
        self._name, self._label_smoothing, self._temperature = teacher, label_smoothing, temperature
        self.uncounted = (f"the weights and the forward pass of the teacher {teacher}",)

    def prepare(self, model):
        self._teacher = _open_teacher(self._name, model)
        self._teacher.trainable = False
        self.constants = self._teacher.variables
        return model

    def evaluation(self):
        return Classification("softmax", self._label_smoothing)

    def measure(self, images, labels, outputs, weights):
        logits = ops.cast(outputs, "float32")
        expected = ops.log_softmax(self._teacher_logits(images) / self._temperature)
        own = ops.log_softmax(logits / self._temperature)
        losses = self._temperature**2 * ops.sum(ops.exp(expected) * (expected - own), axis=-1)  # (B,)
        return sums_of(losses, is_right(logits, labels), weights)

    def _teacher_logits(self, images):
        return ops.stop_gradient(ops.cast(self._teacher(images, training=False), "float32"))


class HardDistillation(SoftDistillation):
    """The class token learns the labels, the distillation token the teacher's classes, by half each."""

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
        by_label, by_teacher = (ops.cast(logits, "float32") for logits in outputs)
        classes = ops.argmax(self._teacher_logits(images), axis=-1)  # (B,)
        losses = 0.5 * keras.losses.categorical_crossentropy(labels, by_label, True, self._label_smoothing)
        losses += 0.5 * ops.sparse_categorical_crossentropy(classes, by_teacher, from_logits=True)
        return sums_of(losses, is_right(by_label + by_teacher, labels), weights)


def _open_teacher(teacher: str, student: keras.Model) -> keras.Model:
    """Load a teacher: images in the range of the student -> logits (B, K). Raises UserError for one of others."""
    model, classes = Run.open(teacher).model, student.output_shape[-1]
    own, other = preprocessing_of(student), preprocessing_of(model)
    wrong = ""
    if (own.image_size, own.channels) != (other.image_size, other.channels):
        wrong = f"sees images of {other.image_size} pixels in {other.channels} channels, but this model those of "
        wrong += f"{own.image_size} in {own.channels}"
    elif model.output_shape != (None, classes) or "logits" not in keras_vit.intermediates(model).output:
        wrong = f"must have a head of {classes} classes, but its output has the shape {model.output_shape}"
    if wrong:
        raise UserError(f"The teacher {teacher} {wrong}; give one of the same classes and --image-size.")
    return _seeing(model, own, other)


def _seeing(teacher: keras.Model, own: Preprocessing, other: Preprocessing) -> keras.Model:
    """Return a teacher that takes the student's images; `other` is its own preprocessing."""
    images = keras.Input((*own.image_size, own.channels))
    x = images
    if own.image_size != other.image_size:
        x = ops.image.resize(x, other.image_size, antialias=True, data_format="channels_last")
    if own.channel_ranges() != other.channel_ranges():
        (low, high), (new_low, new_high) = (np.array(each.channel_ranges(), np.float32) for each in (own, other))
        x = (x - low) * ((new_high - new_low) / (high - low)) + new_low
    return keras.Model(images, fast_here(teacher)(x), name="teacher")


def summary_and_patches(model: keras.Model) -> keras.Model:
    """Images -> "summary" (B, D), what a head reads, and "patches" (B, h, w, D), normalized where the model does it.

    Of a ResNet, the patches are the last feature map. Raises UserError for a model without one vector per image.
    """
    config = keras_vit.config_of(model)
    if not isinstance(config, ViTConfig):
        pooled = model.get_layer("pool")
        return keras.Model(model.input, {"summary": pooled.output, "patches": pooled.input})
    tokens = f"block_{config.num_layers - 1}" if config.norm_after_pooling else "encoded"
    summary = keras_vit.intermediates(model, ["pre_logits"]).output["pre_logits"]
    return keras.Model(model.input, {"summary": summary, "patches": keras_vit.feature_map(model, tokens).output})


class TeacherStatistics(keras.layers.Layer):
    """Moving mean and deviation of each channel of a teacher's features (..., D); what it is called on stays as it is.

    In the student, so that they are saved with its weights. They are sums with decreasing weights, divided by the sum
    of these, and so exact from the first step on. As in UNIC, a step standardizes by the statistics of those before it,
    the first one by none.
    """

    def build(self, input_shape):
        width = input_shape[-1:]
        self.total = self.add_weight(name="total", shape=width, initializer="zeros", trainable=False)
        self.squares = self.add_weight(name="squares", shape=width, initializer="zeros", trainable=False)
        self.weight = self.add_weight(name="weight", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return x

    @property
    def statistics(self) -> list[keras.Variable]:
        return [self.total, self.squares, self.weight]

    def update(self, x) -> None:
        """Move the statistics toward those of features (..., D)."""
        axes = list(range(len(x.shape) - 1))
        means = ops.mean(x, axes), ops.mean(ops.square(x), axes), 1.0
        for variable, mean in zip(self.statistics, means, strict=True):
            variable.assign(_MOMENTUM * variable + (1.0 - _MOMENTUM) * mean)

    def standardized(self, x):
        """(..., D) -> the same, with mean 0 and deviation 1 in each channel by the statistics."""
        total, squares, weight = (variable.value for variable in self.statistics)
        mean = ops.divide_no_nan(total, weight)
        variance = ops.maximum(ops.divide_no_nan(squares, weight) - ops.square(mean), 0.0)
        variance = ops.where(weight > 0.0, variance, 1.0)
        return (x - mean) / (ops.sqrt(variance) + 1e-6)


def feature_student(network: keras.Model, teacher: keras.Model) -> keras.Model:
    """The model to train: the features of a network without a head, projected to the widths of those of the teacher."""
    projected, policy = {}, network.layers[-1].dtype_policy
    for name, x in summary_and_patches(network).output.items():
        width = teacher.output[name].shape[-1]
        x = TokenDense(width, name=f"{name}_projection", kernel_initializer="lecun_normal", dtype=policy)(x)
        projected[name] = TeacherStatistics(name=f"{name}_statistics", dtype=policy)(x)
    return keras.Model(network.input, projected, name=network.name)


def open_feature_teacher(teacher: str, own: Preprocessing) -> keras.Model:
    """Load a teacher: images in the range and size of the student, whose preprocessing is `own` -> its features.

    It sees the images in its own range and size. Raises UserError if it takes gray images, but the student colors.
    """
    model = Run.open(teacher).model
    other = preprocessing_of(model)
    if other.channels < own.channels:
        raise UserError(f"The teacher {teacher} sees gray images, but this model colors; give --channels 1.")
    return _seeing(summary_and_patches(model), own, other)


class FeatureDistillation(Objective):
    """The distances of the projected features from the standardized ones of the teacher.

    The metric "cosine" is that of the summaries. In evaluation, the statistics of the teacher stay as they are.
    """

    metrics = ("loss", "cosine")
    metric_dtype = "float32"
    without_remat = "--distillation features"

    def __init__(self, teacher: str):
        self._name, self._in_training = teacher, True
        self.uncounted = (f"the weights and the forward pass of the teacher {teacher}",)

    def prepare(self, model):
        self._teacher = open_feature_teacher(self._name, preprocessing_of(model))
        self._teacher.trainable = False
        self.constants = self._teacher.variables
        self._student = feature_student(model, self._teacher)
        return self._student

    def evaluation(self):
        same = copy.copy(self)
        same._in_training = False
        return same

    def whole_batch(self, targets, weights, total):
        # Statistics as before the step, so that all replicas and micro-batches standardize alike.
        self._before = {
            name: [variable.value for variable in self._student.get_layer(f"{name}_statistics").statistics]
            for name in self._student.output
        }
        return targets

    def measure(self, images, labels, outputs, weights):
        expected = {}
        for name, x in self._teacher(images, training=False).items():
            statistics = self._student.get_layer(f"{name}_statistics")
            features = ops.stop_gradient(ops.cast(x, "float32"))
            with keras.StatelessScope(list(zip(statistics.statistics, self._before[name], strict=True))):
                expected[name] = ops.stop_gradient(statistics.standardized(features))
            if self._in_training:
                statistics.update(features)
        losses, cosines = feature_losses(outputs, expected)
        return sums_of(losses, cosines, weights)


def feature_losses(student: dict, expected: dict) -> tuple:
    """The loss of each image (B,), and the cosine of its summaries (B,).

    The grid of the expected patches is resized to that of the student's, bilinearly and without antialiasing, as
    torch's `interpolate(mode="bilinear", align_corners=False)` does.
    """
    student, expected = (
        keras.tree.map_structure(lambda x: ops.cast(x, "float32"), each) for each in (student, expected)
    )
    cosines, patches = _cosine(student["summary"], expected["summary"]), student["patches"]
    wanted = ops.image.resize(expected["patches"], patches.shape[1:3], data_format="channels_last")
    difference = ops.abs(patches - wanted)
    smooth = ops.where(difference < 1.0, 0.5 * ops.square(difference), difference - 0.5)
    of_patches = 1.0 - ops.mean(_cosine(patches, wanted), axis=(1, 2))
    losses = 1.0 - cosines + _COSINE * of_patches + _SMOOTH_L1 * ops.mean(smooth, axis=(1, 2, 3))
    return losses, cosines


def _cosine(one, other):
    """(…, D) -> (…); 0 for a vector of zeros."""
    one, other = (x * ops.rsqrt(ops.maximum(ops.sum(ops.square(x), -1, True), 1e-12)) for x in (one, other))
    return ops.sum(one * other, axis=-1)
