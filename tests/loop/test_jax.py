"""Training with Keras on JAX, in processes of its own, against the trainer on TensorFlow."""

import collections
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_vit import UserError
from keras_vit.run import Run
from tests.interruptions import assert_equal_metrics
from tests.loop import jax_steps
from training import pretrain
from training.loop.devices.backend import prepare_backend
from training.options.common import DataOptions, Execution, StrategyOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES

ROOT = pathlib.Path(__file__).parents[2]


def jax_process(*arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def on_jax(*arguments: str, devices: int = 1) -> str:
    done = jax_process(*arguments, devices=devices)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


# The others take as long again.
CASES = [pytest.param(name, marks=pytest.mark.slow) for name in jax_steps.CASES]


@pytest.fixture(name="steps", scope="module", params=CASES)
def _steps(request, tmp_path_factory) -> tuple[str, pathlib.Path, pathlib.Path]:
    """A case, and two directories with the same training steps: on TensorFlow, and on JAX from the same state."""
    tensorflow, jax = tmp_path_factory.mktemp("tensorflow"), tmp_path_factory.mktemp("jax")
    np.savez(tensorflow / f"{request.param}.npz", **jax_steps.train(request.param, None))
    on_jax("-m", "tests.loop.jax_steps", str(tensorflow), str(jax), request.param)
    return request.param, tensorflow, jax


def assert_close(name: str, here: pathlib.Path, there: pathlib.Path, tolerance: float) -> None:
    with np.load(here / f"{name}.npz") as one, np.load(there / f"{name}.npz") as other:
        assert set(one) == set(other)
        assert len(one["losses"]) == jax_steps.STEPS + 1  # the last is that of the average, evaluated
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=tolerance)
        assert one["end/step/00000"] == other["end/step/00000"] == jax_steps.STEPS
        assert not np.array_equal(one["begin/weight/00000"], one["end/weight/00000"])


_IN_TF_DATA = """
import numpy as np, tensorflow as tf
from keras_vit import Preprocessing

image = np.random.default_rng(0).integers(0, 256, (29, 17, 3), np.uint8)
for fields in ({}, {"dtype": "float32", "library": "transformers", "interpolation": "gaussian", "padding": "after"}):
    preprocessing = Preprocessing(8, resize="pad", **fields)
    prepare = tf.function(preprocessing.__call__, input_signature=[tf.TensorSpec((None, None, 3), tf.uint8)])
    np.testing.assert_allclose(prepare(image), preprocessing(image), atol=1e-5)
"""


@pytest.mark.slow
def test_images_are_padded_in_tf_data_as_on_jax():
    on_jax("-c", _IN_TF_DATA)


_SCRIPT = """
import export, keras_vit, training
from keras_vit import UserError

config = keras_vit.ViTConfig(patch_size=4, hidden_size=16, num_layers=1, num_heads=2, mlp_dim=24)
model = keras_vit.build(config, image_size=8, num_classes=10, channels=1)
assert 0 <= training.evaluate_model(model, "digits")["accuracy"] < 0.5
for to in (export.to_saved_model, export.to_tflite):
    try:
        to(model, "exported")
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_script_on_jax_evaluates_and_says_how_to_export():
    assert on_jax("-c", _SCRIPT).count("Exports need the TensorFlow backend of Keras, but it is jax;") == 2


# Prints how many attentions are padded, and the largest differences of the outputs and of the gradients.
_PADDED = """
import sys
import jax, keras, numpy as np
import keras_vit
from keras_vit import ViTConfig
from keras_vit.models import gpu
from keras_vit.models.config import SegmentationConfig
from keras_vit.models.blueprint import Blueprint
from training.loop.devices import kernels
from training.loop.trainer import segments

kernels.runs_on_cudnn = lambda dtype, width: True
kernels.padded_attention = lambda num_tokens: gpu.padded_attention(num_tokens, "xla")
options = {"patch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 24}
for changes in (
    {}, {"classifier": "gap", "layer_scale": 0.5}, {"classifier": "map"},
    {"attention_dropout_rate": 0.1}, {"position_embedding": "rotary"}, {"position_embedding": "relative"},
):
    network = keras_vit.build(ViTConfig(**options, **changes), image_size=(12, 16), num_classes=3)
    rng = np.random.default_rng(0)
    for weight in network.weights:
        if "seed" not in weight.name:
            weight.assign(rng.normal(0.0, 0.3, weight.shape))
    padded = kernels.with_padded_tokens(network)
    count = sum(type(layer).__name__ == "_PaddedAttention" for layer in padded.layers)
    if padded is network:
        print("unchanged")
        continue
    images = rng.normal(size=(2, 12, 16, 3)).astype("float32")
    others = [variable.value for variable in network.non_trainable_variables]

    def loss(weights, model):
        logits = model.stateless_call(weights, others, images, training=True)[0]
        return (logits ** 2).sum(), logits

    assert [v.path for v in padded.trainable_variables] == [v.path for v in network.trainable_variables]
    assert len(segments(padded)) == 3
    weights = [variable.value for variable in network.trainable_variables]
    (gradients, outputs), (ours, here) = (
        jax.grad(loss, has_aux=True)(weights, model) for model in (network, padded)
    )
    scale = max(float(abs(g).max()) for g in gradients)
    most = max(float(abs(a - b).max()) for a, b in zip(gradients, ours, strict=True)) / scale
    print("padded", count, float(abs(outputs - here).max()) < 1e-5, most < 1e-5)

# Queries join the tokens before the last block.
task = SegmentationConfig(2, num_queries=3, num_blocks=1, num_upscale_blocks=1)
network = Blueprint(ViTConfig(**options), keras_vit.Preprocessing((12, 16)), task=task).build()
print("unchanged" if kernels.with_padded_tokens(network) is network else "padded")
"""


@pytest.mark.slow
def test_tokens_padded_once_change_neither_outputs_nor_gradients():
    lines = [line for line in on_jax("-c", _PADDED).splitlines() if line.startswith(("padded", "unchanged"))]
    assert lines == ["padded 2 True True"] * 3 + ["unchanged"] * 4


@pytest.mark.slow
def test_a_dry_run_counts_on_jax_what_it_counts_on_tensorflow(tmp_path, capsys):
    command = ["digits", "--data", "digits", "--workdir", str(tmp_path / "run"), "--dry-run"]
    pretrain.main(command)
    printed = capsys.readouterr().out
    assert printed[printed.index("Run\n") :] in on_jax("-m", "training.pretrain", *command)


def test_twenty_steps_have_the_losses_of_tensorflow(steps):
    assert_close(*steps, tolerance=1e-4)


@pytest.mark.slow
def test_eight_devices_train_as_one_with_a_model_on_each_or_on_four(steps, tmp_path):
    name, tensorflow, jax = steps
    for model_parallel in ("1", "4"):
        folder = tmp_path / model_parallel
        folder.mkdir()
        on_jax("-m", "tests.loop.jax_steps", str(tensorflow), str(folder), name, model_parallel, devices=8)
        assert_close(name, folder, jax, tolerance=1e-5)
    assert_close(name, tmp_path / "4", tmp_path / "1", tolerance=1e-5)


# Prints, for each variable that is divided among devices, the end of the path of its weight and the shape of a part.
_DIVIDED = """
import dataclasses
from keras_vit import UserError
from tests.loop.jax_steps import ADAMW
from training.loop.devices.jax_devices import JaxDevices
from training.loop.build import build_trainer
from training.options.common import Execution

def build(model_parallel, width):
    recipe = dataclasses.replace(ADAMW, model=dataclasses.replace(ADAMW.model, hidden_size=width, classifier="map"))
    options = {"strategy": JaxDevices(model_parallel), "execution": Execution(), "seed": 0}
    return build_trainer(lambda: recipe.build(10), recipe, 20, **options)

for wrong in ((3, 24), (8, 12)):
    try:
        build(*wrong)
    except UserError as error:
        print("refused", error)
trainer = build(4, 24)
weights = trainer.network.trainable_variables
for variables in (weights, *zip(*trainer.optimizer.slots), trainer.ema):
    for weight, variable in zip(weights, variables, strict=True):
        part = variable.value.addressable_shards[0].data.shape
        if part != variable.shape:
            print("divided", weight.path.split(".")[-1], *part)
"""


@pytest.mark.slow
def test_the_weights_of_attention_and_mlp_their_slots_and_averages_are_divided():
    lines = on_jax("-c", _DIVIDED, devices=8).splitlines()
    assert [line for line in lines if line.startswith("refused ")] == [
        "refused 8 devices cannot be divided by --model-parallel 3; give a divisor of 8.",
        "refused 12 channels of Transformer.encoderblock_0.MultiHeadDotProductAttention_1.query/kernel cannot be "
        "divided by --model-parallel 8; give a divisor of 12.",
    ]
    parts = {f"{name}/kernel": "24 6" for name in ("query", "key", "value")} | {"Dense_0/kernel": "24 12"}
    parts |= {"query/bias": "6", "key/bias": "6", "value/bias": "6", "Dense_0/bias": "12"}
    parts |= {"out/kernel": "6 24", "Dense_1/kernel": "12 24"}
    # Weight, momentum, velocity and average, in two blocks and the pooling.
    expected = dict.fromkeys([f"divided {name} {part}" for name, part in parts.items()], 4 * 3)
    assert collections.Counter(line for line in lines if line.startswith("divided ")) == expected


def run(workdir: pathlib.Path, *more: str, devices: int = 8, resumed: bool = False) -> Run:
    printed = on_jax("-m", "tests.loop.jax_run", str(workdir), "0", "0", "0", *more, devices=devices)
    assert "nothing to do" not in printed
    assert ("Continuing after step 8, in epoch 1." in printed) == resumed
    return Run.at(workdir)


def killed_run(workdir: pathlib.Path, *more: str, devices: int = 8) -> pathlib.Path:
    command = ("-m", "tests.loop.jax_run", str(workdir), "0", str(int(signal.SIGKILL)), "8")
    assert jax_process(*command, *more, devices=devices).returncode == -signal.SIGKILL
    return workdir


def weights(finished: Run) -> list[np.ndarray]:
    return [np.array(weight) for weight in keras.models.load_model(finished.path / "model.keras").weights]


def assert_equal(one: Run, two: Run) -> None:
    assert_equal_metrics(one, two)
    for here, there in zip(weights(one), weights(two), strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "more"),
    [(1, ()), (8, ("--precision", "bfloat16", "--accumulation", "2")), (8, ("--model-parallel", "4"))],
)
def test_a_run_that_was_stopped_and_continued_ends_in_the_same_bits_and_opens_on_tensorflow(devices, more, tmp_path):
    killed = killed_run(tmp_path / "resumed", *more, devices=devices)
    resumed = run(killed, *more, devices=devices, resumed=True)
    assert_equal(resumed, run(tmp_path / "undisturbed", *more, devices=devices))


OPTIONS = PretrainOptions(source=DataOptions("digits"), workdir="runs/never", recipe=RECIPES["digits"])
REFUSED = {
    "--strategy mirrored": {"devices": StrategyOptions("mirrored")},
    "--replicas": {"devices": StrategyOptions(replicas=2)},
    "--tpu my-tpu": {"devices": StrategyOptions(tpu="my-tpu")},
    "--worker-timeout 9": {"devices": StrategyOptions(worker_timeout=9)},
    "--precision float16": {"execution": Execution(precision="float16")},
    "--steps-per-execution 2": {"execution": Execution(steps_per_execution=2)},
    "--xla off": {"execution": Execution(xla="off")},
    "--inspect-every": {"execution": Execution(inspect_every=1)},
    "--profile-steps": {"execution": Execution(profile_steps=(1, 2))},
}


def test_what_jax_does_not_support_is_refused_in_a_sentence_before_keras_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for name, fields in REFUSED.items():
        with pytest.raises(UserError, match=rf"^{name} is not supported with KERAS_BACKEND=jax"):
            prepare_backend(dataclasses.replace(OPTIONS, **fields))
    with pytest.raises(UserError, match="^--xla off is not supported"):
        pretrain.main(["digits", "--data", "digits", "--workdir", str(tmp_path / "run"), "--xla", "off"])
    assert not [*tmp_path.iterdir()]
