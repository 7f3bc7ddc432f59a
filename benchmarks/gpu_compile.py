"""Compiles the training step for an H100, on a machine without a GPU: its memory and its kernels, not its time.

    pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    python -m benchmarks.gpu_compile --batch 256 --backend tensorflow

The versions must be those of JAX, whose XLA compiles the step of TensorFlow, too. It chooses no algorithm by timing, so
each product is one of cuBLAS.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

from benchmarks.case import NUM_CLASSES
from benchmarks.peers import step_trainer
from benchmarks.tpu_compile import traced_by_jax
from keras_vit import MODELS, cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count

# What XLA asks of a device when it compiles (its GpuTargetConfigProto, as text), and the version of cuDNN.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } threads_per_block_limit: 1024 threads_per_warp: 32 core_count: 132
  fpus_per_core: 128 threads_per_core_limit: 2048 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 clock_rate_ghz: 1.98 device_memory_size: 84929347584
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
"""
_CUDNN, _SIZE = 90800, 224
_KERNEL = re.compile(r"^  (?:ROOT )?%\S+ = .*? (fusion|copy|custom-call)\((?:.*custom_call_target=\"([^\"]+)\")?", re.M)
_EPILOGUE = re.compile(r'"epilogue":"(\w+)"')


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print the memory and the kernels of a training step in bfloat16."""

    model: str = "ViT-B_16"
    """Name of the model."""
    num_layers: Count = 3
    """Blocks of the model; compiling twelve takes some minutes."""
    batch: Count = 256
    """Images of a step."""
    backend: Literal["jax", "tensorflow"] = "jax"
    """Backend of Keras."""


def main(arguments: Sequence[str]) -> None:
    """`--model NAME --num-layers N --batch N`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.gpu_compile", about=__doc__)
    os.environ |= {"KERAS_BACKEND": parsed.backend, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    from jax.experimental import topologies

    chip = topologies.get_topology_desc("name", "cuda", target_config=_H100, topology="1x1x1").devices[0]
    compiled = (_of_jax if parsed.backend == "jax" else _of_tensorflow)(parsed, chip)
    memory = compiled.get_compiled_memory_stats()
    sizes = memory.temp_size_in_bytes / 1e9, memory.argument_size_in_bytes / 1e9
    print(f"{sizes[0]:.2f} GB of temporaries, {sizes[1]:.2f} GB of state and batch")
    kernels: collections.Counter = collections.Counter()
    for line in compiled.hlo_modules()[0].to_string().split("\nENTRY", 1)[1].splitlines():
        if kernel := _KERNEL.match(line):
            epilogue = _EPILOGUE.search(line)
            kernels[" ".join([kernel[2] or kernel[1], *(epilogue.groups() if epilogue else ())])] += 1
    for kernel, count in kernels.most_common():
        print(f"{count:6} {kernel}")


def _of_jax(arguments: Arguments, chip: Any) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo  # which asks for the version of a cuDNN that is not here

    from keras_vit.models import gpu, layers

    fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN
    fused_attention_stablehlo.check_compute_capability = lambda capability: True
    layers.on_tensor_cores = gpu.on_tensor_cores = lambda dtype: dtype == "bfloat16"
    step, _ = traced_by_jax(_trainer(arguments), _batch(arguments), chip)
    return step.lower(lowering_platforms=("cuda",)).compile().runtime_executable()


def _of_tensorflow(arguments: Arguments, chip: Any) -> Any:
    import tensorflow as tf
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import _jax, xla_client

    from training.loop.devices import cudnn, kernels

    kernels.on_cpu = lambda: False
    cudnn.computes_attention = lambda *shape: True
    trainer = _trainer(arguments)
    step = tf.function(lambda *batch: trainer.train_step(batch), jit_compile=True, autograph=False)
    hlo = step.experimental_get_compiler_ir(*map(tf.zeros, _batch(arguments)))(stage="hlo_serialized")
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    # The results are copies, in a dialect that the compiler does not take.
    text = re.sub(r"mhlo\.copy (%\S+) : (\S+)", r"stablehlo.reshape \1 : (\2) -> \2", text)
    module = ir.Module.parse(text, mlir.make_ir_context())
    return chip.client.compile(module, xla_client.DeviceList((chip,)), xla_client.CompileOptions())


def _batch(arguments: Arguments) -> list[tuple[int, ...]]:
    return [(arguments.batch, _SIZE, _SIZE, 3), (arguments.batch, NUM_CLASSES)]


def _trainer(arguments: Arguments) -> Any:
    config = dataclasses.replace(MODELS[arguments.model], num_layers=arguments.num_layers)
    return step_trainer(config, _SIZE, arguments.batch, "bfloat16")


if __name__ == "__main__":
    cli.run(main)
