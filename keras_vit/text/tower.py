"""The text tower, top to bottom: tokens, positions, encoder blocks, the token that stands for the text, projection.

Papers: "Learning Transferable Visual Models From Natural Language Supervision" (CLIP, arXiv 2103.00020), section 2.4;
"Sigmoid Loss for Language Image Pre-Training" (SigLIP, arXiv 2303.15343). Agrees with `CLIPTextModelWithProjection` and
`SiglipTextModel` of transformers and with `CLIP.encode_text` of open_clip to float rounding. Its pre-norm blocks
are those of the image tower; layers bear their names.

Axes: B batch, T tokens, D width.
"""

import os

import keras

from keras_vit.models.attention import DotProductAttention
from keras_vit.models.layers import TokenDense, no_init_weights
from keras_vit.models.vit import layer_norm, mlp
from keras_vit.text.checkpoint import open_text
from keras_vit.text.config import TextConfig
from keras_vit.text.layers import CausalMask, PadText, PoolText, TextEmbedding


def text_tower(path: str | os.PathLike) -> keras.Model:
    """The text tower of a two-tower checkpoint, with its weights.

    Reads CLIP, SigLIP and SigLIP 2 of fixed size in the layout of transformers, OpenCLIP's own files
    (open_clip_model.safetensors with open_clip_config.json), and big_vision's SigLIP as .npz.

    Args:
        path: file, folder, address or name of the checkpoint, as `keras_vit.from_checkpoint` takes it.

    Returns:
        A functional keras.Model from token ids (B, T) int32, as `keras_vit.tokenizer` makes them, to embeddings (B, D)
        of length 1, as the original compares them. CLIP takes up to T ids, SigLIP exactly T, with its padding.

    Raises:
        UserError: if the checkpoint has no text tower, or one of another kind.
    """
    checkpoint = open_text(path)
    with no_init_weights():
        model = build_text_tower(checkpoint.config)
    checkpoint.load_into(model)
    return model


def build_text_tower(config: TextConfig, name: str = "text_tower") -> keras.Model:
    """The functional model of a config: token ids (B, T) int32 -> embeddings (B, D)."""
    ids = keras.Input((None if config.causal else config.length,), dtype="int32", name="ids")
    padded = PadText(config.length, name="padded", dtype="int32")(ids) if config.causal else ids
    x = TextEmbedding(config.vocab_size, config.length, config.hidden_size, name="embedding")(padded)  # (B, T, D)
    for layer in range(config.num_layers):
        x = _encoder_block(x, config, f"encoderblock_{layer}")
    x = layer_norm(x, config.layer_norm_epsilon, "encoder_norm")
    x = PoolText(config.pooling, config.end_token, name="pool")(x, padded)  # (B, D)
    x = TokenDense(config.output_size, use_bias=config.head_bias, name="head")(x)
    x = keras.layers.UnitNormalization(name="normalized")(x)
    return keras.Model(ids, x, name=name)


def _encoder_block(x, config: TextConfig, name: str):
    """Attention and MLP, each with a LayerNorm and a residual connection: (B, T, D) -> (B, T, D)."""
    y = layer_norm(x, config.layer_norm_epsilon, f"{name}.LayerNorm_0")
    y = _attention(y, config, f"{name}.MultiHeadDotProductAttention_1")
    x = keras.layers.Add(name=f"{name}.residual")([x, y])

    y = layer_norm(x, config.layer_norm_epsilon, f"{name}.LayerNorm_2")
    y = mlp(y, config.mlp_dim, config.gelu, 0.0, f"{name}.MlpBlock_3")
    return keras.layers.Add(name=name)([x, y])


def _attention(tokens, config: TextConfig, name: str):
    """Self-attention of all tokens, or of each over itself and those before it: (B, T, D) -> (B, T, D)."""
    inputs = [TokenDense(config.hidden_size, name=f"{name}.{part}")(tokens) for part in ("query", "key", "value")]
    if config.causal:
        inputs.append(CausalMask(name=f"{name}.causal")(inputs[0]))  # (1, 1, T, T)
    y = DotProductAttention(config.num_heads, name=name)(*inputs)
    return TokenDense(config.hidden_size, name=f"{name}.out")(y)
