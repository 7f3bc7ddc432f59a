"""Infer the architecture of a checkpoint from the shapes of its weights and its config.json."""

import dataclasses
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.checkpoint import Checkpoint, LoadOptions
from keras_vit.checkpoints.formats.file_config import FileConfig
from keras_vit.checkpoints.formats.transformers.eomt import delta_error
from keras_vit.checkpoints.key_mapping import (
    BIT_ROOT,
    POSITIONS,
    Rule,
    Weight,
    heads_in,
    join_keys,
    key_of,
    refuse_keys,
    shape_of,
)
from keras_vit.checkpoints.layouts import NUM_GROUPS, TORCH_STAGES
from keras_vit.checkpoints.stored_positions import known_image_size, with_prefix_positions
from keras_vit.errors import UserError
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import (
    Classifier,
    ConvStem,
    DetectionConfig,
    Distillation,
    ModelConfig,
    ResNetConfig,
    SegmentationConfig,
    TaskConfig,
    ViTConfig,
    with_rates,
)
from keras_vit.models.named_models import MODELS

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

_FIRST_QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query"
# Official models: (hidden_size, mlp_dim, num_layers) -> num_heads.
_OFFICIAL_HEADS = {
    (model.hidden_size, model.mlp_dim, model.num_layers): model.num_heads
    for model in MODELS.values()
    if isinstance(model, ViTConfig) and model.position_embedding != "rotary"  # whose H has 20 heads instead of 16
}
# Substrings of keys that identify unsupported models with otherwise the same arrays.
_UNSUPPORTED = {
    "q_norm": "norms of queries and keys",
    "rel_pos": "relative positions of timm",
    "relative_position": "relative positions of transformers",
    "decoder": "a decoder",
}
# Mean size of the scales of LayerNorm, below which they are differences of two models.
_LEAST_SCALE = 0.02
# Initial layer scale where config.json does not say: that of DINOv2. The stored factors are read in any case.
_LAYER_SCALE = 1e-5
_DEFAULT_SIZE = 224, 224  # pixels, for models without position embeddings
# Kernels whose input is the image, of a model with convolutions before the encoder or without encoder.
_FIRST_CONVOLUTIONS = ("conv_root/kernel", "conv_stem/0/conv/kernel", BIT_ROOT)


def infer_blueprint(checkpoint: Checkpoint, name: str, options: LoadOptions) -> Blueprint:
    """Infer what the model of a checkpoint is, with what the caller gave; print what is assumed.

    Args:
        checkpoint: of a published layout.
        name: by which it was opened, for messages and the name of the model.
        options: what the files do not say, and the image size and rates that are wanted.

    Raises UserError for arrays and options that fit no supported model, or several.
    """
    _refuse_unsupported(checkpoint, options)
    config, images = infer_config(checkpoint, options), checkpoint.file_config.image_size
    options.refuse(_inapplicable(checkpoint, config, options))
    if isinstance(config, ViTConfig) and options.size not in (None, images):
        options.with_patch(config).check_image_size(options.size)
    size = options.size or known_image_size(checkpoint, config) or _DEFAULT_SIZE
    num_channels = checkpoint.weights[first_kernel(checkpoint.weights)].shape[2]
    _warn_of_images(checkpoint, name, None if options.size else size, num_channels)
    preprocessing = original_preprocessing(checkpoint, size, num_channels)
    if assumed := _assumed(checkpoint, config, options, preprocessing):
        print(f"Assumed, because {checkpoint.path} does not say it: {'; '.join(assumed)}.")
    # The name of the folder or file, in letters that layers may have.
    last = re.sub(r"\.(npz|safetensors|h5)$", "", name.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1])
    activation = checkpoint.file_config.classifier_activation if options.num_classes is None else None
    return Blueprint(
        with_rates(config, options.rates),
        preprocessing,
        task=infer_task(checkpoint),
        classes=checkpoint.classes,
        classifier_activation=options.classifier_activation or activation,
        dtype=options.dtype,
        name=options.name or re.sub(r"[^A-Za-z0-9_.-]", "_", last).strip("._-") or None,
    )


def ambiguous_settings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Settings that neither the arrays nor a config.json determine, because several models have the same arrays."""
    is_named = checkpoint.file_config.gelu is not None or checkpoint.file_config.resnet_sizes
    return () if is_named else checkpoint.layout.ambiguous


def _refuse_unsupported(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise UserError for arrays of no model here, or of several that compute something else."""
    keys = checkpoint.unexpected_keys
    parts = sorted({name for part, name in _UNSUPPORTED.items() if any(part in key for key in keys)})
    reason = f" (it has {join_keys(parts)})" if parts else ""
    refuse_keys(f"is of an unsupported kind of model{reason}", unexpected=keys)
    ambiguous = set(ambiguous_settings(checkpoint))
    if options.gelu == "quick":  # of CLIP alone; Perception Encoders have the exact one
        ambiguous.discard("position_embedding")
    missing = [name for name in sorted(ambiguous) if getattr(options, name, 0) is None]
    # With biases of query, key and value, it is the order of norms that models here have.
    has_other_blocks = "block" in ambiguous and f"{_FIRST_QUERY}/bias" not in checkpoint.weights
    if missing or has_other_blocks or ambiguous & {"global_padding", "architecture"}:
        advice = f", or give {' and '.join(missing)} to keras_vit.from_checkpoint" if missing else ""
        raise UserError(
            "Several models have these arrays but other outputs; put the config.json beside the file, which names the "
            f"architecture{advice}."
        )


def _inapplicable(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> dict[str, str]:
    is_vit, has_table = isinstance(config, ViTConfig), POSITIONS in checkpoint.weights
    stem = config.stem if isinstance(config, ViTConfig) else config
    of_vit = ("num_heads", "gelu", "layer_norm_epsilon", "classifier", "position_embedding")
    inapplicable: dict[str, str] = {} if is_vit else dict.fromkeys(of_vit, "the file is of a ResNet")
    if has_table and options.position_embedding != "learned":
        inapplicable["position_embedding"] = "the file has a table of them"
    if not has_table:
        inapplicable["stored_grid"] = "the file has no table of position embeddings"
    if not isinstance(stem, ResNetConfig):
        inapplicable["num_groups"] = "the file has no GroupNorm"
    if not isinstance(stem, ConvStem):
        inapplicable["conv_stem_strides"] = "the file has no early convolutions"
    return inapplicable


def _warn_of_images(checkpoint: Checkpoint, path: str, size: tuple[int, int] | None, num_channels: int) -> None:
    """Warn where the original makes other images. size: that of the file, unless the caller gave one."""
    images = checkpoint.file_config.images
    if images is None:
        return
    if None not in (images.size, size) and images.size != size:
        made, taken = ("x".join(map(str, each or ())) for each in (images.size, size))
        warnings.warn(
            f"The original of {path} gives its model images of {made} pixels, although the position embeddings are for "
            f"{taken} pixels, which the model here takes; pass image_size={max(images.size or ())} for its "
            "predictions.",
            stacklevel=5,
        )
    if images.num_channels not in (None, num_channels):
        warnings.warn(
            f"{path} says how {images.num_channels} channels are normalized, but its images have {num_channels}; here "
            "they are scaled to [-1, 1].",
            stacklevel=5,
        )


def _assumed(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, preprocessing: "Preprocessing"
) -> list[str]:
    """Return the settings that the files do not contain, although models of this format differ in them."""
    if checkpoint.format is None or not checkpoint.format.config_files:
        return []
    file_config, assumed = checkpoint.file_config, list[str]()
    if not checkpoint.is_preprocessing_known:
        assumed.append(preprocessing.summary())
    if file_config.gelu is None and isinstance(config, ViTConfig):
        assumed += [f"{config.num_heads} heads"] if known_num_heads(checkpoint, options) is None else []
        assumed += [f"GELU {config.gelu}"] if options.gelu is None else []
    return assumed


def first_kernel(weights: Mapping[str, Weight]) -> str:
    """The key of the kernel whose input is the image."""
    return next(key for key in (*_FIRST_CONVOLUTIONS, "embedding/kernel") if key in weights)


def check_numbered(what: str, numbers: Collection[int], first: int = 0) -> None:
    """Raise UserError unless things that are counted in the keys are numbered without gaps."""
    if sorted(numbers) != list(range(first, first + len(numbers))):
        shown = join_keys([str(number) for number in sorted(numbers)])
        raise UserError(f"The {what} should be numbered from {first} without gaps, but are [{shown}].")


def count(weights: Iterable[str], rules: Iterable[Rule], pattern: str, what: str) -> int:
    """The number of things, such as blocks, that the keys count from 0 and that all have the same parts.

    pattern: of the beginning of a key, with the number as its group. Raises UserError for gaps and missing parts, with
    the keys that these have in the file.
    """
    numbers: set[int] = set()
    parts: dict[str, set[str]] = {}
    for key in weights:
        if match := re.match(pattern, key):
            numbers.add(int(match[1]))
            parts.setdefault(match[0], set()).add(key[match.end() :])
    check_numbered(what, numbers)
    every = sorted(set().union(*parts.values()))
    missing = [f"{one}{part}" for one, own in parts.items() for part in every if part not in own]
    refuse_keys("is incomplete", [key_of(name, rules) for name in missing])
    return len(numbers)


def infer_task(checkpoint: Checkpoint) -> TaskConfig | None:
    """The further task of the model of a checkpoint; None for a classifier or features."""
    weights, file_config, task = checkpoint.weights, checkpoint.file_config, checkpoint.layout.task
    if task is None:
        return None
    settings: dict[str, Any] = {name: value for name, value in file_config.task_settings.items() if value is not None}
    config: TaskConfig
    if task == "segmentation":
        first_norm = re.compile(r"Transformer/encoderblock_\d+/LayerNorm_0/scale")
        norms = [weight for key, weight in weights.items() if first_norm.fullmatch(key)]
        if all(float(abs(norm.read()).mean()) < _LEAST_SCALE for norm in norms):
            raise delta_error()
        config = SegmentationConfig(
            num_classes=_shape(checkpoint, "class_head/kernel", 2)[1] - 1,
            num_queries=_shape(checkpoint, "queries/tokens", 3)[1],
            num_upscale_blocks=count(weights, checkpoint.layout.rules, r"upscale_(\d+)/", "blocks of upscaling"),
            **_masked_blocks(checkpoint),
            **settings,
        )
    else:
        config = DetectionConfig(
            embedding_size=_shape(checkpoint, "class_head/Dense_0/kernel", 2)[1],
            objectness="objectness_head/Dense_0/kernel" in weights,
        )
    refuse_contradictions(config, file_config.task_sizes)
    return config


def _masked_blocks(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of the blocks with queries that the arrays show; none where config.json says them."""
    if "num_blocks" in checkpoint.file_config.task_settings:
        return {}
    num_blocks = _shape(checkpoint, "mask_attention/probabilities", 1)[0]
    probabilities = checkpoint.weights["mask_attention/probabilities"].read()
    return {"num_blocks": num_blocks, "mask_attention": bool(probabilities.any())}


def infer_config(checkpoint: Checkpoint, options: LoadOptions) -> ModelConfig:
    """The architecture of the weights of a checkpoint, with the settings that the caller gave."""
    file_config, weights = dataclasses.replace(checkpoint.file_config, **options.overrides), checkpoint.weights
    _refuse_other_widths(weights, file_config)
    config: ModelConfig
    if "embedding/kernel" in weights:
        vit = with_prefix_positions(checkpoint, _infer_vit(checkpoint, file_config, options), options.size)
        least = vit.num_layers * (4 * vit.hidden_size**2 + 2 * vit.hidden_size * vit.mlp_dim)
        refuse_contradictions(vit, file_config.sizes)
        refuse_keys("is incomplete", _missing(checkpoint, vit))
        if isinstance(vit.stem, ResNetConfig):
            refuse_contradictions(vit.stem, file_config.resnet_sizes)
        config = vit
    else:
        resnet = _infer_resnet(checkpoint, file_config, "resnet/group_norm/gamma" in weights)
        refuse_contradictions(resnet, file_config.resnet_sizes)
        least = sum(
            units * (wide // 4) * (2 * wide + 9 * wide // 4)
            for units, wide in zip(resnet.block_units, resnet.output_channels, strict=True)
        )
        config = resnet
    num_parameters = sum(math.prod(weight.shape) for weight in weights.values())
    if least > num_parameters:
        raise UserError(
            f"The arrays are inconsistent: such a model has at least {least} parameters, but they have "
            f"{num_parameters}."
        )
    return config


def _missing(checkpoint: Checkpoint, config: ViTConfig) -> list[str]:
    """The keys that are missing although config.json states them, or the code of the layout always has them."""
    weights, file_config, layout = checkpoint.weights, checkpoint.file_config, checkpoint.layout
    biases = (*layout.biases, *("embedding/bias",) * (layout.patch_bias and not config.pre_norm))
    stated = [bias for bias in biases if bias.replace("/bias", "/kernel") in weights]
    stated += [f"{head}/kernel" for head in file_config.heads]
    stated += [] if file_config.layer_scale is None else ["Transformer/encoderblock_0/LayerScale_0/scale"]
    return [key_of(name, layout.rules) for name in stated if name not in weights]


def refuse_contradictions(config: object, sizes: Mapping[str, tuple[str, object]]) -> None:
    """Raise UserError unless the sizes of a config.json, by field of the config, are those of the arrays' config."""
    for field, (name, value) in sizes.items():
        _check_stated(name, value, getattr(config, field), "the arrays are of a model with")


def _refuse_other_widths(weights: Mapping[str, Weight], file_config: FileConfig) -> None:
    """Raise UserError unless the channels and classes that config.json counts are those of the arrays."""
    for counted, axis, keys in (
        (file_config.channels, -2, (*_FIRST_CONVOLUTIONS, "embedding/kernel")),
        (file_config.num_classes, -1, ("head/kernel", "resnet/head/conv2d/kernel")),
    ):
        weight = next((weights[key] for key in keys if key in weights and len(weights[key].shape) >= 2), None)
        if counted is not None and weight is not None:
            _check_stated(*counted, weight.shape[axis], f"{weight.source.key!r} has")


def _check_stated(name: str, stated: object, actual: object, have: str) -> None:
    if stated != actual:
        raise UserError(
            f"config.json says {name}={stated!s:.80}, but {have} {actual}; replace it by the one that belongs to the "
            "arrays."
        )


def _infer_vit(checkpoint: Checkpoint, file_config: FileConfig, options: LoadOptions) -> ViTConfig:
    weights, layout, position_embedding = checkpoint.weights, checkpoint.layout, options.position_embedding
    num_layers = count(weights, layout.rules, r"Transformer/encoderblock_(\d+)/", "encoder blocks")
    first = "Transformer/encoderblock_0/"
    patch = _shape(checkpoint, "embedding/kernel", 4)
    _shape(checkpoint, f"{_FIRST_QUERY}/kernel", 2)
    norm_after_pooling = has_norm_after_pooling(checkpoint, file_config)
    classifier = _infer_classifier(checkpoint, file_config, options.classifier, norm_after_pooling)
    if POSITIONS in weights:
        _shape(checkpoint, POSITIONS, 3)
        position_embedding = "learned"
    has_scale, qkv_bias = f"{first}LayerScale_0/scale" in weights, f"{_FIRST_QUERY}/bias" in weights
    distillation: Distillation = "none"
    if "distillation/tokens" in weights:
        default = "head" if "head_distillation/kernel" in weights else "token"
        distillation = layout.settings.get("distillation", default)
    mlp_dim = _shape(checkpoint, f"{first}MlpBlock_3/Dense_0/kernel", 2)[1]
    pool_mlp_dim = _optional_size(checkpoint, "MAPHead_0/MlpBlock_0/Dense_0/kernel", 2)
    return ViTConfig(
        patch_size=patch[0] if patch[0] == patch[1] else (patch[0], patch[1]),
        hidden_size=patch[3],
        num_layers=num_layers,
        num_heads=_num_heads(checkpoint, options, (patch[3], mlp_dim, num_layers)),
        mlp_dim=mlp_dim,
        classifier=classifier,
        representation_size=_optional_size(checkpoint, "pre_logits/kernel", 2),
        gelu=file_config.gelu or layout.gelu,
        layer_norm_epsilon=file_config.layer_norm_epsilon or layout.layer_norm_epsilon,
        stem=_infer_stem(checkpoint, file_config, options.conv_stem_strides),
        position_embedding=position_embedding or layout.settings.get("position_embedding") or layout.default_positions,
        norm_after_pooling=norm_after_pooling,
        final_norm=layout.settings.get("final_norm", file_config.settings.get("final_norm", True)),
        qkv_bias=qkv_bias,
        key_bias=not qkv_bias or f"{_FIRST_QUERY.removesuffix('query')}key/bias" in weights,
        patch_bias="embedding/bias" in weights,
        head_bias="head/bias" in weights or "head/kernel" not in weights,
        pre_norm="Transformer/pre_norm/scale" in weights,
        gated_mlp=f"{first}MlpBlock_3/gate/kernel" in weights,
        mlp_norm=f"{first}MlpBlock_3/norm/scale" in weights,
        attention_norm=f"{first}MultiHeadDotProductAttention_1/norm/scale" in weights,
        pool_mlp_dim=None if pool_mlp_dim == mlp_dim else pool_mlp_dim,
        **{name: value for name, value in file_config.settings.items() if name != "final_norm"},
        layer_scale=min(file_config.layer_scale or _LAYER_SCALE, 1.0) if has_scale else None,
        num_registers=_optional_size(checkpoint, "registers/tokens", 3) or 0,
        distillation=distillation,
        with_class_token="cls" in weights and classifier in ("gap", "map", "none"),
    )


def has_norm_after_pooling(checkpoint: Checkpoint, file_config: FileConfig) -> bool:
    """Whether the last norm follows the pooling, in timm fc_norm; of one token it is the same before."""
    norm = checkpoint.weights.get("Transformer/encoder_norm/scale")
    return norm is not None and norm.source.key.endswith("fc_norm.weight") and file_config.classifier != "token"


def _infer_classifier(
    checkpoint: Checkpoint, file_config: FileConfig, given: Classifier | None, norm_after_pooling: bool
) -> Classifier:
    """The classifier of the arrays, else the given one. Raises UserError where they or config.json differ."""
    weights, layout = checkpoint.weights, checkpoint.layout
    in_weights: Classifier | None = "map" if "MAPHead_0/probe" in weights else "token" if "cls" in weights else None
    in_weights = layout.settings.get("classifier", in_weights)
    averages = norm_after_pooling or file_config.classifier == "gap"
    averages |= given == "gap" and "classifier" in layout.ambiguous
    if in_weights == "token" and averages:
        in_weights = "gap"
    classifier = in_weights or given or "gap"
    for place, other in (("was given", given), ("is in config.json", file_config.classifier)):
        if other not in (None, classifier):
            raise UserError(f"The file has the weights of classifier={classifier!r}, but {other!r} {place}.")
    return classifier


def _optional_size(checkpoint: Checkpoint, name: str, rank: int) -> int | None:
    """The second axis of an array; None if there is no such array."""
    return _shape(checkpoint, name, rank)[1] if name in checkpoint.weights else None


class UnknownNumHeads(UserError):
    """The number of attention heads is not in the file, and no official model has its sizes."""


def _num_heads(checkpoint: Checkpoint, options: LoadOptions, sizes: tuple[int, int, int]) -> int:
    num_heads = known_num_heads(checkpoint, options) or _OFFICIAL_HEADS.get(sizes)
    if num_heads is None:
        raise UnknownNumHeads(
            f"The file does not contain the number of attention heads, and no official model is {sizes[0]} wide with "
            f"{sizes[2]} layers and MLPs of {sizes[1]}; give num_heads."
        )
    return num_heads


def known_num_heads(checkpoint: Checkpoint, options: LoadOptions) -> int | None:
    """The number of attention heads in the arrays, in config.json or in the options; None if it is in none of them."""
    num_heads = options.num_heads or checkpoint.file_config.num_heads
    query = checkpoint.weights[f"{_FIRST_QUERY}/kernel"]
    return heads_in(f"{_FIRST_QUERY}/kernel", query, num_heads) or num_heads


def _infer_stem(
    checkpoint: Checkpoint, file_config: FileConfig, strides: tuple[int, ...] | None
) -> ResNetConfig | ConvStem | None:
    weights = checkpoint.weights
    if "conv_root/kernel" in weights:
        return _infer_resnet(checkpoint, file_config, preactivation=False)
    if "conv_stem/0/conv/kernel" not in weights:
        return None
    kernels: list[tuple[int, ...]] = []
    while (key := f"conv_stem/{len(kernels)}/conv/kernel") in weights:
        kernels.append(_shape(checkpoint, key, 4))
    channels = tuple(kernel[3] for kernel in kernels)
    if strides is None:
        widening = tuple(2 if wide > before else 1 for before, wide in zip((0, *channels[:-1]), channels, strict=True))
        strides = (2,) * len(channels) if len(channels) <= 4 else widening
    return ConvStem(channels, tuple(kernel[0] for kernel in kernels), strides)


def _infer_resnet(checkpoint: Checkpoint, file_config: FileConfig, preactivation: bool) -> ResNetConfig:
    weights, layout = checkpoint.weights, checkpoint.layout
    if preactivation:
        root, last, unit = BIT_ROOT, "c/standardized_conv2d/kernel", r"unit\d\d+"
    else:
        root, last, unit = "conv_root/kernel", "conv3/kernel", r"unit[1-9]\d*"
    units: dict[int, set[str]] = {}
    for key in weights:
        if match := re.match(rf"(?:resnet/)?block(\d+)/({unit})/", key):
            units.setdefault(int(match[1]), set()).add(match[2])
    check_numbered("stages", units, first=1)
    if len(units) > TORCH_STAGES and layout.torch:
        raise UserError(
            f"The file has {len(units)} stages, of which timm and transformers dilate those after the fourth; ResNets "
            f"here have at most {TORCH_STAGES} of them."
        )
    stages = [f"{'resnet/' if preactivation else ''}block{stage}/{min(units[stage])}/{last}" for stage in sorted(units)]
    return ResNetConfig(
        tuple(len(units[stage]) for stage in sorted(units)),
        root_channels=_shape(checkpoint, root, 4)[3],
        stage_channels=tuple(_shape(checkpoint, key, 4)[3] for key in stages),
        preactivation=preactivation,
        num_groups=file_config.num_groups or NUM_GROUPS,
        group_norm_epsilon=layout.group_norm_epsilon,
        variance_epsilon=layout.variance_epsilon,
        deviation_epsilon=layout.deviation_epsilon,
    )


def _shape(checkpoint: Checkpoint, name: str, rank: int) -> tuple[int, ...]:
    return shape_of(checkpoint.weights, checkpoint.layout.rules, name, rank)


def original_preprocessing(checkpoint: Checkpoint, image_size: int | tuple[int, int], channels: int) -> "Preprocessing":
    """How the original code makes the model's images: as its files say, else as its format does."""
    return (checkpoint.file_config.images or checkpoint.layout.images).at(image_size, channels)
