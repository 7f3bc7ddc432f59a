"""The peers of the comparison: the models and exports of this project, and the same models in other libraries.

Each peer is a function that takes a case and returns a call of one batch or one training step. Only the call is timed.
A peer runs in its own process and imports its own framework. All weights are random; the tests check the numbers.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable

import numpy as np

from benchmarks.case import NUM_CLASSES, Call, Case, random_images, set_tensorflow_threads
from benchmarks.exported_peers import (
    keras_vit_onnx,
    keras_vit_openvino,
    keras_vit_saved_model,
    keras_vit_tflite,
    keras_vit_tflite_int8,
)

# Side of the square matrices whose product is the limit of the machine: large enough to make overhead negligible.
SIDE = {"cpu": 3072, "gpu": 8192}
_TIMM = {
    "ViT-Ti_16": "vit_tiny_patch16_224",
    "ViT-S_16": "vit_small_patch16_224",
    "ViT-B_16": "vit_base_patch16_224",
    "ViT-L_16": "vit_large_patch16_224",
    "ViT-H_14": "vit_huge_patch14_224",
    "BiT-R50x1": "resnetv2_50x1_bit",
    "R50+ViT-B_16": "vit_base_r50_s16_224",
}


def matrix_product(case: Case) -> Call:
    """The product of two large matrices by TensorFlow, on a GPU by torch: 2 * side**3 operations."""
    side = SIDE[case.device]
    if case.device == "gpu":
        import torch

        a, b = (torch.randn(side, side, device="cuda").to(getattr(torch, case.precision)) for _ in range(2))
        return lambda: (a @ b)[0].sum().item()

    import tensorflow as tf

    set_tensorflow_threads(case)
    dtype = tf.dtypes.as_dtype(case.precision)
    a, b = (tf.cast(tf.random.stateless_normal((side, side), (0, i)), dtype) for i in range(2))
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(a, b)[0]))
    return lambda: product().numpy()


def keras_vit(case: Case) -> Call:
    """The Keras model in a tf.function, or the training step of `training.loop.trainer`."""
    import keras
    import tensorflow as tf

    import keras_vit

    if case.device == "cpu":
        set_tensorflow_threads(case)
    elif not tf.config.list_physical_devices("GPU"):
        raise RuntimeError("TensorFlow sees no GPU")
    if case.task == "training":
        return _training_step(case)
    keras.config.set_dtype_policy(case.precision)
    return _forward(case, keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES))


def _policy(case: Case) -> str:
    """Return the dtype policy of Keras; bfloat16 is mixed precision in training."""
    return f"mixed_{case.precision}" if case.task == "training" and case.precision != "float32" else case.precision


def _forward(case: Case, model) -> Call:
    import tensorflow as tf

    forward, images = (
        tf.function(lambda x: model(x, training=False), jit_compile=case.device == "gpu"),
        tf.constant(random_images(case)),
    )
    return lambda: forward(images).numpy()


def _training_step(case: Case) -> Call:
    import tensorflow as tf

    from keras_vit import MODELS, build
    from training.loop.optimizers import make_optimizer
    from training.loop.trainer import Trainer
    from training.objectives.objective import Classification
    from training.options.common import Execution
    from training.recipes.pretrain import find_recipe

    model = build(MODELS[case.model], image_size=case.size, num_classes=NUM_CLASSES, dtype=_policy(case))
    recipe = dataclasses.replace(find_recipe("digits"), batch_size=case.batch)
    trainer = Trainer(model, recipe, objective=Classification("softmax"), execution=Execution())
    with_xla = case.device == "gpu"  # as `pretrain` compiles it
    trainer.compile(make_optimizer("adamw", model, 1e-4, clip_norm=None, weight_decay=0.1), jit_compile=with_xla)
    labels = tf.one_hot(np.arange(case.batch), NUM_CLASSES)
    images, step = tf.constant(random_images(case)), tf.function(trainer.train_step, jit_compile=with_xla)
    return lambda: step((images, labels))["loss"].numpy()


def keras_vit_jax(case: Case) -> Call:
    """The Keras model on the JAX backend, or the training step of `training.pretrain` there."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # no other process uses the device
    import jax
    import keras

    import keras_vit

    if case.task == "training":
        return _jax_step(case)
    keras.config.set_dtype_policy(case.precision)
    model = keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES)
    weights, others = ([v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables))
    forward = jax.jit(lambda weights, images: model.stateless_call(weights, others, images, training=False)[0])
    images = jax.device_put(random_images(case)).astype(case.precision)
    return lambda: np.asarray(forward(weights, images))


def _jax_step(case: Case) -> Call:
    import keras_vit
    from training.loop.build import build_trainer
    from training.loop.devices.jax_devices import batch_on_devices
    from training.loop.devices.strategies import open_strategy
    from training.options.common import Execution, StrategyOptions
    from training.recipes.recipe import Recipe

    recipe = Recipe(
        image_size=(case.size, case.size),
        batch_size=case.batch,
        learning_rate=1e-4,
        steps=1,
        weight_decay=0.1,
        clip_norm=None,
    )
    strategy = open_strategy(StrategyOptions())  # which leaves the GPU to JAX
    trainer = build_trainer(
        lambda: keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES),
        recipe,
        1,
        execution=Execution(precision=case.precision),
        strategy=strategy,
    )
    trainer.make_train_function()
    labels = np.eye(NUM_CLASSES, dtype=np.float32)[np.arange(case.batch) % NUM_CLASSES]
    batches = itertools.repeat(tuple(batch_on_devices(rows) for rows in (random_images(case), labels)))
    return lambda: float(trainer.train_steps(batches, 1)["loss"])


def keras_hub(case: Case) -> Call:
    """The ViT of keras-hub in a tf.function; training uses `train_on_batch` and the AdamW of Keras."""
    import keras
    import keras_hub

    from keras_vit import MODELS

    set_tensorflow_threads(case)
    keras.config.set_dtype_policy(_policy(case))
    config = MODELS[case.model]
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(case.size, case.size, 3),
        patch_size=config.patch,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_size,
        mlp_dim=config.mlp_dim,
    )
    model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=NUM_CLASSES, preprocessor=None)
    if case.task == "inference":
        return _forward(case, model)
    model.compile(
        keras.optimizers.AdamW(1e-4, weight_decay=0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    images, labels = random_images(case), np.arange(case.batch)
    return lambda: model.train_on_batch(images, labels)


def transformers(case: Case, *, compiled: bool = False) -> Call:
    """The ViT of transformers on torch, with fused attention."""
    from transformers import ViTConfig, ViTForImageClassification

    from keras_vit import MODELS

    config = MODELS[case.model]
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim,
            patch_size=config.patch[0],
            image_size=case.size,
            num_labels=NUM_CLASSES,
            hidden_dropout_prob=config.dropout_rate,
        )
    )
    return _torch_call(case, model, lambda model, images: model(images).logits, compiled=compiled)


def transformers_compiled(case: Case) -> Call:
    """The same under torch.compile."""
    return transformers(case, compiled=True)


def timm(case: Case, *, compiled: bool = False) -> Call:
    """The model of timm on torch, with fused attention."""
    return _torch_call(case, timm_model(case), lambda model, images: model(images), compiled=compiled)


def timm_compiled(case: Case) -> Call:
    """The same under torch.compile."""
    return timm(case, compiled=True)


def timm_model(case: Case):
    """The model of timm with random weights and the same dropout. Raises KeyError if timm has none of this name."""
    import timm

    from keras_vit import MODELS, ViTConfig

    options: dict = {"pretrained": False, "num_classes": NUM_CLASSES}
    if isinstance(config := MODELS[case.model], ViTConfig):
        rates = dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), config.dropout_rate)
        options |= {"img_size": case.size, **rates}
    return timm.create_model(_TIMM[case.model], **options)


def _torch_call(case: Case, model, forward: Callable, *, compiled: bool) -> Call:
    import torch

    torch.set_num_threads(case.threads)
    model = torch.compile(model) if compiled else model
    device = "cuda" if case.device == "gpu" else "cpu"
    images = torch.tensor(random_images(case).transpose(0, 3, 1, 2)).contiguous().to(device)
    model = model.to(device)
    if case.task == "training":
        return _torch_step(case, model.train(), forward, images)
    dtype = getattr(torch, case.precision)
    model, images = model.eval().to(dtype), images.to(dtype)

    def call() -> object:
        with torch.inference_mode():
            return forward(model, images).float().cpu().numpy()

    return call


def _torch_step(case: Case, model, forward, images) -> Call:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1)
    labels = torch.arange(case.batch, device=images.device) % NUM_CLASSES

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=case.precision == "bfloat16"):
            logits = forward(model, images)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        if images.device.type == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    return step


PEERS = {
    peer.__name__: peer
    for peer in (
        matrix_product,
        keras_vit,
        keras_vit_jax,
        keras_vit_saved_model,
        keras_vit_onnx,
        keras_vit_openvino,
        keras_vit_tflite,
        keras_vit_tflite_int8,
        keras_hub,
        transformers,
        transformers_compiled,
        timm,
        timm_compiled,
    )
}
