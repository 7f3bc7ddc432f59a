"""What a Vision Transformer is made of: one frozen dataclass, and the table of the named models.

Sizes: paper "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 1, "How to train your ViT" (2106.10270) Table 1,
and big_vision `models/vit.py` for M, So400m, g and G. Patch sizes, classifiers and dropout rates of the entries that
vision_transformer publishes: `vit_jax/configs/models.py`.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Literal

from keras_vit.errors import UserError, nearest

Classifier = Literal["token", "gap", "map", "unpooled", "none"]
Gelu = Literal["tanh", "erf"]


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer without the size of its images and the number of its classes."""

    patch_size: int | tuple[int, int]
    """Side of a patch in pixels, or (height, width)."""
    hidden_size: int
    """Width D of the token stream; a multiple of num_heads."""
    num_layers: int
    """Number of encoder blocks L."""
    num_heads: int
    """Attention heads per block."""
    mlp_dim: int
    """Width of the hidden layer of each block's MLP."""
    classifier: Classifier = "token"
    """What the head reads: class token, mean (gap), attention pooling (map), each token (unpooled); none: no head."""
    representation_size: int | None = None
    """Width of the tanh layer "pre_logits" before the head; None leaves it out, as every released config does."""
    dropout_rate: float = 0.0
    """Probability of dropping a unit after the position embedding, each attention output and each MLP layer."""
    attention_dropout_rate: float = 0.0
    """Probability of dropping an attention probability."""
    stochastic_depth_rate: float = 0.0
    """Probability of skipping a residual branch in the last block; grows linearly from 0 in the first."""
    gelu: Gelu = "tanh"
    """Form of GELU: the tanh approximation of JAX, or the exact erf of PyTorch files."""
    layer_norm_epsilon: float = 1e-6
    """Added to the variance in every LayerNorm (flax: 1e-6; Keras' own default would be 1e-3)."""

    def __post_init__(self) -> None:
        if not isinstance(self.patch_size, int):  # a list from JSON becomes what the type says
            object.__setattr__(self, "patch_size", tuple(self.patch_size))
        if len(self.patch) != 2:
            raise UserError(f"patch_size must be one number of pixels or (height, width), but is {self.patch_size}.")
        positive = {"hidden_size": self.hidden_size, "num_layers": self.num_layers, "num_heads": self.num_heads}
        positive |= {"mlp_dim": self.mlp_dim, "patch height": self.patch[0], "patch width": self.patch[1]}
        if self.representation_size is not None:
            positive["representation_size"] = self.representation_size
        for field, value in positive.items():
            if value < 1:
                raise UserError(f"{field} must be at least 1, but is {value}.")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size must be a multiple of num_heads, but {self.hidden_size} is none of {self.num_heads}."
            )
        for field in ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise UserError(f"{field} is a probability in [0, 1), but is {getattr(self, field)}.")
        for field, known in (("classifier", Classifier.__args__), ("gelu", Gelu.__args__)):
            if getattr(self, field) not in known:
                raise UserError(f"{field} must be one of {', '.join(known)}, but is {getattr(self, field)!r}.")

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return (self.patch_size, self.patch_size) if isinstance(self.patch_size, int) else self.patch_size

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: 1 with a class token, else 0."""
        return int(self.classifier == "token")

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size` (height, width) pixels."""
        for side, image, patch in zip(("height", "width"), image_size, self.patch, strict=True):
            if image < patch or image % patch:
                below, above = image // patch * patch, (image // patch + 1) * patch
                sizes = f"{below} or {above}" if below else str(above)
                raise UserError(
                    f"The image {side} must be a multiple of the patch {side} {patch}, but is {image}; take {sizes}."
                )
        return image_size[0] // self.patch[0], image_size[1] // self.patch[1]


def _vit(size: str, patch_size: int, classifier: Classifier = "token", dropout_rate: float = 0.0) -> ViTConfig:
    hidden_size, mlp_dim, num_layers, num_heads = _SIZES[size]
    return ViTConfig(
        patch_size, hidden_size, num_layers, num_heads, mlp_dim, classifier=classifier, dropout_rate=dropout_rate
    )


# size: (hidden_size, mlp_dim, num_layers, num_heads)
_SIZES = {
    "testing": (10, 10, 1, 2),
    "Ti": (192, 768, 12, 3),
    "S": (384, 1536, 12, 6),
    "M": (512, 2048, 12, 8),
    "B": (768, 3072, 12, 12),
    "L": (1024, 4096, 24, 16),
    "So400m": (1152, 4304, 27, 16),
    "H": (1280, 5120, 32, 16),
    "g": (1408, 6144, 40, 16),
    "G": (1664, 8192, 48, 16),
}

_MODELS = {
    "testing": _vit("testing", 16, dropout_rate=0.1),
    "testing-unpooled": _vit("testing", 16, classifier="unpooled", dropout_rate=0.1),
    "ViT-Ti_16": _vit("Ti", 16),
    "ViT-S_16": _vit("S", 16),
    "ViT-S_32": _vit("S", 32),
    "ViT-S_16-gap-norep": _vit("S", 16, classifier="gap"),
    "ViT-S_32-gap-norep": _vit("S", 32, classifier="gap"),
    "ViT-M_16": _vit("M", 16),
    "ViT-M_32": _vit("M", 32),
    "ViT-B_8": _vit("B", 8),
    "ViT-B_16": _vit("B", 16),
    "ViT-B_32": _vit("B", 32),
    "ViT-B_16-gap-norep": _vit("B", 16, classifier="gap"),
    "ViT-B_32-gap-norep": _vit("B", 32, classifier="gap"),
    "ViT-L_16": _vit("L", 16, dropout_rate=0.1),
    "ViT-L_32": _vit("L", 32),
    "ViT-So400m_14": _vit("So400m", 14),
    "ViT-H_14": _vit("H", 14, dropout_rate=0.1),
    "ViT-g_14": _vit("g", 14),
    "ViT-G_14": _vit("G", 14),
}
MODELS: Mapping[str, ViTConfig] = types.MappingProxyType(_MODELS)


def model_config(model: str | ViTConfig) -> ViTConfig:
    """The configuration named `model`, or `model` itself when it is one. Raises UserError for an unknown name."""
    if isinstance(model, ViTConfig):
        return model
    if model not in MODELS:
        raise UserError(f"There is no model named {model!r}; the nearest names are {nearest(model, MODELS)}.")
    return MODELS[model]
