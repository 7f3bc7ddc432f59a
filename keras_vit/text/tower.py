"""The text tower, top to bottom: tokens, positions, encoder blocks, the token that stands for the text, projection.

Papers: "Learning Transferable Visual Models From Natural Language Supervision" (CLIP, arXiv 2103.00020), section 2.4;
"Sigmoid Loss for Language Image Pre-Training" (SigLIP, arXiv 2303.15343). Agrees with `CLIPTextModelWithProjection` and
`SiglipTextModel` of transformers and with `CLIP.encode_text` of open_clip to float rounding. Its pre-norm blocks
are those of the image tower; layers bear their names.

Axes: B batch, T tokens, D width.
"""

import dataclasses
from typing import Literal

import keras
from keras import ops

from keras_vit.errors import UserError, check_integers, refuse_first
from keras_vit.models.attention import FORBIDDEN
from keras_vit.models.config import Gelu, ViTConfig
from keras_vit.models.layers import PACKAGE, TokenDense, check_backend, initial, small_normal
from keras_vit.models.vit import encoder_block, layer_norm

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
    last_norm_epsilon: float | None = None
    """That of the last LayerNorm, where it is another one (CLIP of keras-hub)."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "length", "hidden_size", "num_layers", "num_heads", "mlp_dim", "output_size"):
            check_integers(field, getattr(self, field))
        tokens, end, width = self.vocab_size, self.end_token, self.hidden_size
        has_end = isinstance(end, int) and not isinstance(end, bool) and 0 <= end < tokens
        refuse_first(
            [
                (
                    width % self.num_heads,
                    f"The width {width} of the text tower is no multiple of its {self.num_heads} heads.",
                ),
                (
                    tokens > _MOST_TOKENS or self.length > _MOST_LENGTH,
                    f"A text tower has at most {_MOST_TOKENS:,} tokens and {_MOST_LENGTH:,} positions, but the file "
                    f"says {tokens:,} and {self.length:,}.",
                ),
                (
                    self.pooling == "first-end" and not has_end,
                    f"eos_token_id in config.json should be a number below {tokens}, but is {end!r:.80}.",
                ),
            ]
        )


@keras.saving.register_keras_serializable(PACKAGE)
class PadText(keras.layers.Layer):
    """Token ids (B, t) with t <= length -> (B, length), with the id 0 behind them.

    No token of a causal tower sees what comes after it, so the padding does not change the embedding.
    """

    def __init__(self, length: int, **kwargs):
        super().__init__(**kwargs)
        self.length = length

    def call(self, ids):
        if (count := ids.shape[1]) is not None and count > self.length:
            raise UserError(
                f"The text tower takes up to {self.length} tokens, but these texts have {count}; cut them, as "
                "keras_vit.tokenizer does."
            )
        missing = self.length - ops.shape(ids)[1]
        return ops.reshape(ops.pad(ids, ((0, 0), (0, missing))), (-1, self.length))

    def compute_output_shape(self, input_shape):
        return input_shape[0], self.length


@keras.saving.register_keras_serializable(PACKAGE)
class TextEmbedding(keras.layers.Layer):
    """The embeddings of tokens and of their positions, added: ids (B, T) -> (B, T, D), T = length, D = width."""

    def __init__(self, vocab_size: int, length: int, width: int, **kwargs):
        check_backend()
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.length = length
        self.width = width

    def build(self, input_shape):
        for name, rows in (("tokens", self.vocab_size), ("positions", self.length)):
            weight = self.add_weight(name=name, shape=(rows, self.width), initializer=initial(small_normal()))
            setattr(self, name, weight)

    def call(self, ids):
        return ops.take(self.tokens, ids, axis=0) + self.positions  # (B, T, D)

    def compute_output_shape(self, input_shape):
        return *input_shape, self.width


@keras.saving.register_keras_serializable(PACKAGE)
class CausalMask(keras.layers.Layer):
    """An attention bias that keeps each token from the later ones: tokens (B, T, D) -> (1, 1, T, T)."""

    def call(self, tokens):
        later = ops.triu(ops.ones((tokens.shape[1], tokens.shape[1])), 1)
        return ops.cast(FORBIDDEN * later[None, None], tokens.dtype)


@keras.saving.register_keras_serializable(PACKAGE)
class PoolText(keras.layers.Layer):
    """The token that stands for the text: tokens (B, T, D) and their ids (B, T) -> (B, D).

    kind: "first-end": the first whose id is `end_token`; "largest": the first with the largest id; "last": the last.
    """

    def __init__(self, kind: str, end_token: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.end_token = end_token

    def call(self, tokens, ids):
        if self.kind == "last":
            return tokens[:, -1]
        values = ops.cast(ops.equal(ids, self.end_token), "int32") if self.kind == "first-end" else ids
        place = ops.argmax(values, axis=1)  # (B,), the first of equal ones
        return ops.take_along_axis(tokens, ops.cast(place, "int32")[:, None, None], axis=1)[:, 0]

    def compute_output_shape(self, tokens_shape, ids_shape):
        return tokens_shape[0], tokens_shape[2]


def build_text_tower(config: TextConfig, name: str = "text_tower") -> keras.Model:
    """The functional model of a config: token ids (B, T) int32 -> embeddings (B, D)."""
    ids = keras.Input((None if config.causal else config.length,), dtype="int32", name="ids")
    padded = PadText(config.length, name="padded", dtype="int32")(ids) if config.causal else ids
    x = TextEmbedding(config.vocab_size, config.length, config.hidden_size, name="embedding")(padded)  # (B, T, D)
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.mlp_dim)
    block = ViTConfig(1, *sizes, gelu=config.gelu, layer_norm_epsilon=config.layer_norm_epsilon)
    bias = CausalMask(name="causal")(x) if config.causal else None  # (1, 1, T, T)
    for layer in range(config.num_layers):
        x = encoder_block(x, block, 0.0, f"encoderblock_{layer}", grid=(1, config.length), attention_bias=bias)
    x = layer_norm(x, config.last_norm_epsilon or config.layer_norm_epsilon, "encoder_norm")
    x = PoolText(config.pooling, config.end_token, name="pool")(x, padded)  # (B, D)
    x = TokenDense(config.output_size, use_bias=config.head_bias, name="head")(x)
    x = keras.layers.UnitNormalization(name="normalized")(x)
    return keras.Model(ids, x, name=name)
