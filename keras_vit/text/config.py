"""The configuration of a text tower: a frozen dataclass."""

import dataclasses
from typing import Literal

from keras_vit.errors import UserError, check_integers
from keras_vit.models.config import Gelu

Pooling = Literal["first-end", "largest", "last"]
# Bounds of what a hostile config.json can ask for: SigLIP 2 has 256,000 tokens, and no published tower a width of 4096.
_MOST_TOKENS, _MOST_LENGTH = 2_000_000, 4096


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A text tower of CLIP or SigLIP."""

    vocab_size: int
    """Number of tokens; ids are below it."""
    length: int
    """Positions T: the most tokens of a text, start and end included."""
    hidden_size: int
    """Width of the token stream; a multiple of num_heads."""
    num_layers: int
    """Number of encoder blocks."""
    num_heads: int
    """Attention heads per block."""
    mlp_dim: int
    """Width of the hidden layer of each block's MLP."""
    output_size: int
    """Width D of the embeddings, which the images' embeddings have too."""
    gelu: Gelu
    """Activation of the MLPs."""
    layer_norm_epsilon: float
    """Added to the variance in every LayerNorm."""
    pooling: Pooling
    """The token that stands for the text: the first end_token (CLIP), the one with the largest id (CLIP's first files,
    OpenCLIP), or the last of the padded text (SigLIP)."""
    end_token: int | None = None
    """Id of the token behind a text, for the pooling "first-end"."""
    causal: bool = True
    """Whether a token attends only to itself and those before it (CLIP); in SigLIP to all, padding included."""
    head_bias: bool = False
    """Whether the projection to the embeddings has a bias (SigLIP)."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "length", "hidden_size", "num_layers", "num_heads", "mlp_dim", "output_size"):
            check_integers(field, getattr(self, field))
        tokens, end, width = self.vocab_size, self.end_token, self.hidden_size
        if width % self.num_heads:
            raise UserError(
                f"The width of the text tower must be a multiple of its heads, but {width} is not one of "
                f"{self.num_heads}."
            )
        if tokens > _MOST_TOKENS or self.length > _MOST_LENGTH:
            raise UserError(
                f"A text tower has at most {_MOST_TOKENS:,} tokens and {_MOST_LENGTH:,} positions, but the file says "
                f"{tokens:,} and {self.length:,}."
            )
        if self.pooling == "first-end" and (end is None or not 0 <= end < tokens):
            raise UserError(
                f"The id of the token behind a text must be below {tokens}, but is {end}; correct eos_token_id in "
                "config.json."
            )
