"""The class of the models: a functional keras.Model that warns of two mistakes which training does not show.

Pixels of another range than the model's, and a loss of probabilities on logits, train without an error to a loss near
ln K, that of guessing among K classes.
"""

import inspect
import sys
import warnings
from typing import Any

import keras
import numpy as np

from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.layers import PACKAGE, ModelSpec

# Images of the first batch that are looked at, and every how many of their rows and columns.
_IMAGES, _STEP = 32, 4


@keras.saving.register_keras_serializable(PACKAGE)
class ImageModel(keras.Model):
    """A functional keras.Model from images to logits, probabilities or features; see `keras_vit.build`.

    `fit` warns of a loss that expects probabilities if the model ends with logits, and of arrays or a tf.data.Dataset
    whose first images are not in the range of the model's preprocessing; `predict` warns of such arrays. Neither
    changes what is computed: a PyDataset is not read, since that may draw random numbers, nor the data of several
    replicas, which are divided by their graph.
    """

    def fit(self, x=None, *args, **kwargs):
        if _expects_probabilities(self.loss) and _ends_with_logits(self):
            loss = getattr(self.loss, "name", getattr(self.loss, "__name__", str(self.loss)))
            warnings.warn(
                f"The loss {loss!r} expects probabilities, but this model ends with logits, so it does not "
                "learn; use the loss's class with from_logits=True, or build the model with "
                'classifier_activation="softmax" ("sigmoid" for several classes per image).',
                stacklevel=2,
            )
        preprocessing = _preprocessing(self)
        is_divided = keras.backend.backend() == "tensorflow" and self.distribute_strategy.num_replicas_in_sync > 1
        if preprocessing is not None and not is_divided:
            x = _with_checked_range(x, preprocessing)
        return super().fit(x, *args, **kwargs)

    def predict(self, x, *args, **kwargs):
        preprocessing = _preprocessing(self)
        if preprocessing is not None and (isinstance(x, np.ndarray) or keras.ops.is_tensor(x)):
            _check_range(x[:_IMAGES], preprocessing)
        return super().predict(x, *args, **kwargs)


def _preprocessing(model: keras.Model) -> Preprocessing | None:
    spec = next((layer for layer in model.layers if isinstance(layer, ModelSpec)), None)
    return None if spec is None else Preprocessing.saved(spec.preprocessing)


def _expects_probabilities(loss) -> bool:
    """Whether a loss of one output has an argument from_logits, which is False."""
    if isinstance(loss, keras.losses.Loss):
        return loss.get_config().get("from_logits") is False
    try:
        function = keras.losses.get(loss) if isinstance(loss, str) else loss
        return inspect.signature(function).parameters["from_logits"].default is False
    except (KeyError, TypeError, ValueError):  # none, or another loss; Keras refuses what is no loss
        return False


def _ends_with_logits(model: keras.Model) -> bool:
    last = next((each for each in model.operations if len(model.outputs) == 1 and each.output is model.output), None)
    return isinstance(last, keras.layers.Dense) and last.activation is keras.activations.linear


def _with_checked_range(data: Any, preprocessing: Preprocessing) -> Any:
    """The argument `x` of `fit`, the same data; warn if the first images are in another range than the model's.

    The first batch of a tf.data.Dataset is looked at when training reads it, since to read it twice could take as long
    as filling its shuffle buffer.
    """
    if isinstance(data, np.ndarray) or keras.ops.is_tensor(data):
        _check_range(data[:_IMAGES], preprocessing)
    elif "tensorflow" in sys.modules and isinstance(data, (tf := sys.modules["tensorflow"]).data.Dataset):
        return _with_checked_first_batch(data, preprocessing, tf)
    return data


def _with_checked_first_batch(dataset, preprocessing: Preprocessing, tf):
    first = tf.nest.flatten(dataset.element_spec)[:1]
    if not first or not isinstance(first[0], tf.TensorSpec) or first[0].shape.rank != 4:
        return dataset

    unseen = iter([True])  # the data set is read again in each epoch, and by several threads at once on JAX

    def check(images) -> None:
        if next(unseen, False):
            _check_range(images, preprocessing)

    def look(index, batch):
        images = tf.nest.flatten(batch)[0][:_IMAGES, ::_STEP, ::_STEP]
        tf.cond(index == 0, lambda: tf.numpy_function(check, [images], []), tf.no_op)
        return batch

    return dataset.enumerate().map(look)


def _check_range(batch: Any, preprocessing: Preprocessing) -> None:
    """Warn if images, the first part of a batch, cannot be what the preprocessing makes of pixels 0 to 255."""
    images = batch[0] if isinstance(batch, tuple | list) else batch
    if not hasattr(images, "shape") or len(images.shape) != 4:
        return
    images = keras.ops.convert_to_numpy(images[:_IMAGES, ::_STEP, ::_STEP]).astype(np.float32)
    low, high = float(np.min(preprocessing.value_range[0])), float(np.max(preprocessing.value_range[1]))
    least, most = (float(images.min()), float(images.max())) if images.size else (low, high)
    margin = (high - low) / 2
    outside = least < low - margin or most > high + margin
    # Images of 0 to 1 are inside of wider ranges, too; a batch that is constant throughout is no photograph.
    from_0_to_1 = least >= 0 and 0.5 < most <= 1 and least < most and (low < -0.5 or high > 2)
    if outside or from_0_to_1:
        warnings.warn(
            f"The images of the first batch have values from {least:.4g} to {most:.4g}, but this model was made for "
            f"{low:.4g} to {high:.4g}; from pixels of 0 to 255, keras_vit.preprocessing_of(model).normalize(images) "
            "computes them.",
            stacklevel=2,
        )
