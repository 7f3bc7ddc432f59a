"""The signatures of the embeddings of images.

embed         image_bytes (B,) image files of any size -> embeddings (B, D)
embed_tensor  image (B, h, w, C) float32 in the model's range -> embeddings (B, D)
"""

import pathlib

import numpy as np
import tensorflow as tf

from export.files import save_module
from export.inference_model import inference_model
from export.saved_model.image_decoding import decode_batch
from export.saved_model.signatures import add_shapes
from export.tasks import Measures, Task, TaskReference

TENSOR = "embed_tensor"


def write(task: Task, path: pathlib.Path) -> None:
    """Write signatures and weights."""
    preprocessing = task.exported.preprocessing
    model = task.network(inference_model(task.exported.model, for_tensorflow=True))
    shape = (*preprocessing.image_size, preprocessing.channels)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32, name="image")])
    def embed_tensor(image):
        return model(tf.ensure_shape(image, (None, *shape)), training=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.string, name="image_bytes")])
    def embed(image_bytes):
        return embed_tensor(decode_batch(tf.ensure_shape(image_bytes, (None,)), preprocessing))

    module = tf.Module()
    module.weights = [weight.value for weight in model.weights]
    functions = {"embed": embed.get_concrete_function(), "embed_tensor": embed_tensor.get_concrete_function()}
    save_module(module, path, functions)
    add_shapes(path, shape)


def measure_files(task: Task, expected: TaskReference, signatures) -> Measures:
    """Nothing to report. Raises ParityError unless files give the embeddings of the Keras model."""
    batches = [signatures["embed"](image_bytes=tf.constant(files)) for files, _ in expected.samples.batches()]
    found = [{"embeddings": row} for row in np.concatenate([batch["embeddings"] for batch in batches])]
    task.measure("SavedModel with encoded images", expected.outputs, found, exact=True)
    return {}
