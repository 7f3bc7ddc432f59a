"""What stands beside the weights: config.json and preprocessor_config.json of transformers and timm."""

import dataclasses
import pathlib
from collections.abc import Mapping

from keras_vit.errors import UserError
from keras_vit.tensors import read_json

# Ours -> transformers' ACT2FN, as it is written; and all names that mean one of them.
TRANSFORMERS_GELU = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
_GELU = {name: form for form, name in TRANSFORMERS_GELU.items()}
_GELU |= {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "erf"}
# Models of transformers whose arrays mean what ours do; ViT-MSN's is its ViT without a pooler.
_BUILT = ("vit", "vit_msn", "vit-hybrid", "bit")
# Sizes that the arrays tell too: ours -> transformers', timm's.
_SIZES = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "mlp_dim": "intermediate_size"}
_TIMM_SIZES = {"hidden_size": "embed_dim", "num_layers": "depth"}


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a configuration says; None where it says nothing."""

    num_heads: int | None = None
    num_groups: int | None = None
    gelu: str | None = None
    layer_norm_epsilon: float | None = None
    image_size: tuple[int, int] | None = None
    image_size_binds: bool = True
    """Whether the position embeddings must be for this size."""
    classifier: str | None = None
    value_range: tuple | None = None
    """What 0 and 255 become, a number each or one for each channel."""
    sizes: Mapping[str, tuple[str, int | tuple[int, int]]] = dataclasses.field(default_factory=dict)
    """What arrays say too: our field -> (its name in config.json, value). Patches are (height, width)."""


def read_declared(path: pathlib.Path, layout: str) -> Declared:
    """What the configurations beside the weights say; `path` is the folder or the file of weights in it."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".npz" or not (folder / "config.json").is_file():
        return Declared()
    config = read_json(folder / "config.json")
    if "architecture" in config or "pretrained_cfg" in config:
        return _timm(config)
    kind = config.get("model_type")
    if layout == "huggingface" and kind is not None and kind not in _BUILT:
        raise UserError(
            f"config.json says model_type={kind!r:.80}, another architecture than those built here, which are "
            f"{', '.join(_BUILT)}."
        )
    processor = folder / "preprocessor_config.json"
    return _transformers(config, read_json(processor) if processor.is_file() else {})


def _transformers(config: dict, processor: dict) -> Declared:
    backbone = config.get("backbone_config") or config
    if not isinstance(backbone, dict):
        raise UserError(f"config.json should give backbone_config as an object, but gives {backbone!r:.80}.")
    if backbone.get("model_type") == "bit":
        _refuse_other_operators(backbone)
    common = {
        "num_groups": _number(backbone, "num_groups"),
        "image_size": _pair(config, "image_size"),
        "value_range": _processor_range(processor),
    }
    if config.get("model_type") == "bit":
        return Declared(**common)
    act = config.get("hidden_act")
    if act is not None and (not isinstance(act, str) or act not in _GELU):
        raise UserError(f"config.json asks for the activation {act!r:.80}; known are {', '.join(_GELU)}.")
    if config.get("pooler_act", "tanh") != "tanh":
        raise UserError(
            f"config.json asks for the pooler's activation {config['pooler_act']!r:.80}; only tanh is known."
        )
    return Declared(
        **common,
        num_heads=_number(config, "num_attention_heads"),
        gelu=_GELU[act] if act else None,
        layer_norm_epsilon=_number(config, "layer_norm_eps", float),
        sizes=_sizes(config, _SIZES),
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
    if arguments.get("no_embed_class"):
        raise UserError("config.json asks for no_embed_class, position embeddings without the class token: not known.")
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool not in (None, "token", "avg"):
        raise UserError(f"config.json asks for global_pool={pool!r:.80}; only token and avg are known.")
    size = _pair(arguments, "img_size")
    return Declared(
        classifier={"token": "token", "avg": "gap"}.get(pool),
        num_heads=_number(arguments, "num_heads"),
        image_size=size or _pair(pretrained, "input_size"),
        image_size_binds=size is not None,  # input_size stays that of the origin when a model is trained further
        value_range=_range(pretrained.get("mean"), pretrained.get("std")),
        sizes=_sizes(arguments, _TIMM_SIZES),
    )


def _sizes(config: dict, names: Mapping[str, str]) -> dict[str, tuple[str, int | tuple[int, int]]]:
    said = {ours: (theirs, _number(config, theirs)) for ours, theirs in names.items()}
    said["patch"] = ("patch_size", _pair(config, "patch_size"))
    return {field: (name, value) for field, (name, value) in said.items() if value is not None}


def _number(config: dict, field: str, kind: type = int):
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 10**6:
        raise UserError(f"config.json should give a positive number for {field!r}, but gives {value!r:.80}.")
    return kind(value)


def _pair(config: dict, field: str) -> tuple[int, int] | None:
    size = config.get(field)
    if size is None:
        return None
    pair = [size, size] if isinstance(size, int) else size
    if field == "input_size" and isinstance(size, list) and len(size) == 3:  # channels come first
        pair = size[1:]
    if not (isinstance(pair, list) and len(pair) == 2 and all(_is_side(side) for side in pair)):
        raise UserError(f"config.json should give {field!r} as one or two numbers of pixels, but gives {size!r:.80}.")
    return tuple(pair)


def _is_side(side) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side < 10**5


def _processor_range(processor: dict) -> tuple | None:
    """What transformers' image processor makes of 0 and 255: it rescales, then normalises, unless it is told not to."""
    rescales, normalizes = (_flag(processor, field) for field in ("do_rescale", "do_normalize"))
    factor = _number(processor, "rescale_factor", float)
    white = 255 * (factor or 1 / 255) if rescales else 255.0
    if not normalizes:
        return 0.0, white
    found = _range(processor.get("image_mean"), processor.get("image_std"), white)
    if found is None and white != 1.0:
        raise UserError("preprocessor_config.json should give image_mean and image_std beside its own rescaling.")
    return found


def _flag(processor: dict, field: str) -> bool:
    value = processor.get(field, True)
    if not isinstance(value, bool):
        raise UserError(f"preprocessor_config.json should give true or false for {field!r}, but gives {value!r:.80}.")
    return value


def _range(mean, std, white: float = 1.0) -> tuple | None:
    """(mean, std) of images in [0, white] -> what 0 and 255 become."""
    if mean is None or std is None:
        return None
    channels = [mean, std]
    if not all(isinstance(part, list) and all(_is_moderate(n) for n in part) for part in channels):
        raise UserError(f"The mean and deviation of the images should be lists of numbers, but are {mean!r}, {std!r}.")
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise UserError(f"The images' mean {mean} and deviation {std} should have one positive number per channel.")
    low = tuple(-m / s for m, s in zip(mean, std, strict=True))
    high = tuple((white - m) / s for m, s in zip(mean, std, strict=True))
    if len(set(low)) == len(set(high)) == 1:
        return low[0], high[0]
    return low, high


def _is_moderate(number) -> bool:
    return isinstance(number, int | float) and -1e6 < number < 1e6
