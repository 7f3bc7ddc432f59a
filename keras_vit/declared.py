"""What stands beside the weights: config.json and preprocessor_config.json of transformers and timm, in and out."""

import dataclasses
import pathlib

from keras_vit.config import ModelConfig, ResNetConfig
from keras_vit.errors import UserError
from keras_vit.preprocess import Preprocessing
from keras_vit.tensors import read_json

# transformers' ACT2FN; the first two names are what is written.
_GELU = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "erf"}


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a configuration says and arrays cannot; None where it says nothing."""

    num_heads: int | None = None
    num_groups: int | None = None
    gelu: str | None = None
    layer_norm_epsilon: float | None = None
    image_size: tuple[int, int] | None = None
    classifier: str | None = None
    value_range: tuple | None = None
    """What 0 and 255 become, a number each or one for each channel."""


def read_declared(path: pathlib.Path) -> Declared:
    """What the configurations beside the weights say; `path` is the folder or the file of weights in it."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".npz" or not (folder / "config.json").is_file():
        return Declared()
    config = read_json(folder / "config.json")
    if "architecture" in config or "pretrained_cfg" in config:
        return _timm(config)
    processor = folder / "preprocessor_config.json"
    return _transformers(config, read_json(processor) if processor.is_file() else {})


def _transformers(config: dict, processor: dict) -> Declared:
    act = config.get("hidden_act")
    is_vit = config.get("model_type") in ("vit", "vit-hybrid")
    if is_vit and act is not None and (not isinstance(act, str) or act not in _GELU):
        raise UserError(f"config.json asks for the activation {act!r}; known are {', '.join(_GELU)}.")
    backbone = config.get("backbone_config") or config
    if not isinstance(backbone, dict):
        raise UserError(f"config.json should give backbone_config as an object, but gives {backbone!r:.80}.")
    if backbone.get("model_type") == "bit":
        _refuse_other_operators(backbone)
    if is_vit and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"config.json asks for the pooler's activation {config['pooler_act']!r}; only tanh is known.")
    return Declared(
        num_heads=_number(config, "num_attention_heads"),
        num_groups=_number(backbone, "num_groups"),
        gelu=_GELU[act] if is_vit and act else None,
        layer_norm_epsilon=_number(config, "layer_norm_eps", float) if is_vit else None,
        image_size=_pair(config.get("image_size")),
        value_range=_range(processor.get("image_mean"), processor.get("image_std")),
    )


def _refuse_other_operators(backbone: dict) -> None:
    """Two of the Bit networks that transformers can describe exist as weights: BiT, and the stem of the hybrids."""
    layer_type, padding = backbone.get("layer_type"), backbone.get("global_padding")
    same = isinstance(padding, str) and padding.upper() == "SAME"
    if (layer_type, same) not in (("preactivation", False), ("bottleneck", True)) or (padding and not same):
        raise UserError(
            "config.json should describe a Bit of layer_type 'preactivation' with global_padding null, or "
            f"'bottleneck' with 'same', but says {layer_type!r} with {padding!r}."
        )
    expected = {"hidden_act": "relu", "output_stride": 32, "embedding_dynamic_padding": same}
    for field, value in expected.items():
        if backbone.get(field, value) != value:
            raise UserError(
                f"config.json should give {field}={value!r} for this Bit, but gives {backbone[field]!r:.80}."
            )


def _timm(config: dict) -> Declared:
    pretrained = config.get("pretrained_cfg")
    pretrained = pretrained if isinstance(pretrained, dict) else config
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, dict) else {}
    size = arguments.get("img_size") or pretrained.get("input_size")
    if arguments.get("no_embed_class"):
        raise UserError("config.json asks for no_embed_class, position embeddings without the class token: not known.")
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool not in (None, "token", "avg"):
        raise UserError(f"config.json asks for global_pool={pool!r:.80}; only token and avg are known.")
    return Declared(
        classifier={"token": "token", "avg": "gap"}.get(pool),
        num_heads=_number(arguments, "num_heads"),
        image_size=_pair(size[1:] if isinstance(size, list) and len(size) == 3 else size),
        value_range=_range(pretrained.get("mean"), pretrained.get("std")),
    )


def _number(config: dict, field: str, kind: type = int):
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 10**6:
        raise UserError(f"config.json should give a positive number for {field!r}, but gives {value!r}.")
    return kind(value)


def _pair(size) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = [size, size] if isinstance(size, int) else size
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and 0 < n < 10**5 for n in pair)):
        raise UserError(f"config.json should give the image size as one or two numbers of pixels, but gives {size!r}.")
    return tuple(pair)


def _range(mean, std) -> tuple | None:
    """(mean, std) of images in [0, 1] -> what 0 and 255 become."""
    if mean is None or std is None:
        return None
    channels = [mean, std]
    if not all(isinstance(part, list) and all(_is_moderate(n) for n in part) for part in channels):
        raise UserError(f"The mean and deviation of the images should be lists of numbers, but are {mean!r}, {std!r}.")
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise UserError(f"The images' mean {mean} and deviation {std} should have one positive number per channel.")
    low = tuple(-m / s for m, s in zip(mean, std, strict=True))
    high = tuple((1 - m) / s for m, s in zip(mean, std, strict=True))
    if len(set(low)) == len(set(high)) == 1:
        return low[0], high[0]
    return low, high


def _is_moderate(number) -> bool:
    return isinstance(number, int | float) and -1e6 < number < 1e6


def huggingface_config(config: ModelConfig, preprocessing: Preprocessing, num_classes: int) -> dict:
    """config.json of transformers for a model of ours that it can express."""
    fields = {"dtype": "float32", "num_channels": preprocessing.channels}
    if num_classes:
        fields["id2label"] = {str(index): f"LABEL_{index}" for index in range(num_classes)}
        fields["label2id"] = {label: int(index) for index, label in fields["id2label"].items()}
    if isinstance(config, ResNetConfig):
        return {
            **fields,
            **_bit_fields(config),
            "architectures": ["BitForImageClassification" if num_classes else "BitModel"],
        }
    fields |= {
        "model_type": "vit" if config.stem is None else "vit-hybrid",
        "architectures": [
            ("ViT" if config.stem is None else "ViTHybrid") + ("ForImageClassification" if num_classes else "Model")
        ],
        "image_size": list(preprocessing.image_size),
        "patch_size": config.patch_size if isinstance(config.patch_size, int) else list(config.patch_size),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "qkv_bias": config.qkv_bias,
        "pooler_act": "tanh",
        "pooler_output_size": config.representation_size or config.hidden_size,
    }
    if len(set(fields["image_size"])) == 1:
        fields["image_size"] = fields["image_size"][0]
    if isinstance(config.stem, ResNetConfig):
        fields["backbone_config"] = _bit_fields(config.stem)
    return fields


def _bit_fields(config: ResNetConfig) -> dict:
    stages = [f"stage{stage + 1}" for stage in range(len(config.block_units))]
    return {
        "model_type": "bit",
        "layer_type": "preactivation" if config.preactivation else "bottleneck",
        "global_padding": None if config.preactivation else "SAME",
        "embedding_dynamic_padding": not config.preactivation,
        "depths": list(config.block_units),
        "embedding_size": config.root_channels,
        "hidden_sizes": list(config.stage_channels),
        "num_groups": config.num_groups,
        "hidden_act": "relu",
        "width_factor": 1,
        "out_features": stages[-1:],
        "out_indices": [len(stages)],
        "stage_names": ["stem", *stages],
    }


def preprocessor_config(preprocessing: Preprocessing) -> dict:
    """preprocessor_config.json of transformers: resize, rescale and normalisation as ours."""
    lows, highs = preprocessing.channel_ranges()
    std = [1 / (high - low) for low, high in zip(lows, highs, strict=True)]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": preprocessing.image_size[0], "width": preprocessing.image_size[1]},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [-low * deviation for low, deviation in zip(lows, std, strict=True)],
        "image_std": std,
    }
