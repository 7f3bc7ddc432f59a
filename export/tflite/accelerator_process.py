"""Runs a TFLite file in LiteRT's GPU accelerator, in a process of its own: a driver or the accelerator may abort.

    python export/tflite/accelerator_process.py MODEL.tflite IMAGES.npy OUTPUTS.npz

IMAGES is float32 (n, h, w, C), of which the file takes one at a time. OUTPUTS has each output of the signature by its
name, (n, ...). The standard error has what the accelerator prints, such as the operators that it refuses. It imports
nothing of this project, and no TensorFlow.
"""

import sys

import numpy as np
from ai_edge_litert.compiled_model import CompiledModel
from ai_edge_litert.hardware_accelerator import HardwareAccelerator


def main(model: str, images_file: str, outputs_file: str) -> None:
    """See the module."""
    compiled = CompiledModel.from_file(model, hardware_accel=HardwareAccelerator.GPU)
    if not compiled.is_fully_accelerated():
        sys.exit("The file is not fully accelerated.")
    [(signature, ends)] = compiled.get_signature_list().items()
    [image] = ends["inputs"]
    details = compiled.get_output_tensor_details(signature)
    inputs = {image: compiled.create_input_buffer_by_name(signature, image)}
    buffers = {name: compiled.create_output_buffer_by_name(signature, name) for name in ends["outputs"]}
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in buffers}
    for pixels in np.load(images_file):
        inputs[image].write(np.ascontiguousarray(pixels[None]))
        compiled.run_by_name(signature, inputs, buffers)
        for name, buffer in buffers.items():
            shape = details[name]["shape"]
            outputs[name].append(np.reshape(buffer.read(int(np.prod(shape)), np.float32), shape)[0])
    np.savez(outputs_file, **{name: np.stack(rows) for name, rows in outputs.items()})  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
