"""The vision towers of transformers' CLIP, MetaCLIP 2, Chinese-CLIP, SigLIP, OWL-ViT and OWLv2."""

from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, check_field, part
from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Layout, check_square, unsupported
from keras_vit.checkpoints.formats.transformers import config_json
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import Classifier, DetectionConfig, ViTConfig

_CLIP = {**config_json.BASE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**config_json.BASE, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
# With a text tower beside them; the towers for images alone are of the type f"{name}_vision_model".
_CLIPS, _SIGLIPS = ("clip", "metaclip_2", "chinese_clip"), ("siglip",)
_DEFAULTS: dict[str, dict[str, Any]] = {
    kind: fields
    for names, fields in ((_CLIPS, _CLIP), (_SIGLIPS, _SIGLIP))
    for name in names
    for kind in (f"{name}_vision_model", name)
}


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    for prefix in ("vision_model.", ""):
        patches = arrays.get(f"{prefix}embeddings.patch_embedding.weight")
        if patches is not None and len(patches.shape) == 2:
            raise unsupported(
                "a SigLIP 2 NaFlex, whose images keep their proportions",
                "give one of fixed size, such as hf:google/siglip2-base-patch16-224",
            )
        if patches is not None:
            clip = f"{prefix}pre_layrnorm.weight" in arrays
            return _layout(prefix, clip=clip, classifies="classifier.weight" in arrays)
    return None


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    config = model.config
    if not isinstance(config, ViTConfig) or config.layer_scale is not None or config.position_embedding == "rotary":
        return None
    common = {**DEFAULTS, "gelu": None, "qkv_bias": (True,)}
    if config.pre_norm:
        own = {"pre_norm": (True,), "patch_bias": (False,), "prefix_positions": None}
        return {**common, **own, "head_bias": (False,) if model.num_classes else None}
    return {**common, "classifier": () if model.num_classes else ("map",)} if config.classifier == "map" else None


def _layout(prefix: str, *, clip: bool, classifies: bool = False) -> Layout:
    """`classifies`: SiglipForImageClassification, which averages the tokens and leaves the pooling head unused, or
    CLIPForImageClassification, which averages the patches and leaves the last norm unused.
    """
    head = f"{prefix}head."
    rules = (
        *_tower_rules(prefix, "pre_layrnorm"),
        *keys.fused(keys.POOLING_INPUTS, f"{head}attention.in_proj_weight", f"{head}attention.in_proj_bias"),
        *keys.pooling_rules(head, "probe", "attention.out_proj", "layernorm"),
        *keys.dense("head", "visual_projection"),
    )
    unused = f"{prefix}post_layernorm." if clip else head
    if classifies:
        rules = (*(rule for rule in rules if not rule.key.startswith(unused)), *keys.dense("head", "classifier"))
    return Layout(
        rules,
        gelu="quick" if clip else "tanh",
        layer_norm_epsilon=1e-5 if clip else 1e-6,
        biases=(QUERY_BIAS,) if clip and not classifies else (*HEAD_BIASES, QUERY_BIAS),  # or CLIP's projection
        resampler="bicubic",
        ambiguous=("gelu",) if clip else (),  # OpenCLIP has another one
        model_types=tuple(name for name, fields in _DEFAULTS.items() if fields is (_CLIP if clip else _SIGLIP)),
        settings={"classifier": "gap", "final_norm": not clip} if classifies else {},
        ignored=("text_model.", "text_projection.", "logit_scale", "logit_bias", f"{prefix}embeddings.position_ids")
        + ((unused,) if classifies else ()),
    )


def tower_block(layer: str, to: str = keys.BLOCK) -> tuple[keys.Rule, ...]:
    """The rules of an encoder block of a tower of images or texts, see `block_rules`."""
    attention = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
    return keys.block_rules(layer, ("layer_norm1", "layer_norm2"), attention, ("mlp.fc1", "mlp.fc2"), to=to)


def _tower_rules(prefix: str, pre_norm: str) -> tuple[keys.Rule, ...]:
    return (
        keys.Rule(("cls",), f"{prefix}embeddings.class_embedding", keys.TOKEN),
        keys.Rule((keys.POSITIONS,), f"{prefix}embeddings.position_embedding.weight", keys.TABLE),
        keys.Rule((), f"{prefix}embeddings.position_ids"),
        *keys.dense("embedding", f"{prefix}embeddings.patch_embedding", keys.CONV),
        *keys.norm("Transformer/pre_norm", f"{prefix}{pre_norm}"),
        *tower_block(f"{prefix}encoder.layers.{{i}}."),
        *keys.norm("Transformer/encoder_norm", f"{prefix}post_layernorm"),
    )


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = config_json.completed(_vision_config(files[config_json.CONFIG]), layout, _DEFAULTS)
    if layout.settings.get("classifier") == "gap":
        has_class_token = int(not layout.settings["final_norm"])  # CLIP
        sizes = config_json.positions_and_tokens(config, layout, has_class_token)
        return config_json.read_vit(files, config, layout, sizes)
    sizes = config_json.positions_and_tokens(config, layout)
    if layout.ambiguous:  # the head of CLIP is a projection
        return config_json.read_vit(files, config, layout, sizes, num_classes=None)
    del sizes["num_class_tokens"]
    pooling: Classifier = "map" if config.get("vision_use_head", True) else "gap"  # the tokens alone
    return config_json.read_vit(files, config, layout, sizes, classifier=pooling if config.get("model_type") else None)


def tower_config(fields: dict, name: str) -> dict:
    """The fields of "vision_config" or "text_config", or of a file of one tower, without those that are null."""
    tower = part(fields, name) or part(fields, f"{name}_dict")  # of old versions
    return {field: value for field, value in tower.items() if value is not None}


def _vision_config(fields: dict) -> dict:
    if fields.get("model_type") not in _CLIPS + _SIGLIPS:
        return fields
    tower = tower_config(fields, "vision_config")
    older = fields.get("vision_config_dict")
    complete = _DEFAULTS[fields["model_type"]] | tower
    for name, value in older.items() if isinstance(older, dict) else ():
        what = f"{value!r:.80}, as vision_config_dict does"
        check_field(
            name not in complete or value == complete[name], f"{name} in vision_config", what, complete.get(name)
        )
    return {**tower, "model_type": fields["model_type"]}


def _write_config(model: Blueprint) -> dict[str, dict]:
    model_type, name = ("clip", "CLIPVisionModel") if model.vit.pre_norm else ("siglip", "SiglipVisionModel")
    fields = config_json.vit_fields(model, f"{model_type}_vision_model", name)
    check_square(f"A {name} of transformers", model.preprocessing.image_size, model.vit.patch)
    if model.num_classes:
        fields |= {"architectures": [f"{name}WithProjection"], "projection_dim": model.num_classes}
    return config_json.written(model, fields)


CLIP = config_json.HuggingFace(
    _identify,
    read_config=_read_config,
    expressible=_expressible,
    layout_for=lambda model: _layout("vision_model." if model.num_classes else "", clip=model.vit.pre_norm),
    write_config=_write_config,
)


# OWL-ViT and OWLv2: the image side of open-vocabulary detectors

_OWL_NAMES = {"owlvit": "OwlViTForObjectDetection", "owlv2": "Owlv2ForObjectDetection"}
_OWLV2 = {**config_json.BASE, "image_size": 768, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_channels": 3}
_OWL_DEFAULTS: dict[str, dict[str, Any]] = {"owlvit": {**_OWLV2, "patch_size": 32}, "owlv2": _OWLV2}
_LOGIT = "shift", "scale"
_TEXT_WIDTH, _TEXT_HEAD = 512, 64  # of the default text tower, and the width of its heads


def _identify_owl(arrays: Mapping[str, LazyArray]) -> Layout | None:
    for name in _OWL_NAMES:
        if f"{name}.vision_model.embeddings.patch_embedding.weight" in arrays and "class_head.dense0.weight" in arrays:
            return _owl_layout(name)
    return None


def _expressible_in_owl(model: Blueprint) -> dict[str, tuple | None] | None:
    if not isinstance(model.task, DetectionConfig):
        return None
    own: dict[str, tuple | None] = {"gelu": None, "pre_norm": (True,), "patch_bias": (False,)}
    return {**DEFAULTS, **own, "prefix_positions": None, "classifier": ("none",), "with_class_token": (True,)}


def _owl_type(model: Blueprint) -> str:
    return "owlv2" if model.detection.objectness else "owlvit"


def _owl_layout(name: str) -> Layout:
    heads = ("box_head", "objectness_head") if name == "owlv2" else ("box_head",)
    rules = (
        *_tower_rules(f"{name}.vision_model.", "pre_layernorm"),
        *keys.norm("detection_norm", "layer_norm"),
        *(rule for head in heads for n in range(3) for rule in keys.dense(f"{head}/Dense_{n}", f"{head}.dense{n}")),
        *keys.dense("class_head/Dense_0", "class_head.dense0"),
        *(keys.Rule((f"class_head/{part}_kernel",), f"class_head.logit_{part}.weight", keys.LINEAR) for part in _LOGIT),
        *(keys.Rule((f"class_head/{part}_bias",), f"class_head.logit_{part}.bias") for part in _LOGIT),
    )
    others = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")
    return Layout(
        rules,
        gelu="quick",
        layer_norm_epsilon=1e-5,
        biases=(QUERY_BIAS,),
        resampler="bicubic",
        settings={"classifier": "none"},
        torch=True,
        model_types=(name,),
        ignored=(*(f"{name}.{other}" for other in others), f"{name}.vision_model.embeddings.position_ids", "box_bias"),
        task="detection",
        notes=("Only the image side is written: transformers begins with a random text tower.",),
    )


def _read_owl_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    fields, name = files[config_json.CONFIG], layout.model_types[0]
    towers = {tower: part(fields, tower) for tower in ("vision_config", "text_config")}
    vision = {**towers["vision_config"], "model_type": fields.get("model_type", name)}
    config = config_json.completed(vision, layout, _OWL_DEFAULTS)
    width = towers["text_config"].get("hidden_size", _TEXT_WIDTH)
    task: Sizes = {
        "embedding_size": ("hidden_size of text_config and thus embeddings of", width),
        "objectness": (f"model_type={name!r} and thus objectness", name == "owlv2"),
    }
    sizes = config_json.positions_and_tokens(config, layout)
    return config_json.read_vit(files, config, layout, sizes, num_classes=None, task_sizes=task)


def _write_owl_config(model: Blueprint) -> dict[str, dict]:
    name, width = _owl_type(model), model.detection.embedding_size
    vision = config_json.vit_fields(model, f"{name}_vision_model", _OWL_NAMES[name])
    check_square(f"A {_OWL_NAMES[name]} of transformers", model.preprocessing.image_size, model.vit.patch)
    del vision["architectures"]
    vision["num_channels"] = model.preprocessing.channels
    text = {"model_type": f"{name}_text_model", "hidden_size": width, "intermediate_size": 4 * width}
    text["num_attention_heads"] = width // _TEXT_HEAD if width % _TEXT_HEAD == 0 else 1
    fields = {"model_type": name, "architectures": [_OWL_NAMES[name]], "projection_dim": width}
    return config_json.written(model, fields | {"vision_config": vision, "text_config": text})


OWL = config_json.HuggingFace(
    _identify_owl,
    read_config=_read_owl_config,
    expressible=_expressible_in_owl,
    layout_for=lambda model: _owl_layout(_owl_type(model)),
    write_config=_write_owl_config,
    has_task=True,
)
