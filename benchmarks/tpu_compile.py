"""Compiles one program for a TPU chip: `python -m benchmarks.tpu_compile CASE`, the case as JSON.

The process writes one line of JSON to standard output: bytes of the arguments, temporaries and code on the chip,
floating-point operations, and bytes that the host sends for each step. All other output goes to standard error.

JAX has public functions to compile its own programs for a chip. For those of TensorFlow, modules of jaxlib without a
promise of stability are used; the pinned version is in `benchmarks/requirements-tpu.txt`.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.case import NUM_CLASSES
from benchmarks.tpu import TPUCase
from training.recipes.pretrain import find_recipe

# Chip: (name of a slice of one host, accelerator type).
_SLICES = {"v5e": ("v5e:2x2", "v5litepod-4"), "v6e": ("v6e:2x2", "v6e-4")}
_NUM_STEPS = 100_000  # only the learning rate depends on it


def main(arguments: list[str]) -> None:
    """`CASE`"""
    case = TPUCase(**json.loads(arguments[0]))
    with os.fdopen(os.dup(1), "w") as answer, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        _set_environment(_SLICES[case.chip][1], "jax" if case.step == "jax" else "tensorflow")
        answer.write(json.dumps(_compile_jax(case) if case.step == "jax" else _compile_tensorflow(case)))


def _set_environment(accelerator_type: str, backend: str) -> None:
    """Set the environment of libtpu before it is loaded: there is neither a TPU nor a metadata server."""
    import libtpu

    os.environ |= {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # without a TPU, several processes may compile; "True" is ignored
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": accelerator_type, "TPU_LIBRARY_PATH": libtpu.get_library_path()}


def _device(case: TPUCase):
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=_SLICES[case.chip][0]).devices[0]


def _compile_tensorflow(case: TPUCase) -> dict[str, Any]:
    import tensorflow as tf
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    step, batch = _tensorflow_step(case)
    # The specifications are separate arguments: experimental_get_compiler_ir takes none that is inside a tuple.
    compiled = tf.function(lambda *batch: step(batch), jit_compile=True, autograph=False)
    hlo = compiled.experimental_get_compiler_ir(*batch)(stage="hlo_serialized")
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    text = text.decode() if isinstance(text, bytes) else text
    # The copies are in the results only, and this parser does not know them.
    text = re.sub(r'"?mhlo\.copy"?\(?\s*(%[\w#]+)\)?[^:\n]*: (?:\(.*?\) -> )?(tensor<[^>]*>)',
                  r"stablehlo.reshape \1 : (\2) -> \2", text)  # fmt: skip
    text = with_generator_of_the_chip(text)
    device = _device(case)
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        executable = device.client.compile(module, xla_client.DeviceList((device,)), xla_client.CompileOptions())
    host_bytes = sum(spec.dtype.size * spec.shape.num_elements() for spec in batch)
    return _measured(executable.get_compiled_memory_stats(), executable.cost_analysis(), host_bytes)


def with_generator_of_the_chip(module: str) -> str:
    """The program with the random number generator that TensorFlow takes on a TPU.

    Where the algorithm is left to TensorFlow, as Keras does, it is Philox on CPUs and GPUs and that of the chip on TPUs
    (tensorflow/compiler/tf2xla/kernels/rng_converter_utils.cc); without a TPU, a program is traced for a CPU. The state
    of the chip's generator is u64[2], and that of Philox u64[3], whose next value is here only of the right shape.
    """
    return re.sub(
        r"(%\w+), (%\w+) = stablehlo\.rng_bit_generator (%\w+), algorithm = PHILOX : "
        r"\(tensor<3xui64>\) -> \(tensor<3xui64>, (tensor<\w+>)\)",
        r"\2_chip_key = stablehlo.slice \3 [0:2] : (tensor<3xui64>) -> tensor<2xui64>\n    "
        r"\2_chip_state, \2 = stablehlo.rng_bit_generator \2_chip_key, algorithm = DEFAULT : "
        r"(tensor<2xui64>) -> (tensor<2xui64>, \4)\n    "
        r"\1 = stablehlo.add \3, \3 : tensor<3xui64>",
        module,
    )


def _tensorflow_step(case: TPUCase):
    """The training or evaluation step, and the specifications of its batch."""
    import tensorflow as tf

    from training.loop.devices import kernels

    kernels.on_cpu = lambda: False  # or the model would take the form that is fast on this machine
    recipe, steps = _trainer(case)
    images = tf.TensorSpec((case.batch, *recipe.image_size, recipe.channels), tf.float32)
    labels, weights = tf.TensorSpec((case.batch, NUM_CLASSES), tf.float32), tf.TensorSpec((case.batch,), tf.float32)
    if case.step == "evaluation":
        return steps.test_step, (images, labels, weights)
    return steps.train_step, (images, labels)


def _trainer(case: TPUCase):
    """The recipe with the batch of the case, and its compiled trainer on the backend of this process."""
    import tensorflow as tf

    from training.loop.build import build_trainer
    from training.options.common import Execution

    recipe = dataclasses.replace(find_recipe(case.recipe), batch_size=case.batch, accumulation=1)
    execution = Execution(precision="bfloat16", remat=case.step == "remat")
    strategy = tf.distribute.get_strategy()  # of one device
    return recipe, build_trainer(
        lambda: recipe.build(NUM_CLASSES), recipe, _NUM_STEPS, strategy=strategy, execution=execution, seed=0
    )


def _compile_jax(case: TPUCase) -> dict[str, Any]:
    recipe, trainer = _trainer(case)
    shapes = (case.batch, *recipe.image_size, recipe.channels), (case.batch, NUM_CLASSES)
    traced, batch = traced_by_jax(trainer, shapes, _device(case))
    compiled = traced.lower().compile()
    host_bytes = sum(part.dtype.itemsize * part.size for part in batch)
    return _measured(compiled.memory_analysis(), compiled.cost_analysis(), host_bytes)


def traced_by_jax(trainer, shapes: Sequence[tuple[int, ...]], device) -> tuple:
    """Return the training step on a batch of these shapes, traced for a device that need not exist, and the batch."""
    import jax

    def described(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    state = tuple([described(v.shape, v.dtype) for v in group] for group in trainer._train_groups())
    batch = [described(shape, "float32") for shape in shapes]
    return jax.jit(trainer.train_step, donate_argnums=0).trace(state, batch), batch


def _measured(memory, costs, host_bytes: int) -> dict[str, Any]:
    names = {"arguments": "argument", "temporaries": "temp", "code": "generated_code"}
    sizes = {name: getattr(memory, f"{theirs}_size_in_bytes") for name, theirs in names.items()}
    return {**sizes, "flops": costs["flops"], "host_bytes": host_bytes}


if __name__ == "__main__":
    main(sys.argv[1:])
