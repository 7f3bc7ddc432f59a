"""Official ViT checkpoints (.npz) in and out: read, mend, infer, resize, merge.

Each step is a function of arrays that can be tested without a model. Keys and the order of adaptation are those of
vit_jax `checkpoint.py`; files come in pre-Linen numbering (the released ones: MultiHeadDotProductAttention_1,
LayerNorm_2, MlpBlock_3) and in Linen numbering (MultiHeadDotProductAttention_0, LayerNorm_1, MlpBlock_0).
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable

import keras
import numpy as np

from keras_vit.config import Classifier, Gelu, ViTConfig
from keras_vit.errors import UserError
from keras_vit.layers import PositionEmbedding
from keras_vit.models import build, config_of
from keras_vit.npz import read_npz, write_npz
from keras_vit.posemb import resize_position_embedding

LAYOUTS = ("npz", "npz-linen")

_POSITIONS = "Transformer/posembed_input/pos_embedding"
_BLOCK = r"(Transformer/encoderblock_\d+/)"
_PRE_LINEN = {"MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "MlpBlock_0": "MlpBlock_3"}
_PRE_LINEN |= {"LayerNorm_1": "LayerNorm_2"}
_LINEN = {released: linen for linen, released in _PRE_LINEN.items()}


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What happened to every key of a file and every weight of a model; keys in pre-Linen numbering."""

    loaded: tuple[str, ...]
    """Keys whose array now is a weight."""
    resized: tuple[str, ...]
    """Those of them that were resampled to another grid first."""
    dropped: tuple[str, ...]
    """Keys left in the file, as declared."""
    kept: tuple[str, ...]
    """Weights that stayed as they were, as declared."""


def from_checkpoint(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    stored_grid: tuple[int, int] | None = None,
    classifier: Classifier | None = None,
    gelu: Gelu = "tanh",
    layer_norm_epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    attention_dropout_rate: float = 0.0,
    stochastic_depth_rate: float = 0.0,
    keep_pre_logits: bool = False,
) -> keras.Model:
    """Read the architecture out of a ViT .npz file, build it, and load it.

    Args:
        path: of the file.
        image_size: pixels, or (height, width); None takes the size that the position embeddings were made for, which
            a file tells only of square grids. Another size resamples them.
        num_classes: None keeps the head as stored. A number drops head and pre_logits and gives a head of zeros;
            0 gives the features.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        classifier: "gap" (the default where the file has no class token) or "unpooled"; "token" and "map" are seen
            in the file.
        gelu, layer_norm_epsilon: numerics, which a file cannot tell; the defaults are those of JAX files.
        dropout_rate, attention_dropout_rate, stochastic_depth_rate: for training on.
        keep_pre_logits: keep the tanh layer though num_classes is given (vit_jax: an equal representation_size).
    """
    arrays = mend(read_npz(path))
    numerics = {"gelu": gelu, "layer_norm_epsilon": layer_norm_epsilon, "dropout_rate": dropout_rate}
    numerics |= {"attention_dropout_rate": attention_dropout_rate, "stochastic_depth_rate": stochastic_depth_rate}
    config = dataclasses.replace(infer_config(arrays, classifier), **numerics)

    drop: tuple[str, ...] = ()
    if num_classes is None:
        num_classes = arrays["head/bias"].shape[0] if "head/bias" in arrays else 0
    else:
        drop = ("head/",) if keep_pre_logits else ("head/", "pre_logits/")
        if not keep_pre_logits:
            config = dataclasses.replace(config, representation_size=None)
    if image_size is None:
        grid = stored_grid or _square_grid(arrays[_POSITIONS].shape[1] - config.num_prefix_tokens)
        image_size = (grid[0] * config.patch[0], grid[1] * config.patch[1])

    model = build(config, image_size=image_size, num_classes=num_classes, channels=arrays["embedding/kernel"].shape[2])
    _merge(model, arrays, stored_grid=stored_grid, drop=drop, keep=("head/",) if drop else ())
    return model


def load_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    stored_grid: tuple[int, int] | None = None,
    drop: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> LoadReport:
    """Load a ViT .npz file into a model, strictly: nothing is left over on either side unless declared.

    The model is untouched when this raises UserError, whose text names the keys that are missing, left over or of
    another shape.

    Args:
        model: built by `keras_vit.build`.
        path: of the file.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        drop: beginnings of keys (pre-Linen numbering) that may stay in the file, such as "head/".
        keep: beginnings of weight names that may stay as they are.
    """
    return _merge(model, mend(read_npz(path)), stored_grid=stored_grid, drop=tuple(drop), keep=tuple(keep))


def save_checkpoint(model: keras.Model, path: str | os.PathLike, *, layout: str) -> None:
    """Write the weights of a model so that the other code loads them.

    Args:
        model: built by `keras_vit.build`.
        path: of the file; written under a temporary name and renamed.
        layout: "npz", with the numbering of the released files, or "npz-linen".
    """
    if layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}.")
    num_heads = config_of(model).num_heads
    arrays = {}
    for key, weight in weights_by_key(model).items():
        array = keras.ops.convert_to_numpy(weight)
        arrays[key] = array.reshape(_stored_shape(key, array.shape, num_heads))
    write_npz(path, _renumber(arrays, _LINEN) if layout == "npz-linen" else arrays)


def mend(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays with their keys in pre-Linen numbering, whichever the file had."""
    return _renumber(arrays, _PRE_LINEN)


def _renumber(arrays: dict[str, np.ndarray], names: dict[str, str]) -> dict[str, np.ndarray]:
    pattern = re.compile(f"^{_BLOCK}({'|'.join(names)})/")
    return {pattern.sub(lambda match: f"{match[1]}{names[match[2]]}/", key): array for key, array in arrays.items()}


def infer_config(arrays: dict[str, np.ndarray], classifier: Classifier | None = None) -> ViTConfig:
    """The architecture that these arrays (pre-Linen keys) belong to; `classifier` only where they cannot tell it."""
    first = "Transformer/encoderblock_0/"
    query, hidden = f"{first}MultiHeadDotProductAttention_1/query/kernel", f"{first}MlpBlock_3/Dense_0/kernel"
    ranks = {"embedding/kernel": 4, _POSITIONS: 3, query: 3, hidden: 2}
    for key, rank in ranks.items():
        if key not in arrays:
            raise UserError(
                f"The file is not a Vision Transformer of vit_jax: it has no {key!r} among its {len(arrays)} arrays, "
                f"which begin with {', '.join(sorted(arrays)[:3]) or 'nothing'}."
            )
        if arrays[key].ndim != rank:
            raise UserError(f"The array {key!r} should have {rank} axes, but has shape {arrays[key].shape}.")
    if "conv_root/kernel" in arrays:
        raise UserError("The file holds a ResNet+ViT hybrid (conv_root/kernel), and only pure ViTs are read so far.")
    blocks = {int(match[1]) for key in arrays if (match := re.match(r"Transformer/encoderblock_(\d+)/", key))}
    if blocks != set(range(len(blocks))):
        raise UserError(f"The encoder blocks should be numbered from 0 without gaps, but are {sorted(blocks)}.")

    if "cls" in arrays:
        seen = "token"
    else:
        seen = "map" if "MAPHead_0/probe" in arrays else None
    if seen and classifier not in (None, seen):
        raise UserError(f"The file's weights are those of the classifier {seen!r}, but {classifier!r} was asked for.")
    patch = arrays["embedding/kernel"].shape[:2]
    rep = arrays.get("pre_logits/bias")
    return ViTConfig(
        patch_size=patch[0] if patch[0] == patch[1] else patch,
        hidden_size=arrays["embedding/kernel"].shape[3],
        num_layers=len(blocks),
        num_heads=arrays[query].shape[1],
        mlp_dim=arrays[hidden].shape[1],
        classifier=seen or classifier or "gap",
        representation_size=None if rep is None else rep.shape[0],
    )


def weights_by_key(model: keras.Model) -> dict[str, keras.Variable]:
    """The weights of a model under the keys of a released checkpoint."""
    keras_names = {"gamma": "scale", "beta": "bias"}
    weights = {}
    for layer in model.layers:
        for weight in layer.weights:
            key = f"{layer.name.replace('.', '/')}/{keras_names.get(weight.name, weight.name)}"
            weights["cls" if key == "cls/cls" else key] = weight
    return weights


def _stored_shape(key: str, shape: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
    """Shape in a file of the weight `key`: the projections of attention have an axis for the heads there."""
    projection = re.search(r"/MultiHeadDotProductAttention_\d/(query|key|value|out)/(kernel|bias)$", key)
    if projection is None or projection[0].endswith("out/bias"):
        return tuple(shape)
    if projection[1] == "out":
        return num_heads, shape[0] // num_heads, shape[1]
    return *shape[:-1], num_heads, shape[-1] // num_heads


def _merge(
    model: keras.Model,
    arrays: dict[str, np.ndarray],
    *,
    stored_grid: tuple[int, int] | None,
    drop: tuple[str, ...],
    keep: tuple[str, ...],
) -> LoadReport:
    """Check every array against every weight, then assign all."""
    config, weights = config_of(model), weights_by_key(model)
    dropped = {key for key in arrays if drop and key.startswith(drop)}
    offered = {key: array for key, array in arrays.items() if key not in dropped}
    kept = {key for key in weights.keys() - offered.keys() if keep and key.startswith(keep)}
    missing, extra = sorted(weights.keys() - offered.keys() - kept), sorted(offered.keys() - weights.keys())
    if missing or extra:
        raise UserError(
            f"The checkpoint does not fit the model: missing in the file: {', '.join(missing) or 'nothing'}; "
            f"left over in it: {', '.join(extra) or 'nothing'}."
        )

    resized = []
    if _POSITIONS in offered:
        layer = next(layer for layer in model.layers if isinstance(layer, PositionEmbedding))
        table = _fit_positions(offered[_POSITIONS], layer, stored_grid)
        if table is not offered[_POSITIONS]:
            offered[_POSITIONS] = table
            resized.append(_POSITIONS)
    for key, array in offered.items():
        expected = _stored_shape(key, weights[key].shape, config.num_heads)
        if array.shape != expected:
            raise UserError(f"The array {key!r} has shape {array.shape}, but the model needs {expected}.")
        if array.dtype.kind != "f":
            raise UserError(f"The array {key!r} should hold floating-point numbers, but holds {array.dtype}.")

    for key, array in offered.items():
        weights[key].assign(array.reshape(weights[key].shape))
    return LoadReport(tuple(sorted(offered)), tuple(resized), tuple(sorted(dropped)), tuple(sorted(kept)))


def _fit_positions(table: np.ndarray, layer: PositionEmbedding, stored_grid: tuple[int, int] | None) -> np.ndarray:
    """The stored table for the grid of the model. An equal number of tokens is taken as the same grid, as vit_jax does,
    unless stored_grid says otherwise.
    """
    num_tokens = table.shape[1] - layer.num_prefix_tokens if table.ndim == 3 else 0
    if stored_grid is None:
        rows, columns = layer.grid
        stored_grid = layer.grid if num_tokens == rows * columns else _square_grid(num_tokens)
    return resize_position_embedding(table, stored_grid, layer.grid, layer.num_prefix_tokens)


def _square_grid(num_tokens: int) -> tuple[int, int]:
    side = math.isqrt(max(num_tokens, 0))
    if side == 0 or side * side != num_tokens:
        raise UserError(
            f"The file has position embeddings for {num_tokens} patches, which is no square; give stored_grid=(rows, "
            "columns), or the image_size they were made for."
        )
    return side, side
