"""The peers of the comparison: the models and exports of this project, and the same models in other libraries.

Each peer is a function that takes a case and returns a call of one batch or one training step. Only the call is timed.
A peer runs in its own process and imports its own framework. All weights are random; the tests check the numbers.
"""

import functools
import itertools
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from benchmarks.case import NUM_CLASSES, Call, Case, random_images, set_tensorflow_threads
from benchmarks.exported_peers import EXPORTED
from benchmarks.peer_process import timed

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
        trainer = step_trainer(case.model, case.size, case.batch, case.precision)
        images, labels = tf.constant(random_images(case)), tf.one_hot(np.arange(case.batch), NUM_CLASSES)
        step = tf.function(trainer.train_step, jit_compile=trainer.jit_compile)
        return lambda: step((images, labels))["loss"].numpy()
    keras.config.set_dtype_policy(case.precision)
    return _forward(case, keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES))


def _forward(case: Case, model) -> Call:
    import tensorflow as tf

    forward = tf.function(lambda x: model(x, training=False), jit_compile=case.device == "gpu")
    images = tf.constant(random_images(case))
    return lambda: forward(images).numpy()


def step_trainer(model, size: int, batch: int, precision: str):
    """The compiled trainer of `keras-vit pretrain` with AdamW, on the backend of this process.

    model: name or config. size: height and width in pixels. precision: "float32", or "bfloat16" for mixed precision.
    """
    from keras_vit import build
    from training.loop.build import build_trainer
    from training.loop.devices.strategies import open_strategy
    from training.options.common import Execution, StrategyOptions
    from training.recipes.recipe import Recipe

    recipe = Recipe(
        image_size=(size, size), batch_size=batch, learning_rate=1e-4, steps=1, weight_decay=0.1, clip_norm=None
    )
    strategy = open_strategy(StrategyOptions())  # which leaves the GPU to JAX, if that is the backend
    make_model = functools.partial(build, model, image_size=size, num_classes=NUM_CLASSES)
    return build_trainer(make_model, recipe, 1, execution=Execution(precision=precision), strategy=strategy)


def keras_vit_jax(case: Case) -> Call:
    """The Keras model on the JAX backend, or the training step of `training.pretrain` there."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # no other process uses the device
    import jax
    import keras

    import keras_vit

    if case.task == "training":
        from training.loop.devices.jax_devices import batch_on_devices

        trainer = step_trainer(case.model, case.size, case.batch, case.precision)
        trainer.make_train_function()
        labels = np.eye(NUM_CLASSES, dtype=np.float32)[np.arange(case.batch) % NUM_CLASSES]
        batches = itertools.repeat(tuple(batch_on_devices(rows) for rows in (random_images(case), labels)))
        return lambda: float(trainer.train_steps(batches, 1)["loss"])
    keras.config.set_dtype_policy(case.precision)
    model = keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES)
    weights, others = ([v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables))
    forward = jax.jit(lambda weights, images: model.stateless_call(weights, others, images, training=False)[0])
    images = jax.device_put(random_images(case)).astype(case.precision)
    return lambda: np.asarray(forward(weights, images))


def keras_hub(case: Case) -> Call:
    """The ViT of keras-hub in a tf.function; training uses `train_on_batch` and the AdamW of Keras."""
    import keras
    import keras_hub

    from keras_vit import MODELS

    set_tensorflow_threads(case)
    is_mixed = case.task == "training" and case.precision != "float32"
    keras.config.set_dtype_policy(f"mixed_{case.precision}" if is_mixed else case.precision)
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.1), loss, jit_compile=False)
    images, labels = random_images(case), np.arange(case.batch)
    return lambda: model.train_on_batch(images, labels)


def transformers(case: Case, *, compiled: bool = False) -> Call:
    """The ViT of transformers on torch, with fused attention."""
    from transformers import ViTConfig, ViTForImageClassification

    from keras_vit import MODELS

    config = MODELS[case.model]
    theirs = ViTConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        patch_size=config.patch[0],
        image_size=case.size,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=config.dropout_rate,
    )
    return _torch_call(case, ViTForImageClassification(theirs), lambda outputs: outputs.logits, compiled=compiled)


def timm(case: Case, *, compiled: bool = False) -> Call:
    """The model of timm on torch, with fused attention."""
    return _torch_call(case, timm_model(case), lambda outputs: outputs, compiled=compiled)


def timm_model(case: Case):
    """The model of timm with random weights and the same dropout. Raises KeyError if timm has none of this name."""
    import timm

    from keras_vit import MODELS, ViTConfig

    options: dict = {"pretrained": False, "num_classes": NUM_CLASSES}
    if isinstance(config := MODELS[case.model], ViTConfig):
        rates = dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), config.dropout_rate)
        options |= {"img_size": case.size, **rates}
    return timm.create_model(_TIMM[case.model], **options)


def _torch_call(case: Case, model, logits_of: Callable, *, compiled: bool) -> Call:
    """A forward pass, or with torch.autocast a training step; `logits_of` takes what the model returns."""
    import torch

    torch.set_num_threads(case.threads)
    device, dtype = "cuda" if case.device == "gpu" else "cpu", getattr(torch, case.precision)
    model = (torch.compile(model) if compiled else model).to(device)
    images = torch.tensor(random_images(case).transpose(0, 3, 1, 2)).contiguous().to(device)
    if case.task == "inference":
        model, images = model.eval().to(dtype), images.to(dtype)

        def call() -> object:
            with torch.inference_mode():
                return logits_of(model(images)).float().cpu().numpy()

        return call
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1)
    labels = torch.arange(case.batch, device=device) % NUM_CLASSES

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = logits_of(model(images))
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    return step


PEERS = {
    **{peer.__name__: peer for peer in (matrix_product, keras_vit, keras_vit_jax, keras_hub, transformers, timm)},
    **{f"{peer.__name__}_compiled": functools.partial(peer, compiled=True) for peer in (transformers, timm)},
    **EXPORTED,
}


def measurements(peer: Callable[[Case], Call], case: Case, requests: Iterable[str]) -> Iterator[dict]:
    """Yield the seconds of preparation and of the first call, then of a call for each request, then the peak memory."""
    prepare, call = timed(lambda: peer(case))
    first, _ = timed(call)
    call()  # some frameworks allocate memory in the second call
    yield {"prepare": prepare, "first_call": first}
    for _ in requests:
        yield {"seconds": timed(call)[0]}
    if case.device == "cpu":
        yield {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    elif peer is keras_vit_jax:
        yield {"peak_bytes": sys.modules["jax"].local_devices()[0].memory_stats()["peak_bytes_in_use"]}
    elif peer is keras_vit:
        yield {"peak_bytes": sys.modules["tensorflow"].config.experimental.get_memory_info("GPU:0")["peak"]}
    else:
        yield {"peak_bytes": sys.modules["torch"].cuda.max_memory_allocated()}
