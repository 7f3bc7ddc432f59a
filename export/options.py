"""What the exports take; without TensorFlow and Keras, which `--help` need not wait for."""

import dataclasses
from typing import Annotated, Literal

import tyro

# Share of images that an artifact with rounded weights may put in another class than the model does. One image always
# may be: among few, a single picture between two classes says nothing.
LARGEST_DISAGREEMENT = 0.02


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """The model to export: one of --run and --checkpoint."""

    run: str | None = None
    """Run directory."""
    checkpoint: str | None = None
    """Checkpoint file or folder, address, or official name such as augreg:B_16."""
    labels: str | None = None
    """Text file with a class in each line, in the order of a checkpoint's logits. A run has its own."""
    images: str | None = None
    """Folder of image files to check a checkpoint's export on; those in folders named as a class give accuracy, too.
    Default: 16 made-up pictures. A run has its own."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels of a checkpoint's model; default: as stored."""
    num_heads: int | None = None
    """Attention heads, where a checkpoint does not tell them."""
    num_groups: int | None = None
    """Groups of GroupNorm, where a checkpoint does not tell them."""


Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class SavedModelOptions:
    """Export a model as a SavedModel for TF Serving, and check it."""

    source: Annotated[SourceOptions, tyro.conf.arg(name="")]
    output: str
    """Directory of the model's versions; the next number is added."""
    dtype: Dtype = "float32"
    """Type of weights and arithmetic. bfloat16 halves the file, and is faster on processors that have it."""
    attention: bool = False
    """Add the signature "attention" with the probabilities of every block."""
    xla: bool = False
    """Compile the network with XLA when it is first called, for each batch size anew."""
    max_disagreement: float = LARGEST_DISAGREEMENT
    """Share of images that bfloat16 may put into another class than the model does; float32 may none."""


TFLiteFormat = Literal["float32", "float16", "int8-dynamic", "int8-weights", "int8", "int16x8"]


@dataclasses.dataclass(frozen=True)
class TFLiteOptions:
    """Export a model as TFLite files, and check them."""

    source: Annotated[SourceOptions, tyro.conf.arg(name="")]
    output: str
    """Directory of the files model-FORMAT.tflite and labels.txt, new or with those of the same model."""
    formats: tuple[TFLiteFormat, ...] = ("float32", "int8-dynamic")
    """What to write."""
    uint8_input: bool = False
    """Take pixels, 0..255, and normalise inside; the files are called model-FORMAT-uint8-input.tflite."""
    dynamic_batch: bool = False
    """Take any number of images; the files are called …-dynamic-batch.tflite. Not for int8 and int16x8."""
    calibration: str | None = None
    """Folder of representative images for int8 and int16x8. Default: training images that the run keeps."""
    calibration_images: int = 256
    """How many of them to use."""
    max_disagreement: float = LARGEST_DISAGREEMENT
    """Share of images that a rounded format may put into another class than the model does; float32 may none."""


OnnxFormat = Literal["onnx", "openvino"]


@dataclasses.dataclass(frozen=True)
class OnnxOptions:
    """Export a model as ONNX and OpenVINO files, and check them."""

    source: Annotated[SourceOptions, tyro.conf.arg(name="")]
    output: str
    """Directory of model.onnx, model.xml with model.bin, and labels.txt, new or with those of the same model."""
    formats: tuple[OnnxFormat, ...] = ("onnx",)
    """What to write."""
