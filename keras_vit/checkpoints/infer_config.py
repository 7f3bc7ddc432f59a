"""What a checkpoint is: opened, mended, recognised, its weights by our names and its architecture inferred.

All of it from the headers of the file; no number is read here.
"""

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping

import numpy as np

from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.formats import POSITIONS, TORCH, TORCH_STAGES, Layout, identify_layout
from keras_vit.checkpoints.hf_config import FileConfig, read_file_config
from keras_vit.checkpoints.key_mapping import Weight, translate
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.npz import open_npz
from keras_vit.files.safetensors import open_folder, open_safetensors
from keras_vit.models.config import (
    MODELS,
    Classifier,
    ConvStem,
    ModelConfig,
    PositionEmbeddingKind,
    ResNetConfig,
    ViTConfig,
)

_PICKLES = (".pth", ".pt", ".bin", ".pkl", ".ckpt")
_PREFIXES = ("opt/target/", "params/img/", "params/")
_FIRST_QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query"
# Of the official models: (hidden_size, mlp_dim, num_layers) -> attention heads.
_OFFICIAL_HEADS = {
    (model.hidden_size, model.mlp_dim, model.num_layers): model.num_heads
    for model in MODELS.values()
    if isinstance(model, ViTConfig)
}
# Mean and deviation of ImageNet, which torchvision's models expect; (0 - mean) / deviation and (1 - mean) / deviation.
_IMAGENET_RANGE = (
    (-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225),
    (0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225),
)


# Parts of the keys of models that share most of their arrays with ours.
_FOREIGN = {
    "reg_token": "register tokens",
    "register_tokens": "register tokens",
    "dist_token": "a distillation token",
    "distillation_token": "a distillation token",
    "attn_pool.": "timm's attention pooling",
    "ls1.": "layer scale",
    "layer_scale": "layer scale",
    "q_norm": "norms of queries and keys",
    "norm_pre": "a norm before the blocks",
    "rel_pos": "relative positions of timm",
    "relative_position": "relative positions of transformers",
    "decoder": "a decoder",
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A file whose headers are read: what it is, and its weights by our names."""

    layout: str
    origin: Layout
    weights: Mapping[str, Weight]
    unexpected_keys: tuple[str, ...] = ()
    """Keys that the layout does not know."""
    unused: tuple[str, ...] = ()
    """Keys of arrays that are no weights: an optimizer's state, counters."""
    path: pathlib.Path | None = None
    """Of the file or folder; None for the weights of a model."""

    @functools.cached_property
    def file_config(self) -> FileConfig:
        """What config.json says. Raises UserError if it asks for what is not built here."""
        return FileConfig() if self.path is None else read_file_config(self.path, self.layout)


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Read the headers of a checkpoint and say what it is. Raises UserError for whatever is no whole, known file.

    path: of a file or folder, or an address or official name, see `find_checkpoint`.
    """
    path = find_checkpoint(path)
    arrays, ignored = normalize_keys(_open_arrays(path))
    layout, origin = identify_layout(arrays)
    weights, unused = translate(arrays, origin.rules)
    if layout == "big_vision":
        weights = _with_class_position(weights)
    counters = {key for key in unused if key.endswith((".num_batches_tracked", "embeddings.mask_token"))}
    unexpected_keys = tuple(sorted(key for key in unused if key not in counters))
    return Checkpoint(layout, origin, weights, unexpected_keys, (*ignored, *sorted(counters)), path)


def refuse_unexpected_keys(checkpoint: Checkpoint) -> None:
    """Raise UserError if the file holds what no model built here has."""
    if not checkpoint.unexpected_keys:
        return
    kinds = {kind for part, kind in _FOREIGN.items() if any(part in key for key in checkpoint.unexpected_keys)}
    what = f" (it has {listed(sorted(kinds))})" if kinds else ""
    raise UserError(
        f"The file is of a kind of model that is not built here{what}: left over in it: "
        f"{listed(list(checkpoint.unexpected_keys))}."
    )


def untold(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """What a file without a configuration leaves open because several models of its origin have the same arrays.

    timm has, without a class token: models with a norm before pooling, of either GELU and not only of the official
    number of heads; and with one after it, besides ordinary blocks, those that normalise after each branch.
    """
    bare = checkpoint.layout == "timm" and not checkpoint.file_config.names_model
    if not bare or not isinstance(config, ViTConfig) or config.classifier == "token":
        return ()
    if config.norm_after_pooling:
        return ("block",)
    return ("gelu", "num_heads")


def refuse_untold(checkpoint: Checkpoint, config: ModelConfig, given: Mapping[str, object]) -> None:
    """Raise UserError if the file leaves open what would change the numbers, and the caller does not say it.

    given: by argument of `from_checkpoint`, None where the caller gave none.
    """
    open_ones = untold(checkpoint, config)
    if "block" in open_ones and not config.qkv_bias:
        raise UserError(
            "The arrays are those of timm's vit_base_patch16_rpn_224, which normalises after each branch and is not "
            "built here, as well as of a model that is; put the config.json beside them, which names the architecture."
        )
    if missing := [name for name in open_ones if name in given and given[name] is None]:
        raise UserError(
            f"timm has several models with these arrays and other numbers; give {' and '.join(missing)}, or put the "
            "config.json beside the file, which names the architecture."
        )


def listed(keys: list[str]) -> str:
    """Keys for a sentence, the first ten of them, none longer than 200 characters."""
    shown = ", ".join(key[:200] for key in keys[:10]) or "nothing"
    return f"{shown} and {len(keys) - 10} more" if len(keys) > 10 else shown


def _numbered(numbers: Iterable[int]) -> str:
    return f"[{listed([str(number) for number in sorted(numbers)])}]"


def _open_arrays(path: pathlib.Path) -> dict[str, LazyArray]:
    if path.is_dir():
        return open_folder(path)
    if path.suffix in _PICKLES:
        raise UserError(
            f"{path.name} is a pickle, which can run code when it is opened; convert it where you trust it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')."
        )
    return open_safetensors(path) if path.suffix == ".safetensors" else open_npz(path)


def normalize_keys(arrays: Mapping[str, LazyArray]) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
    """The model's arrays without the prefix of the file, without the numbers that some BiT files append, and with a
    stacked encoder (big_vision's scan) taken apart; and the keys that belong to no model, such as an optimizer's state.
    """
    found = [prefix for prefix in ("", *_PREFIXES) if _has_model(arrays, prefix)]
    if len(found) > 1:
        places = " and ".join(repr(prefix) if prefix else "no prefix" for prefix in found)
        raise UserError(f"The file should hold one model, but holds one each under {places}; keep one of them.")
    prefix = found[0] if found else ""
    ignored = tuple(key for key in arrays if not key.startswith(prefix))
    normalized = {}
    for key, stored in arrays.items():
        if not key.startswith(prefix):
            continue
        name = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", key.removeprefix(prefix))
        found = _unstack_scan(name, stored) if name.startswith("Transformer/encoderblock/") else {name: stored}
        if twice := normalized.keys() & found.keys():
            raise UserError(
                f"The arrays {normalized[min(twice)].key!r} and {key!r} are the same weight; keep one of them."
            )
        normalized |= found
    return normalized, ignored


def _has_model(arrays: Mapping[str, LazyArray], prefix: str) -> bool:
    return f"{prefix}embedding/kernel" in arrays or any(key.startswith(f"{prefix}resnet/root_block/") for key in arrays)


def _unstack_scan(name: str, stored: LazyArray) -> dict[str, LazyArray]:
    if not stored.shape or stored.shape[0] > 1000:
        raise UserError(f"The array {stored.key!r} should begin with an axis for the blocks, but has {stored.shape}.")
    return {
        name.replace("encoderblock/", f"encoderblock_{layer}/"): dataclasses.replace(stored, part=layer)
        for layer in range(stored.shape[0])
    }


def _with_class_position(weights: dict[str, Weight]) -> dict[str, Weight]:
    """big_vision adds no position to the class token: ours is zero."""
    if "cls" not in weights or POSITIONS not in weights:
        return weights
    table = weights[POSITIONS]
    if len(table.shape) != 3:
        raise UserError(f"The array {table.source.key!r} should have 3 axes, but has shape {table.shape}.")
    shape = (table.shape[0], table.shape[1] + 1, table.shape[2])
    return weights | {POSITIONS: Weight(table.source, shape, lambda array: np.pad(array, ((0, 0), (1, 0), (0, 0))))}


def infer_config(
    checkpoint: Checkpoint,
    file_config: FileConfig,
    classifier: Classifier | None = None,
    position_embedding: PositionEmbeddingKind | None = None,
    conv_stem_strides: tuple[int, ...] | None = None,
) -> ModelConfig:
    """The architecture that the weights belong to; the arguments decide only what they cannot tell.

    declared: what config.json says, or the caller instead.
    """
    weights = checkpoint.weights
    if "embedding/kernel" in weights:
        config = _infer_vit(checkpoint, file_config, classifier, position_embedding, conv_stem_strides)
        per_block = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.mlp_dim
        least = config.num_layers * per_block
        _refuse_contradictions(config, file_config.sizes)
        if isinstance(config.stem, ResNetConfig):
            _refuse_contradictions(config.stem, file_config.resnet_sizes)
    else:
        config = _infer_resnet(checkpoint, file_config, preactivation="resnet/group_norm/gamma" in weights)
        _refuse_contradictions(config, file_config.resnet_sizes)
        least = sum(
            units * (wide // 4) * (2 * wide + 9 * wide // 4)
            for units, wide in zip(config.block_units, config.stage_channels, strict=True)
        )
    held = sum(math.prod(weight.shape) for weight in weights.values())
    if least > held:
        raise UserError(
            f"The arrays do not fit together: such a model has at least {least} weights, but they hold {held}."
        )
    return config


def _refuse_contradictions(config: ModelConfig, sizes: Mapping[str, tuple[str, object]]) -> None:
    for field, (name, value) in sizes.items():
        if getattr(config, field) != value:
            raise UserError(
                f"config.json says {name}={value!s:.80}, but the arrays are of a model with {getattr(config, field)}; "
                "put the config.json beside them that belongs to them."
            )


def _infer_vit(
    checkpoint: Checkpoint,
    file_config: FileConfig,
    classifier: Classifier | None,
    position_embedding: PositionEmbeddingKind | None,
    conv_stem_strides: tuple[int, ...] | None,
) -> ViTConfig:
    weights, origin = checkpoint.weights, checkpoint.origin
    blocks = {int(match[1]) for key in weights if (match := re.match(r"Transformer/encoderblock_(\d+)/", key))}
    if not blocks or blocks != set(range(len(blocks))):
        raise UserError(f"The encoder blocks should be numbered from 0 without gaps, but are {_numbered(blocks)}.")
    _require_alike(weights, r"(Transformer/encoderblock_\d+/)(.*)")
    first = "Transformer/encoderblock_0/"
    patch = _shape(weights, "embedding/kernel", 4)
    hidden_size = patch[3]
    _shape(weights, f"{_FIRST_QUERY}/kernel", 2)
    seen = "token" if "cls" in weights else "map" if "MAPHead_0/probe" in weights else None
    if seen and classifier not in (None, seen):
        raise UserError(f"The file's weights are those of the classifier {seen!r}, but {classifier!r} was asked for.")
    if file_config.classifier not in (None, seen or classifier or "gap"):
        raise UserError(
            f"config.json says that the head reads {file_config.classifier!r}, but the arrays are those of "
            f"{seen or classifier or 'gap'!r}."
        )
    if POSITIONS in weights:
        if _shape(weights, POSITIONS, 3)[0] != 1:
            raise UserError(f"The array {weights[POSITIONS].source.key!r} should begin with an axis of length 1.")
        position_embedding = "learned"
    norm = weights.get("Transformer/encoder_norm/scale")
    mlp_dim = _shape(weights, f"{first}MlpBlock_3/Dense_0/kernel", 2)[1]
    return ViTConfig(
        patch_size=patch[0] if patch[0] == patch[1] else patch[:2],
        hidden_size=hidden_size,
        num_layers=len(blocks),
        num_heads=_num_heads(weights, file_config, (hidden_size, mlp_dim, len(blocks))),
        mlp_dim=mlp_dim,
        classifier=seen or classifier or "gap",
        representation_size=_shape(weights, "pre_logits/kernel", 2)[1] if "pre_logits/kernel" in weights else None,
        gelu=file_config.gelu or origin.gelu,
        layer_norm_epsilon=file_config.layer_norm_epsilon or origin.layer_norm_epsilon,
        stem=_infer_stem(checkpoint, file_config, conv_stem_strides),
        position_embedding=position_embedding or ("sincos-2d" if checkpoint.layout == "big_vision" else "none"),
        qkv_bias=f"{_FIRST_QUERY}/bias" in weights,
        norm_after_pooling=norm is not None and norm.source.key == "fc_norm.weight",
    )


def _require_alike(weights: Mapping[str, Weight], pattern: str) -> None:
    """Refuse blocks of which one lacks a weight that another has, before a model is built for them."""
    parts: dict[str, set[str]] = {}
    for key in weights:
        if match := re.fullmatch(pattern, key):
            parts.setdefault(match[1], set()).add(match[2])
    every = set().union(*parts.values())
    for block, held in parts.items():
        if lacking := sorted(every - held):
            raise UserError(f"The checkpoint is not whole: missing in the file: {block}{lacking[0]}.")


class UnknownNumHeads(UserError):
    """Neither the file nor an official model of its width tells the number of attention heads."""


def _num_heads(weights: Mapping[str, Weight], file_config: FileConfig, sizes: tuple[int, int, int]) -> int:
    num_heads = known_num_heads(weights, file_config) or _OFFICIAL_HEADS.get(sizes)
    if num_heads is None:
        raise UnknownNumHeads(
            f"The file does not tell its number of attention heads, and no official model is {sizes[0]} wide with "
            f"{sizes[2]} layers and MLPs of {sizes[1]}; give num_heads."
        )
    return num_heads


def known_num_heads(weights: Mapping[str, Weight], file_config: FileConfig) -> int | None:
    """The attention heads of a ViT as its arrays tell them, or a configuration; None if neither does."""
    query = weights[f"{_FIRST_QUERY}/kernel"]
    held = heads_in(f"{_FIRST_QUERY}/kernel", query)
    if held is not None and file_config.num_heads not in (None, held):
        raise UserError(f"The file has {held} heads ({query.source.key!r}), not {file_config.num_heads}.")
    return held or file_config.num_heads


def heads_in(key: str, weight: Weight) -> int | None:
    """Flax's projections have an axis for the heads: before the last one, of the output's kernel the first."""
    projection = re.search(r"/MultiHeadDotProductAttention_\d/(query|key|value|out)/(kernel|bias)$", key)
    shape = weight.source.shape
    if projection is None or len(shape) != {"kernel": 3, "bias": 2}[projection[2]]:
        return None
    return shape[0 if projection[1] == "out" else -2]


def _infer_stem(
    checkpoint: Checkpoint, file_config: FileConfig, strides: tuple[int, ...] | None
) -> ResNetConfig | ConvStem | None:
    weights = checkpoint.weights
    if "conv_root/kernel" in weights:
        return _infer_resnet(checkpoint, file_config, preactivation=False)
    if "conv_stem/0/conv/kernel" not in weights:
        return None
    kernels = []
    while (key := f"conv_stem/{len(kernels)}/conv/kernel") in weights:
        kernels.append(_shape(weights, key, 4))
    channels = tuple(kernel[3] for kernel in kernels)
    if strides is None:
        widening = tuple(2 if wide > before else 1 for before, wide in zip((0, *channels[:-1]), channels, strict=True))
        strides = (2,) * len(channels) if len(channels) <= 4 else widening
    return ConvStem(channels, tuple(kernel[0] for kernel in kernels), strides)


def _infer_resnet(checkpoint: Checkpoint, file_config: FileConfig, preactivation: bool) -> ResNetConfig:
    weights, origin = checkpoint.weights, checkpoint.origin
    if preactivation:
        root, last, unit = "resnet/root_block/standardized_conv2d/kernel", "c/standardized_conv2d/kernel", r"unit\d\d+"
    else:
        root, last, unit = "conv_root/kernel", "conv3/kernel", r"unit[1-9]\d*"
    units = {}
    for key in weights:
        if match := re.match(rf"(?:resnet/)?block(\d+)/({unit})/", key):
            units.setdefault(int(match[1]), set()).add(match[2])
    if sorted(units) != list(range(1, len(units) + 1)):
        raise UserError(f"The stages should be numbered from 1 without gaps, but are {_numbered(units)}.")
    if len(units) > TORCH_STAGES and checkpoint.layout in TORCH:
        raise UserError(
            f"The file has {len(units)} stages, of which timm and transformers dilate those after the fourth; ResNets "
            f"here have at most {TORCH_STAGES} of them."
        )
    stages = [f"{'resnet/' if preactivation else ''}block{stage}/{min(units[stage])}/{last}" for stage in sorted(units)]
    return ResNetConfig(
        tuple(len(units[stage]) for stage in sorted(units)),
        root_channels=_shape(weights, root, 4)[3],
        stage_channels=tuple(_shape(weights, key, 4)[3] for key in stages),
        preactivation=preactivation,
        num_groups=file_config.num_groups or 32,
        group_norm_epsilon=origin.group_norm_epsilon,
        variance_epsilon=origin.variance_epsilon,
        deviation_epsilon=origin.deviation_epsilon,
    )


def _shape(weights: Mapping[str, Weight], key: str, rank: int) -> tuple[int, ...]:
    if key not in weights:
        raise UserError(f"The file has no array for the weight {key!r}, without which its architecture is not known.")
    shape = weights[key].shape
    if len(shape) != rank or min(shape) < 1:
        raise UserError(f"The array {weights[key].source.key!r} should have {rank} axes as {key!r}, but has {shape}.")
    return shape


def file_config_grid(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns of the stored position embeddings as config.json tells them, else None."""
    file_config = checkpoint.file_config
    size = file_config.image_size
    if size is None or isinstance(config, ResNetConfig) or POSITIONS not in checkpoint.weights:
        return None
    stored = checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_tokens
    stride = (1, 1) if config.stem is not None else config.patch
    if size[0] % stride[0] == 0 == size[1] % stride[1] and math.prod(grid := config.grid(size)) == stored:
        return grid
    if file_config.image_size_binds:
        raise UserError(
            f"config.json says image_size={size}, but the arrays hold position embeddings for {stored} patches of "
            f"{config.patch}; put the config.json beside them that belongs to them."
        )
    return None


def known_image_size(
    checkpoint: Checkpoint, config: ModelConfig, grid: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The image size that the file is for: by the `grid` of its position embeddings, which is a square unless told,
    without them by config.json. None if it tells none.
    """
    if isinstance(config, ResNetConfig) or POSITIONS not in checkpoint.weights:
        return checkpoint.file_config.image_size
    grid = grid or square_grid(checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_tokens)
    if grid is None:
        return None
    stride = 1 if config.stem is None else config.stem.total_stride
    return grid[0] * config.patch[0] * stride, grid[1] * config.patch[1] * stride


def value_range(checkpoint: Checkpoint, channels: int) -> tuple:
    """What 0 and 255 become, as of Preprocessing; the official [-1, 1] unless the file or its origin says otherwise."""
    file_config = checkpoint.file_config.value_range
    if file_config is None and checkpoint.layout == "torchvision":
        file_config = _IMAGENET_RANGE
    if file_config is None or (isinstance(file_config[0], tuple) and len(file_config[0]) != channels):
        return -1.0, 1.0
    return file_config


def square_grid(num_tokens: int) -> tuple[int, int] | None:
    """Rows and columns of a square of tokens; None if they are none."""
    side = math.isqrt(max(num_tokens, 0))
    return (side, side) if side > 0 and side * side == num_tokens else None


def no_square(num_tokens: int) -> UserError:
    """What to say of position embeddings whose grid is neither told nor square."""
    return UserError(
        f"The file has position embeddings for {num_tokens} patches, which is no square; give stored_grid=(rows, "
        "columns), or the image_size they were made for."
    )
