"""Compares how long a person waits at first: `python -m benchmarks.start --rounds 5 --output start`.

Each peer starts in a new process, in turn, and notes when it has reached a point. The seconds count from the start of
the process, so they include the import of the framework. A first round, which does not count, leaves the byte code of
all libraries, as any first run does: without it TensorFlow and Keras take two to three times as long.

prediction: a ViT-S_16 with random weights classifies a picture. training: the demo's model, a small ViT, is trained for
an epoch on the handwritten digits of scikit-learn in batches of 32 and evaluated. This project shifts the images and
writes a run directory; the peers do neither.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.history import processor
from keras_vit import UserError, cli, run_directory
from keras_vit.cli import parser
from keras_vit.files.atomic import staged
from keras_vit.files.tables import markdown_table

Reached = Callable[[str], None]
"""Notes the time of a point."""

_BATCH, _TEST = 32, 360


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare the time from the start of a process to its first results."""

    rounds: int = 5
    """Processes of each peer and task, in turn."""
    output: pathlib.Path = pathlib.Path("start-results")
    """Directory for start.json and start.md."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"--rounds must be at least 1, but is {self.rounds}.")


def _picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)


def _digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images (n, 8, 8, 1) in [-1, 1] and labels, for training and evaluation."""
    import sklearn.datasets

    data = sklearn.datasets.load_digits()
    images = (data.images[..., None] / 8.0 - 1.0).astype(np.float32)
    return (images[:-_TEST], data.target[:-_TEST]), (images[-_TEST:], data.target[-_TEST:])


def keras_vit_prediction(reached: Reached) -> None:
    import keras_vit

    reached("imports")
    model = keras_vit.build("ViT-S_16")
    reached("model")
    model.predict(keras_vit.preprocessing_of(model)(_picture())[None], verbose=0)
    reached("prediction")


def keras_hub_prediction(reached: Reached) -> None:
    import keras_hub

    reached("imports")
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3), patch_size=(16, 16), num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=1000, preprocessor=None)
    resize = keras_hub.layers.ViTImageConverter(image_size=(224, 224), scale=1 / 127.5, offset=-1.0)
    reached("model")
    model.predict(resize(_picture()[None]), verbose=0)
    reached("prediction")


def timm_prediction(reached: Reached) -> None:
    from benchmarks.peers import define_torchvision_operators

    define_torchvision_operators()
    import PIL.Image
    import timm
    import torch

    reached("imports")
    model = timm.create_model("vit_small_patch16_224", pretrained=False).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    reached("model")
    with torch.inference_mode():
        model(transform(PIL.Image.fromarray(_picture()))[None]).softmax(-1).numpy()
    reached("prediction")


def _first_step(reached: Reached):
    """A Keras callback that notes the end of the first step."""
    import keras

    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch or reached("step"))


def keras_vit_training(reached: Reached) -> None:
    from training.loop.pretrain import pretrain
    from training.options.common import DataOptions
    from training.options.train import PretrainOptions
    from training.recipes.pretrain import find_recipe

    reached("imports")

    recipe = dataclasses.replace(find_recipe("digits"), epochs=1)
    recipe = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup_steps=4))
    with tempfile.TemporaryDirectory() as folder:
        options = PretrainOptions(source=DataOptions("digits"), workdir=folder, recipe=recipe)
        pretrain(options, "digits", callbacks=[_first_step(reached)])
    reached("epoch")


def keras_hub_training(reached: Reached) -> None:
    import keras
    import keras_hub

    reached("imports")

    (images, labels), test = _digits()
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 1),
        patch_size=(4, 4),
        num_layers=4,
        num_heads=3,
        hidden_dim=96,
        mlp_dim=384,
        dropout_rate=0.1,
    )
    model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=10, preprocessor=None)
    model.compile(
        keras.optimizers.AdamW(2e-3, weight_decay=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    model.fit(images, labels, batch_size=_BATCH, validation_data=test, verbose=0, callbacks=[_first_step(reached)])
    reached("epoch")


def timm_training(reached: Reached) -> None:
    from benchmarks.peers import define_torchvision_operators

    define_torchvision_operators()
    import timm.models.vision_transformer
    import torch

    reached("imports")
    sets = [(torch.tensor(images.transpose(0, 3, 1, 2)), torch.tensor(labels)) for images, labels in _digits()]
    (images, labels), (test_images, test_labels) = sets
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=96, depth=4, num_heads=3, class_token=False,
        global_pool="avg", drop_rate=0.1,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    for step, chosen in enumerate(torch.randperm(len(images)).split(_BATCH)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if step == 0:
            reached("step")
    with torch.inference_mode():
        (model.eval()(test_images).argmax(-1) == test_labels).float().mean().item()
    reached("epoch")


TASKS: dict[str, dict[str, Callable[[Reached], None]]] = {
    "prediction": {"keras_vit": keras_vit_prediction, "keras_hub": keras_hub_prediction, "timm": timm_prediction},
    "training": {"keras_vit": keras_vit_training, "keras_hub": keras_hub_training, "timm": timm_training},
}


def measure(task: str, peer: str) -> dict[str, float] | str:
    """Seconds from the start of a process to each of its points; or the last line of its error."""
    start = time.time()
    command = [sys.executable, "-m", "benchmarks.start", "--run", task, peer]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    times = json.loads(done.stdout.splitlines()[-1])
    return {name: reached - start for name, reached in times.items()}


def table(found: dict[str, dict[str, list[dict[str, float] | str]]]) -> str:
    """Markdown: for each task the seconds of each peer to each point, median (least to most)."""
    parts = []
    for task, peers in found.items():
        times = {peer: [seconds for seconds in rounds if isinstance(seconds, dict)] for peer, rounds in peers.items()}
        points = next((list(rounds[0]) for rounds in times.values() if rounds), [])
        rows = []
        for peer, rounds in times.items():
            seconds = [[one[point] for one in rounds] for point in points]
            cells = [f"{statistics.median(s):.1f} ({min(s):.1f} to {max(s):.1f})" if s else "failed" for s in seconds]
            rows.append((peer, *cells))
        head = ("", *(f"{point}, s" for point in points))
        parts += [f"## {task}", markdown_table(head, rows, num_text_columns=1)]
        parts += [
            f"{peer} failed: {error}" for peer, all_of in peers.items() for error in all_of if isinstance(error, str)
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """`--rounds N --output DIR`; with `--run TASK PEER` it is the process of a peer."""
    if arguments[:1] == ["--run"]:
        _, task, peer = arguments
        times: dict[str, float] = {}
        TASKS[task][peer](lambda point: times.__setitem__(point, time.time()))
        print(json.dumps(times))
        return
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.start", about=__doc__)
    output = run_directory.output_folder(parsed.output)
    found: dict[str, dict[str, list]] = {task: {peer: [] for peer in peers} for task, peers in TASKS.items()}
    for number in range(parsed.rounds + 1):
        for task, peers in TASKS.items():
            for peer in peers:
                print(f"Round {number} of {parsed.rounds}: {task}, {peer} …", flush=True)
                seconds = measure(task, peer)
                if number:
                    found[task][peer].append(seconds)
    text = f"{processor()}, {time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds\n\n{table(found)}\n"
    print(text)
    with staged(output) as stage:
        (stage / "start.md").write_text(text, encoding="utf-8")
        (stage / "start.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
