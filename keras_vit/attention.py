"""Multi-head attention as a composition of named layers, over all tokens or along one axis of their grid.

Axes: B batch, N tokens, M key tokens, h rows and w columns of the grid, D width.
"""

from keras_vit.layers import DotProductAttention, FoldAxis, RelativePositions, TokenDense, UnfoldAxis


def attention(
    query_tokens,
    tokens,
    *,
    num_heads: int,
    name: str,
    dropout_rate: float = 0.0,
    bias: bool = True,
    relative: bool = False,
):
    """Attention of query_tokens (B, N, D) over tokens (B, M, D) -> (B, N, D).

    Args:
        num_heads: H, a divisor of D.
        name: of the layer that mixes; its projections are `name`.query, .key, .value and .out.
        dropout_rate: of the probabilities, in training.
        bias: whether query, key and value have one; the output projection always does.
        relative: add logits for the offset between two tokens.
    """
    width = tokens.shape[-1]
    query = TokenDense(width, use_bias=bias, name=f"{name}.query")(query_tokens)
    key = TokenDense(width, use_bias=bias, name=f"{name}.key")(tokens)
    value = TokenDense(width, use_bias=bias, name=f"{name}.value")(tokens)
    mixed = [query, key, value]
    if relative:
        mixed.append(RelativePositions(num_heads, name=f"{name}.relative")(query))  # (B, H, N, N)
    y = DotProductAttention(num_heads, dropout_rate, name=name)(*mixed)  # (B, N, D)
    return TokenDense(width, name=f"{name}.out")(y)


def axis_attention(tokens, axis: str, grid: tuple[int, int], **options):
    """Attention of the tokens (B, h * w, D) of each row, or column, among themselves; options as of `attention`."""
    name = options["name"]
    folded = FoldAxis(axis, grid, name=f"{name}.fold")(tokens)  # (B * h, w, D) or (B * w, h, D)
    return UnfoldAxis(axis, grid, name=f"{name}.unfold")(attention(folded, folded, **options))
