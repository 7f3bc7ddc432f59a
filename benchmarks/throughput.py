"""Images per second of ViT inference beside keras-hub and transformers, interleaved in one process.

    make bench

Prints the median over the rounds for each peer and batch, the spread, and the ratio to ours. Random weights, float32,
224x224 images; the ratio is what to trust, since all peers see the same machine in the same minutes.
"""

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

import keras_vit
from keras_vit import UserError, cli
from keras_vit.config import model_config
from keras_vit.quiet import native_stderr_silenced

_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Images per second of ViT inference beside keras-hub and transformers."""

    model: str = "ViT-B_16"
    """Name of the model."""
    batches: tuple[int, ...] = (1, 8)
    """Images per forward pass."""
    rounds: int = 7
    """Timed passes of each peer, after one untimed."""


def ours(config: keras_vit.ViTConfig, images: np.ndarray) -> Callable[[], object]:
    """keras_vit under tf.function."""
    import tensorflow as tf

    with native_stderr_silenced():  # the TensorFlow that keras-hub asks for reports a missing GPU as an error
        model = keras_vit.build(config, num_classes=_CLASSES)
    forward, batch = tf.function(lambda x: model(x, training=False), jit_compile=False), tf.constant(images)
    return lambda: forward(batch).numpy()


def keras_hub(config: keras_vit.ViTConfig, images: np.ndarray) -> Callable[[], object]:
    """keras-hub's ViT classifier under tf.function."""
    import keras_hub
    import tensorflow as tf

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3),
        patch_size=config.patch,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_size,
        mlp_dim=config.mlp_dim,
    )
    model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=_CLASSES, preprocessor=None)
    forward, batch = tf.function(lambda x: model(x, training=False), jit_compile=False), tf.constant(images)
    return lambda: forward(batch).numpy()


def transformers(config: keras_vit.ViTConfig, images: np.ndarray) -> Callable[[], object]:
    """The ViT of transformers on torch, with its fused attention."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.set_num_threads(os.cpu_count())
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim,
            patch_size=config.patch[0],
            num_labels=_CLASSES,
        )
    ).eval()
    batch = torch.tensor(images.transpose(0, 3, 1, 2))

    def forward() -> object:
        with torch.inference_mode():
            return model(batch).logits.numpy()

    return forward


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(arguments: Arguments) -> None:
    """Print one row for each batch and peer."""
    config = model_config(arguments.model)
    if not isinstance(config, keras_vit.ViTConfig) or config.stem or config.axial:
        raise UserError(f"The peers are built as plain ViTs, but {arguments.model} is none; give another --model.")
    print(f"{arguments.model}, float32, {os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    for batch in arguments.batches:
        images = np.random.default_rng(0).uniform(-1, 1, (batch, 224, 224, 3)).astype(np.float32)
        peers = {build.__name__: build(config, images) for build in (ours, keras_hub, transformers)}
        for call in peers.values():
            call()
        times = {name: [] for name in peers}
        for _ in range(arguments.rounds):
            for name, call in peers.items():
                times[name].append(seconds(call))
        own = statistics.median(times["ours"])
        for name, taken in times.items():
            median = statistics.median(taken)
            spread = f"{1e3 * min(taken):.0f}-{1e3 * max(taken):.0f} ms"
            rate = f"{batch / median:8.2f} images/s  ({spread})"
            print(f"batch {batch:3d}  {name:13s} {rate}  ours x{median / own:.2f} as fast")


def main(arguments: Sequence[str]) -> None:
    """`--model NAME --batches …`"""
    measure(cli.parse(Arguments, arguments, prog="python -m benchmarks.throughput"))


if __name__ == "__main__":
    cli.run(main)
