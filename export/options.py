"""Options of the export commands. Imports neither TensorFlow nor Keras, so that `--help` is fast."""

import dataclasses
import os
import re
from typing import Annotated, Literal, get_args

from keras_vit.cli.options import Aliases, Count, MayLead, Share
from keras_vit.cli.parser import arguments_of
from keras_vit.errors import UserError, refuse_without_effect
from keras_vit.files.remote import check_saved_model_path, local_path

# Largest share of images with another predicted class than the model, for artifacts with rounded weights. One image is
# always allowed: in a small set, a single image between two classes means nothing.
LARGEST_DISAGREEMENT = 0.02


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """The model to export."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    labels: str | None = None
    """Text file with one class per line, in the order of the logits. Default: the names that the model knows."""
    images: str | None = None
    """Folder of images to verify the export; images in folders named after a class give the accuracy. Default: those of
    the run, else 16 random images."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels for the model. Default: as stored."""
    num_heads: int | None = None
    """Number of attention heads, if the checkpoint does not contain it."""
    num_groups: int | None = None
    """Number of GroupNorm groups, if the checkpoint does not contain it."""
    verify_images: Count = 128
    """Largest number of images that the export is verified on, evenly spaced among those that there are."""
    license: str | None = None
    """License of the weights, for the files and reports. Default: what the checkpoint, or the one that the run was
    fine-tuned from, states."""

    def arguments(self) -> list[str]:
        """The options as a command line has them."""
        return arguments_of(self)


Dtype = Literal["float32", "bfloat16"]
Embeddings = Literal["features", "unit-length"]


@dataclasses.dataclass(frozen=True)
class SavedModelOptions:
    """Export a model as a SavedModel for TF Serving, and verify it."""

    source: SourceOptions
    output: str
    """Directory of the versions of the model; the export adds the next version."""
    dtype: Dtype = "float32"
    """Type of weights and arithmetic. bfloat16 halves the size, and is faster on processors that support it."""
    attention: bool = False
    """Add the signature "attention" with the probabilities of every block."""
    xla: bool = False
    """Compile the network with XLA, in the first call with each batch size."""
    merge_tokens: Count | None = None
    """Merge this many patch tokens in each block (ToMe), such as 8 of 196: fewer tokens are faster to compute, and
    change the outputs. The report shows how much."""
    threshold: Share | None = None
    """Add the output "accepted" to serving_default: whether the probability of the most likely class reaches this
    number, 0 to 1."""
    max_disagreement: Share = LARGEST_DISAGREEMENT
    """Largest share of images with another predicted class than the model, for bfloat16 and merged tokens."""
    embeddings: Embeddings | None = None
    """Export what the head reads, or the projection of CLIP, instead of classes, also of a model without a head:
    features as they are, or divided by their length. The signature is "embed"."""
    tflite: bool = False
    """Write the file model.tflite beside the graph: the signature "image_tensor" in float32, which TF Serving runs by
    LiteRT in place of the graph, for all requests, if it is started with --prefer_tflite_model."""

    def __post_init__(self) -> None:
        check_saved_model_path(self.output)
        of_classes = ("dtype", "attention", "xla", "merge_tokens", "threshold", "max_disagreement", "tflite")
        refuse_without_effect(
            self,
            [
                (of_classes, self.embeddings is None, "an export of classes, without --embeddings"),
                (("merge_tokens",), not (self.attention or self.tflite), "exports without --attention and --tflite"),
                (("xla",), self.dtype == "float32", "--dtype float32, since XLA makes bfloat16 slower on a CPU"),
            ],
        )

    def kit_command(self) -> tuple[str, ...]:
        """The command that writes what TF Serving needs for this model."""
        output = self.output.rstrip("/")
        name = re.sub(r"[^\w-]", "-", os.path.basename(os.path.abspath(output)))
        return ("serving", "--models", output, "--name", name, "--output", f"{output}-serving")


Target = Literal["cpu", "gpu", "npu"]
GpuCheckOf = Literal["two-blocks", "whole"]
TFLiteFormat = Literal["float32", "float16", "int8-dynamic", "int8-weights", "int4-weights", "int8"]
# Formats that need calibration images: for ranges, or for the correlation of the inputs of a product.
CALIBRATED: tuple[TFLiteFormat, ...] = ("int4-weights", "int8")
# Formats whose dense layers have weights in 8 bits, which GPTQ rounds where there are calibration images.
EIGHT_BIT_WEIGHTS: tuple[TFLiteFormat, ...] = ("int8-dynamic", "int8-weights", "int8")
# What the files of a target are for.
PROCESSORS: dict[Target, str] = {
    "cpu": "for CPUs, wrong results on GPUs",
    "gpu": "for GPUs and CPUs",
    "npu": "for NPUs and CPUs",
}
# Options of TFLiteOptions for models that classify.
OF_CLASSES = ("uint8_input", "dynamic_batch", "calibration", "max_disagreement")
_GPU_FORMATS: tuple[TFLiteFormat, ...] = ("float32", "float16")


@dataclasses.dataclass(frozen=True)
class TFLiteOptions:
    """Export a model as TFLite files, and verify them."""

    source: SourceOptions
    output: str
    """Directory for model-FORMAT.tflite and labels.txt; new, or with exports of the same model."""
    formats: tuple[TFLiteFormat, ...] = ("float32", "int8-dynamic")
    """Formats to write."""
    target: Target = "cpu"
    """Processor of the phone. gpu and npu write operators that these compute correctly, check the files against written
    rules, and name them model-FORMAT-gpu.tflite; gpu takes the formats float32 and float16, and runs them in LiteRT's
    accelerator. Files for cpu are wrong or refused on GPUs."""
    check: GpuCheckOf = "two-blocks"
    """Model that LiteRT's GPU accelerator runs with --target gpu before a file is kept: a copy with the first and the
    last block, in seconds, or the whole file. It needs a Vulkan driver, such as that of the package chromium."""
    require_gpu_check: bool = False
    """Fail where the accelerator cannot run, instead of saying so in the report."""
    uint8_input: bool = False
    """Take pixels 0..255 and normalize them in the model; the files are named model-FORMAT-uint8-input.tflite."""
    dynamic_batch: bool = False
    """Take any batch size; the files are named …-dynamic-batch.tflite. Not for int4-weights and int8."""
    calibration: str | None = None
    """Folder of representative images for int4-weights and int8; int8-dynamic and int8-weights lose less with
    them. At most 256, evenly spaced, are taken. Default: training images in the run directory."""
    max_disagreement: Share = LARGEST_DISAGREEMENT
    """Largest share of images with another predicted class than the model, for all formats but float32."""
    embeddings: Embeddings | None = None
    """Write embeddings-FORMAT.tflite with what the head reads, or the projection of CLIP, instead of classes, also of a
    model without a head: features as they are, or divided by their length."""

    def __post_init__(self) -> None:
        kinds = ("int8-dynamic", *CALIBRATED)
        refuse_without_effect(
            self,
            [
                (OF_CLASSES, self.embeddings is None, "an export of classes, without --embeddings"),
                (("check", "require_gpu_check"), self.target == "gpu", "--target gpu"),
                (("calibration",), not {*kinds}.isdisjoint(self.formats), f"--formats {', '.join(kinds)}"),
                (("uint8_input", "dynamic_batch"), self.target == "cpu", "--target cpu"),
                (("dynamic_batch",), {*CALIBRATED}.isdisjoint(self.formats), "formats without calibration"),
            ],
        )
        if self.target == "gpu" and not {*self.formats} <= {*_GPU_FORMATS}:
            raise UserError(f"A GPU computes in floating point; take --formats {' and '.join(_GPU_FORMATS)}.")


@dataclasses.dataclass(frozen=True)
class OnnxOptions:
    """Export a model as an ONNX file, and verify it."""

    source: SourceOptions
    output: str
    """Directory for model.onnx and labels.txt; new, or with exports of the same model."""
    web: bool = False
    """Also write classify.html, a page that classifies images with model.onnx in the browser, and classify.json."""
    embeddings: Embeddings | None = None
    """Write what the head reads, or the projection of CLIP, instead of classes, also of a model without a head:
    features as they are, or divided by their length."""

    def __post_init__(self) -> None:
        refuse_without_effect(self, [(("web",), self.embeddings is None, "an export of classes, without --embeddings")])


FastestForm = Literal[
    "saved-model", "saved-model-xla", "saved-model-bfloat16", "tflite", "tflite-int8-dynamic", "onnx", "openvino"
]


@dataclasses.dataclass(frozen=True)
class FastestOptions:
    """Export a model in all forms, measure them on this machine, and recommend one."""

    source: SourceOptions
    output: str
    """Directory for the forms, report.md and report.json; of this machine."""
    batch_size: Count = 1
    """Images in a call."""
    threads: Count | None = None
    """Threads of a call; default: one for each processor that the command may use."""
    rounds: Count = 11
    """Rounds of the measurement, in each of which all forms run in turn."""
    formats: tuple[FastestForm, ...] = get_args(FastestForm)
    """Forms to compare; those of packages that are not installed are left out."""

    def __post_init__(self) -> None:
        local_path(self.output, "output")


@dataclasses.dataclass(frozen=True)
class KitOptions:
    """Write a folder for serving a model with TF Serving."""

    models: str
    """Directory of the versions of the model, the --output of `keras-vit saved-model`."""
    name: str
    """Name of the model in requests."""
    output: str
    """New directory for models.config, batching.config, compose.yaml, README.md and client/."""
    stable: int | None = None
    """Version with the label "stable"; default: the newest."""
    canary: int | None = None
    """Version with the label "canary"; default: none."""
