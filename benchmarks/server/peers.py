"""The servers: this project's SavedModel in the C++ loader, its ONNX file in ONNX Runtime, and timm on torch.

The SavedModel decodes image files itself, in its graph. The others decode with Pillow in the threads of the clients.
"""

import functools
import io
import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.case import Case
from benchmarks.exported_peers import export_file, export_saved_model, exported
from benchmarks.peers import timm_model
from benchmarks.server.load import Server


def keras_vit_saved_model(case: Case) -> Server:
    """The SavedModel in one session of TensorFlow's C++ loader."""
    from export.saved_model.cpp_loader import Session

    with exported(_export_with_names, case) as directory:
        session = Session(str(directory / "model"), case.threads)
        feed, output = json.loads((directory / "names.json").read_text())
    return Server(lambda file: file, lambda files: session.run(feed, output, np.array(files, object)))


def keras_vit_onnx(case: Case) -> Server:
    """The ONNX file in ONNX Runtime."""
    from export.onnx import runtimes

    with exported(export_file, case, "onnx") as directory:
        run = runtimes.open_file(directory / runtimes.FILES["onnx"][0], "onnx", case.threads)
    return _decoding(case, lambda images: _softmax(run(images)))


def timm(case: Case) -> Server:
    """The model of timm on torch, with fused attention."""
    import torch

    torch.set_num_threads(case.threads)
    dtype = getattr(torch, case.precision)
    model = timm_model(case).eval().to(dtype)

    def forward(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(dtype)
            return model(pixels).float().softmax(-1).numpy()

    return _decoding(case, forward)


def _decoding(case: Case, forward: Callable[[np.ndarray], np.ndarray]) -> Server:
    """A server of a function from images (B, h, w, 3) in [-1, 1] to probabilities."""

    def stacked(images: Sequence[np.ndarray]) -> np.ndarray:
        return forward(np.stack(images))

    return Server(functools.partial(_decode, size=case.size), stacked)


def _decode(file: bytes, size: int) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(resized, np.float32) / 127.5 - 1.0


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _export_with_names(case: Case, directory: str) -> None:
    """Export the SavedModel, and write the names of the tensors of serving_default beside it."""
    from tensorflow.core.protobuf import saved_model_pb2

    export_saved_model(case, directory)
    content = (pathlib.Path(directory) / "model" / "saved_model.pb").read_bytes()
    signature = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0].signature_def["serving_default"]
    names = signature.inputs["image_bytes"].name, signature.outputs["probabilities"].name
    (pathlib.Path(directory) / "names.json").write_text(json.dumps(names))


PEERS = {peer.__name__: peer for peer in (keras_vit_saved_model, keras_vit_onnx, timm)}
