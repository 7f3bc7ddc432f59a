"""transformers' OWL-ViT and OWLv2: the image side of open-vocabulary detectors, without the text tower beside it."""

from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, part
from keras_vit.checkpoints.formats.layout import DEFAULTS, QUERY_BIAS, Layout, WrittenModel
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
    ATTENTION,
    BLOCK,
    CONV,
    LINEAR,
    POSITIONS,
    QKV,
    TABLE,
    TOKEN,
    Rule,
    dense,
    norm,
)
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import DetectionConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
_NAMES = {"owlvit": "OwlViTForObjectDetection", "owlv2": "Owlv2ForObjectDetection"}
_VISION = {**BASE, "image_size": 768, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_channels": 3}
_DEFAULTS: dict[str, dict[str, Any]] = {"owlvit": {**_VISION, "patch_size": 32}, "owlv2": _VISION}
_TEXT_WIDTH, _TEXT_HEAD = 512, 64  # of the default text tower, and the width of its heads
_MLP = f"{BLOCK}MlpBlock_3/"


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    for kind in _NAMES:
        if f"{kind}.vision_model.embeddings.patch_embedding.weight" in arrays and "class_head.dense0.weight" in arrays:
            return _layout(kind)
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that they have; None for models of other tasks."""
    if not isinstance(model.task, DetectionConfig):
        return None
    own: dict[str, tuple | None] = {"gelu": None, "pre_norm": (True,), "patch_bias": (False,)}
    return {**DEFAULTS, **own, "prefix_positions": None, "classifier": ("none",), "with_class_token": (True,)}


def _kind(model: WrittenModel) -> str:
    return "owlv2" if model.detection.objectness else "owlvit"


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _layout(_kind(model))


def _layout(kind: str) -> Layout:
    vision = f"{kind}.vision_model."
    layer = f"{vision}encoder.layers.{{i}}."
    projections = zip((*QKV, "out"), ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)
    heads = ("box_head", "objectness_head") if kind == "owlv2" else ("box_head",)
    rules = (
        Rule(("cls",), f"{vision}embeddings.class_embedding", TOKEN),
        Rule((POSITIONS,), f"{vision}embeddings.position_embedding.weight", TABLE),
        *dense("embedding", f"{vision}embeddings.patch_embedding", CONV),
        *norm("Transformer/pre_norm", f"{vision}pre_layernorm"),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}layer_norm1"),
        *(rule for part, key in projections for rule in dense(f"{ATTENTION}{part}", f"{layer}self_attn.{key}")),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}layer_norm2"),
        *dense(f"{_MLP}Dense_0", f"{layer}mlp.fc1"),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.fc2"),
        *norm("Transformer/encoder_norm", f"{vision}post_layernorm"),
        *norm("detection_norm", "layer_norm"),
        *(rule for head in heads for n in range(3) for rule in dense(f"{head}/Dense_{n}", f"{head}.dense{n}")),
        *dense("class_head/Dense_0", "class_head.dense0"),
        *(
            rule
            for part in ("shift", "scale")
            for rule in (
                Rule((f"class_head/{part}_kernel",), f"class_head.logit_{part}.weight", LINEAR),
                Rule((f"class_head/{part}_bias",), f"class_head.logit_{part}.bias"),
            )
        ),
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
        model_types=(kind,),
        ignored=(*(f"{kind}.{other}" for other in others), f"{vision}embeddings.position_ids", "box_bias"),
        task="detection",
        notes=("Only the image side is written: transformers begins with a random text tower.",),
    )


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    fields, kind = files[CONFIG], layout.model_types[0]
    towers = {name: part(fields, name) for name in ("vision_config", "text_config")}
    vision = {**towers["vision_config"], "model_type": fields.get("model_type", kind)}
    config = completed(vision, layout, _DEFAULTS)
    sizes: Sizes = positions_and_tokens(config, layout)
    width = towers["text_config"].get("hidden_size", _TEXT_WIDTH)
    task: Sizes = {
        "embedding_size": ("hidden_size of text_config and thus embeddings of", width),
        "objectness": (f"model_type={kind!r} and thus objectness", kind == "owlv2"),
    }
    return read_vit(files, config, layout, sizes, num_classes=None, task_sizes=task)


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json. Raises UserError for sizes that they cannot express."""
    kind, width = _kind(model), model.detection.embedding_size
    vision = vit_fields(model, f"{kind}_vision_model", _NAMES[kind])
    check_square(model, f"A {_NAMES[kind]}")
    del vision["architectures"]
    vision["num_channels"] = model.preprocessing.channels
    text = {"model_type": f"{kind}_text_model", "hidden_size": width, "intermediate_size": 4 * width}
    text["num_attention_heads"] = width // _TEXT_HEAD if width % _TEXT_HEAD == 0 else 1
    fields = {"model_type": kind, "architectures": [_NAMES[kind]], "projection_dim": width}
    return written(model, fields | {"vision_config": vision, "text_config": text})
