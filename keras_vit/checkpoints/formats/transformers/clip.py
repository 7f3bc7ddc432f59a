"""The vision towers of transformers' CLIP, MetaCLIP 2, Chinese-CLIP and SigLIP, alone or beside a text tower."""

from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats.file_config import FileConfig, part
from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers.config_json import (
    BASE,
    CONFIG,
    FILES,
    check_square,
    completed,
    positions_and_tokens,
    read_vit,
    vit_fields,
    written,
)
from keras_vit.checkpoints.key_mapping import (
    BLOCK,
    CONV,
    POSITIONS,
    QKV,
    SAME,
    TABLE,
    TOKEN,
    Rule,
    dense,
    fused,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import Classifier, ViTConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
_CLIP = {**BASE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**BASE, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
# With a text tower beside them; the towers for images alone are of the type f"{name}_vision_model".
_CLIPS, _SIGLIPS = ("clip", "metaclip_2", "chinese_clip"), ("siglip",)
_DEFAULTS: dict[str, dict[str, Any]] = {
    kind: fields
    for names, fields in ((_CLIPS, _CLIP), (_SIGLIPS, _SIGLIP))
    for name in names
    for kind in (f"{name}_vision_model", name)
}


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    for prefix in ("vision_model.", ""):
        patches = arrays.get(f"{prefix}embeddings.patch_embedding.weight")
        if patches is not None and len(patches.shape) == 2:
            raise UserError(
                "The file is a SigLIP 2 NaFlex, whose images keep their proportions, which is not supported; give one "
                "of fixed size, such as hf:google/siglip2-base-patch16-224."
            )
        if patches is not None:
            clip = f"{prefix}pre_layrnorm.weight" in arrays
            return _layout(prefix, clip=clip, classifies="classifier.weight" in arrays)
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that they have; None for models without the norm of CLIP or the pooling of SigLIP."""
    config = model.config
    if not isinstance(config, ViTConfig) or config.layer_scale is not None or config.position_embedding == "rotary":
        return None
    common = {**DEFAULTS, "gelu": None, "qkv_bias": (True,)}
    if config.pre_norm:
        own = {"pre_norm": (True,), "patch_bias": (False,), "prefix_positions": None}
        return {**common, **own, "head_bias": (False,) if model.num_classes else None}
    return {**common, "classifier": ("map",) * (not model.num_classes)} if config.classifier == "map" else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _layout("vision_model." if model.num_classes else "", clip=model.vit.pre_norm)


def _layout(prefix: str, *, clip: bool, classifies: bool = False) -> Layout:
    """`classifies`: SiglipForImageClassification, which averages the tokens and leaves the pooling head unused, or
    CLIPForImageClassification, which averages the patches and leaves the last norm unused.
    """
    head, rules = f"{prefix}head.", _rules(prefix)
    if classifies:
        unused = f"{prefix}post_layernorm." if clip else head
        rules = (*(rule for rule in rules if not rule.key.startswith(unused)), *dense("head", "classifier"))
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
        + ((f"{prefix}post_layernorm." if clip else head,) if classifies else ()),
    )


def block_rules(block: str, layer: str) -> tuple[Rule, ...]:
    """Rules of an encoder block of a tower of images or texts; where its weights and the keys of the file begin."""
    attention = f"{block}MultiHeadDotProductAttention_1/"
    projections = zip((*QKV, "out"), ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)
    return (
        *norm(f"{block}LayerNorm_0", f"{layer}layer_norm1"),
        *(rule for part, key in projections for rule in dense(f"{attention}{part}", f"{layer}self_attn.{key}")),
        *norm(f"{block}LayerNorm_2", f"{layer}layer_norm2"),
        *dense(f"{block}MlpBlock_3/Dense_0", f"{layer}mlp.fc1"),
        *dense(f"{block}MlpBlock_3/Dense_1", f"{layer}mlp.fc2"),
    )


def _rules(prefix: str) -> tuple[Rule, ...]:
    head = f"{prefix}head."
    pooling, attention = "MAPHead_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"
    in_projection = tuple(f"{attention}{part}" for part in QKV)
    return (
        Rule(("cls",), f"{prefix}embeddings.class_embedding", TOKEN),
        Rule((POSITIONS,), f"{prefix}embeddings.position_embedding.weight", TABLE),
        Rule((), f"{prefix}embeddings.position_ids"),
        *dense("embedding", f"{prefix}embeddings.patch_embedding", CONV),
        *norm("Transformer/pre_norm", f"{prefix}pre_layrnorm"),
        *block_rules(BLOCK, f"{prefix}encoder.layers.{{i}}."),
        *norm("Transformer/encoder_norm", f"{prefix}post_layernorm"),
        Rule((f"{pooling}probe",), f"{head}probe", SAME),
        *fused(in_projection, f"{head}attention.in_proj_weight", f"{head}attention.in_proj_bias"),
        *dense(f"{attention}out", f"{head}attention.out_proj"),
        *norm(f"{pooling}LayerNorm_0", f"{head}layernorm"),
        *dense(f"{pooling}MlpBlock_0/Dense_0", f"{head}mlp.fc1"),
        *dense(f"{pooling}MlpBlock_0/Dense_1", f"{head}mlp.fc2"),
        *dense("head", "visual_projection"),
    )


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    config = completed(_vision_config(files[CONFIG]), layout, _DEFAULTS)
    if layout.settings.get("classifier") == "gap":
        sizes = positions_and_tokens(config, layout, int(not layout.settings["final_norm"]))  # CLIP's class token
        return read_vit(files, config, layout, sizes)
    sizes = positions_and_tokens(config, layout)
    if layout.ambiguous:  # the head of CLIP is a projection
        return read_vit(files, config, layout, sizes, num_classes=None)
    del sizes["num_class_tokens"]
    pooling: Classifier = "map" if config.get("vision_use_head", True) else "gap"  # the tokens alone
    return read_vit(files, config, layout, sizes, classifier=pooling if config.get("model_type") else None)


def tower_config(fields: dict, name: str) -> dict:
    """The fields of a tower, "vision_config" or "text_config", without those that are null.

    They are an object of their own beside those of the other tower, or the whole file of a model of one tower.
    """
    tower = part(fields, name) or part(fields, f"{name}_dict")  # of old versions
    return {field: value for field, value in tower.items() if value is not None}


def _vision_config(fields: dict) -> dict:
    """The fields of the vision tower."""
    if fields.get("model_type") not in _CLIPS + _SIGLIPS:
        return fields
    tower = tower_config(fields, "vision_config")
    older = fields.get("vision_config_dict")
    complete = _DEFAULTS[fields["model_type"]] | tower
    for name, value in older.items() if isinstance(older, dict) else ():
        if name in complete and value != complete[name]:
            raise UserError(
                f"config.json gives {name}={complete[name]!r:.80} in vision_config and {value!r:.80} in "
                "vision_config_dict; remove the wrong one."
            )
    return {**tower, "model_type": fields["model_type"]}


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json. Raises UserError for sizes that they cannot express."""
    kind, name = ("clip", "CLIPVisionModel") if model.vit.pre_norm else ("siglip", "SiglipVisionModel")
    fields = vit_fields(model, f"{kind}_vision_model", name)
    check_square(model, f"A {name}")
    if model.num_classes:
        fields |= {"architectures": [f"{name}WithProjection"], "projection_dim": model.num_classes}
    return written(model, fields)
