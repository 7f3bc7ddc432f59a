"""Distillation of features: a small model learns the class token and the patch tokens of a large one, without labels.

The losses are those of "AM-RADIO: Agglomerative Vision Foundation Model" (arXiv 2312.06709), section 3.3: the cosine
for the summary of an image; 0.9 times the cosine and 0.1 times the smooth L1 distance for its patches. The model has a
linear projection of each to the width of the teacher, which the trained model leaves out.

Each channel of the teacher's features has mean 0 and deviation 1, as in "UNIC: Universal Classification Models via
Multi-teacher Distillation" (arXiv 2408.05088) and its code (naver/unic `utils.standard_normalize`). The mean is most of
what a published model says of any image: two random images of CIFAR-10 have a cosine of 0.72 by DINOv2-S
at 112 pixels.
"""

import copy

import keras
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, preprocessing_of
from keras_vit.models.layers import TokenDense
from keras_vit.run import Run
from training.loop.devices.cpu_kernels import on_cpu, with_cpu_kernels
from training.objectives.distillation import rescaled
from training.objectives.objective import Objective, sums_of

# Shares of the two losses of the patches.
_COSINE, _SMOOTH_L1 = 0.9, 0.1
# Of the moving statistics of the teacher, which remember about 100 batches, or micro-batches. A choice of ours: UNIC's
# share of the newest batch falls from 1 to 0.001 over the run.
_MOMENTUM = 0.99


def summary_and_patches(model: keras.Model) -> keras.Model:
    """Images -> "summary" (B, D), what a head reads, and "patches" (B, h, w, D), normalized where the model does it.

    Of a ResNet, the patches are the last feature map. Raises UserError for a model without one vector per image.
    """
    config = keras_vit.config_of(model)
    if not isinstance(config, ViTConfig):
        pooled = model.get_layer("pool")
        return keras.Model(model.input, {"summary": pooled.output, "patches": pooled.input})
    if config.classifier in ("none", "unpooled"):
        raise UserError(f"A model with the classifier {config.classifier!r} has no vector for the whole image.")
    tokens = f"block_{config.num_layers - 1}" if config.norm_after_pooling else "encoded"
    summary = keras_vit.intermediates(model, ["pre_logits"]).output["pre_logits"]
    return keras.Model(model.input, {"summary": summary, "patches": keras_vit.feature_map(model, tokens).output})


class TeacherStatistics(keras.layers.Layer):
    """Moving mean and deviation of each channel of a teacher's features (..., D); what it is called on stays as it is.

    In the student, so that they are saved with its weights. They are sums with decreasing weights, divided by the sum
    of these, and so exact from the first step on.
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

    def update(self, x: tf.Tensor) -> None:
        """Move the statistics toward those of features (..., D)."""
        axes = list(range(len(x.shape) - 1))
        means = tf.reduce_mean(x, axes), tf.reduce_mean(tf.square(x), axes), 1.0
        for variable, mean in zip(self.statistics, means, strict=True):
            variable.assign(_MOMENTUM * variable + (1.0 - _MOMENTUM) * mean)

    def standardized(self, x: tf.Tensor) -> tf.Tensor:
        """(..., D) -> the same, with mean 0 and deviation 1 in each channel by the statistics."""
        total, squares, weight = (tf.convert_to_tensor(variable.value) for variable in self.statistics)
        mean = tf.math.divide_no_nan(total, weight)
        variance = tf.maximum(tf.math.divide_no_nan(squares, weight) - tf.square(mean), 0.0)
        return (x - mean) / (tf.sqrt(variance) + 1e-6)


def feature_student(network: keras.Model, teacher: keras.Model) -> keras.Model:
    """The model to train: the features of a network without a head, projected to the widths of those of the teacher."""
    projected = {}
    for name, x in summary_and_patches(network).output.items():
        width = teacher.output[name].shape[-1]
        options = {"kernel_initializer": "lecun_normal", "dtype": network.layers[-1].dtype_policy}
        x = TokenDense(width, name=f"{name}_projection", **options)(x)
        projected[name] = TeacherStatistics(name=f"{name}_statistics", dtype=network.layers[-1].dtype_policy)(x)
    return keras.Model(network.input, projected, name=network.name)


def open_feature_teacher(teacher: str, own: Preprocessing) -> keras.Model:
    """Load a teacher under the strategy that is in scope: images in the range and size of the student -> its features.

    It sees the images in its own range and size; of a published checkpoint, the size of the original's preprocessing.
    `own` is the preprocessing of the student. Raises UserError if it takes gray images, but the student colors.
    """
    model = Run.open(teacher).model
    other = preprocessing_of(model)
    if other.channels < own.channels:
        raise UserError(f"The teacher {teacher} sees gray images, but this model colors; give --channels 1.")
    images = keras.Input((*own.image_size, own.channels))
    x = images
    if own.image_size != other.image_size:
        x = keras.ops.image.resize(x, other.image_size, antialias=True, data_format="channels_last")
    features = summary_and_patches(model)
    network = with_cpu_kernels(features) if on_cpu() else features
    return keras.Model(images, network(rescaled(x, own, other)), name="teacher")


class FeatureDistillation(Objective):
    """The distances of the projected features from the standardized ones of the teacher.

    The metric "cosine" is that of the summaries. In evaluation, the statistics of the teacher stay as they are.
    """

    metrics = ("loss", "cosine")
    metric_dtype = "float32"

    def __init__(self, teacher: str):
        self._name, self._in_training = teacher, True
        self.uncounted = (f"the weights and the forward pass of the teacher {teacher}",)

    @classmethod
    def of(cls, recipe, num_steps):
        return cls(recipe.teacher) if recipe.distillation == "features" else None

    def prepare(self, model):
        self._teacher = open_feature_teacher(self._name, preprocessing_of(model))
        self._student = feature_student(model, self._teacher)
        return self._student

    def evaluation(self):
        same = copy.copy(self)
        same._in_training = False
        return same

    def measure(self, images, labels, outputs, weights):
        expected = {}
        for name, x in self._teacher(images, training=False).items():
            statistics = self._student.get_layer(f"{name}_statistics")
            features = tf.stop_gradient(tf.cast(x, tf.float32))
            if self._in_training:
                statistics.update(features)
            expected[name] = tf.stop_gradient(statistics.standardized(features))
        losses, cosines = feature_losses(outputs, expected)
        return sums_of(losses, cosines, weights)


def feature_losses(student: dict[str, tf.Tensor], expected: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss of each image (B,), and the cosine of its summaries (B,).

    The grid of the expected patches is resized to that of the student's, bilinearly and without antialiasing, as
    torch's `interpolate(mode="bilinear", align_corners=False)` does.
    """
    student, expected = (tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), each) for each in (student, expected))
    cosines, patches = _cosine(student["summary"], expected["summary"]), student["patches"]
    wanted = tf.image.resize(expected["patches"], patches.shape[1:3], "bilinear")
    difference = tf.abs(patches - wanted)
    smooth = tf.where(difference < 1.0, 0.5 * tf.square(difference), difference - 0.5)
    of_patches = 1.0 - tf.reduce_mean(_cosine(patches, wanted), axis=(1, 2))
    losses = 1.0 - cosines + _COSINE * of_patches + _SMOOTH_L1 * tf.reduce_mean(smooth, axis=(1, 2, 3))
    return losses, cosines


def _cosine(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """(…, D) -> (…); 0 for a vector of zeros."""
    return tf.reduce_sum(tf.nn.l2_normalize(one, axis=-1) * tf.nn.l2_normalize(other, axis=-1), axis=-1)
