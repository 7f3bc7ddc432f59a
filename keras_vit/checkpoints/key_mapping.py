"""Rules that map keys and shapes of a file to those of the model and back.

A rule pairs two key templates: "{i}" stands for a number, "{s-1}" for a number minus one, "{u:02d}" for a number of at
least two digits. Its transform maps the array to the weight. The same table of rules reads a layout and writes it.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray, empty

POSITIONS = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_{i}/"
ATTENTION = f"{BLOCK}MultiHeadDotProductAttention_1/"
QKV = ("query", "key", "value")
PROJECTIONS = tuple(f"{ATTENTION}{part}" for part in QKV)


@dataclasses.dataclass(frozen=True)
class Transform:
    """How an array in a file relates to the weight of the model."""

    ranks: tuple[int, ...]
    """Allowed ranks in the file; empty for any."""
    load: Callable[[np.ndarray], np.ndarray]
    """Array in the file -> weight, as a view. Raises ValueError for a longer axis than the one that it removes."""
    store: Callable[[np.ndarray, int], np.ndarray]
    """Weight, number of heads -> array in the file, as a view."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file -> shape of the weight; the same, which no weight has, where `load` raises ValueError."""
        with contextlib.suppress(ValueError):
            return self.load(np.broadcast_to(np.float32(0.0), shape)).shape  # without memory
        return shape


SAME = Transform((), lambda array: array, lambda weight, heads: weight)
# torch's Linear: (out, in).
LINEAR = Transform((2,), lambda a: a.T, lambda w, heads: w.T)
# torch's Conv2d: (out, in, height, width).
CONV = Transform((4,), lambda a: a.transpose(2, 3, 1, 0), lambda w, heads: w.transpose(3, 2, 0, 1))
# flax's projections to query, key and value: kernels (D, heads, d) and biases (heads, d).
TO_HEADS = Transform(
    (2, 3),
    lambda a: a.reshape(*a.shape[:-2], -1),
    lambda w, heads: w.reshape(*w.shape[:-1], heads, w.shape[-1] // heads),
)
# flax's projection from the heads: (heads, d, D).
FROM_HEADS = Transform(
    (3,),
    lambda a: a.reshape(-1, a.shape[-1]),
    lambda w, heads: w.reshape(heads, w.shape[0] // heads, w.shape[1]),
)
# torch's depthwise Conv2d: (channels, 1, height, width); Keras' (height, width, channels, 1).
DEPTHWISE = Transform((4,), lambda a: a.transpose(2, 3, 0, 1), lambda w, heads: w.transpose(2, 3, 0, 1))
# GroupNorm: (C), in files of older flax (1, 1, 1, C).
CHANNELS = Transform((1, 4), lambda a: np.squeeze(a, tuple(range(a.ndim - 1))), lambda w, heads: w)
# A dense layer stored as a 1x1 convolution: (1, 1, in, out), torch's (out, in, 1, 1).
POINTWISE = Transform((4,), lambda a: np.squeeze(a, (0, 1)), lambda w, heads: w[None, None])
POINTWISE_TORCH = Transform((4,), lambda a: np.squeeze(a, (2, 3)).T, lambda w, heads: w.T[:, :, None, None])
# A token stored as a vector, and position embeddings as a matrix.
TOKEN = Transform((1,), lambda a: a[None, None], lambda w, heads: w[0, 0])
TABLE = Transform((2,), lambda a: a[None], lambda w, heads: w[0])


@dataclasses.dataclass(frozen=True)
class Rule:
    """A key of a file and its weights: one, none (a counter), or several, concatenated along an axis.

    The name of a part that no model reads is empty.
    """

    names: tuple[str, ...]
    key: str
    transform: Transform = SAME
    axis: int = 0
    """The axis of the file along which several are concatenated: 0, or -1 for the last."""


def dense(name: str, key: str, transform: Transform = LINEAR) -> tuple[Rule, Rule]:
    """The rules of a dense layer or convolution in PyTorch."""
    return Rule((f"{name}/kernel",), f"{key}.weight", transform), Rule((f"{name}/bias",), f"{key}.bias")


def norm(name: str, key: str) -> tuple[Rule, Rule]:
    """The rules of a norm in PyTorch."""
    return Rule((f"{name}/scale",), f"{key}.weight"), Rule((f"{name}/bias",), f"{key}.bias")


def indexed(
    name: str, key: str, transform: Transform = SAME, leaves: tuple[str, str] = ("kernel", "bias")
) -> tuple[Rule, ...]:
    """The rules of a layer whose arrays are numbered, as in the files of Keras."""
    return tuple(Rule((f"{name}/{leaf}",), f"{key}/{n}", transform) for n, leaf in enumerate(leaves))


def indexed_norm(name: str, key: str) -> tuple[Rule, ...]:
    """The rules of such a norm."""
    return indexed(name, key, leaves=("scale", "bias"))


def indexed_parts(names: tuple[str, ...], key: str) -> tuple[Rule, ...]:
    """The rules of such dense layers that are one in the file."""
    leaves = enumerate(("kernel", "bias"))
    return tuple(Rule(tuple(f"{name}/{leaf}" for name in names), f"{key}/{n}", axis=-1) for n, leaf in leaves)


UNIT = "block{s}/unit{u}/"
BIT_UNIT = "resnet/block{s}/unit{u:02d}/"
BIT_ROOT = "resnet/root_block/standardized_conv2d/kernel"


def bit_norm(name: str, key: str) -> tuple[Rule, Rule]:
    return Rule((f"{name}/group_norm/gamma",), f"{key}.weight"), Rule((f"{name}/group_norm/beta",), f"{key}.bias")


def bottlenecks(unit: str) -> tuple[Rule, ...]:
    """The units of a post-activation ResNet in a PyTorch layout; `unit` is the template before ".conv1"."""
    rules: list[Rule] = []
    for number in (1, 2, 3):
        rules.append(Rule((f"{UNIT}conv{number}/kernel",), f"{unit}.conv{number}.weight", CONV))
        rules += norm(f"{UNIT}gn{number}", f"{unit}.norm{number}")
    rules.append(Rule((f"{UNIT}conv_proj/kernel",), f"{unit}.downsample.conv.weight", CONV))
    return *rules, *norm(f"{UNIT}gn_proj", f"{unit}.downsample.norm")


def bit_units(unit: str) -> tuple[Rule, ...]:
    """The units of BiT in a PyTorch layout."""
    rules = [Rule((f"{BIT_UNIT}a/proj/standardized_conv2d/kernel",), f"{unit}.downsample.conv.weight", CONV)]
    for number, letter in enumerate("abc", start=1):
        rules.append(Rule((f"{BIT_UNIT}{letter}/standardized_conv2d/kernel",), f"{unit}.conv{number}.weight", CONV))
        rules += bit_norm(f"{BIT_UNIT}{letter}", f"{unit}.norm{number}")
    return tuple(rules)


def fused(names: tuple[str, ...], weight: str, bias: str) -> tuple[Rule, Rule]:
    """The rules of dense layers whose kernels and biases are concatenated in PyTorch."""
    kernels = Rule(tuple(f"{name}/kernel" for name in names), weight, LINEAR)
    return kernels, Rule(tuple(f"{name}/bias" for name in names), bias)


def packed_mlp(layer: str, key: str) -> tuple[Rule, Rule]:
    """The rules of gate and value of a gated MLP in one array; they go before those of the block."""
    mlp = f"{BLOCK}MlpBlock_3/"
    return fused((f"{mlp}gate", f"{mlp}Dense_0"), f"{layer}{key}.weight", f"{layer}{key}.bias")


def block_rules(
    layer: str,
    norms: tuple[str, str],
    attention: tuple[str, ...] | Mapping[str, str],
    mlp: Sequence[str] | Mapping[str, str],
    scales: str = "",
    to: str = BLOCK,
    *,
    dense: Callable[[str, str], tuple[Rule, ...]] = dense,
    norm: Callable[[str, str], tuple[Rule, ...]] = norm,
) -> tuple[Rule, ...]:
    """The rules of an encoder block, by default in PyTorch.

    Args:
        layer: beginning of its keys.
        norms: keys of the two norms, behind it; likewise the others.
        attention: of query, key, value and output; or where the first three are one array what is before "weight" and
            "bias", and the output; or some by name.
        mlp: of the two layers; of a gated MLP value, output and gate; or some by name.
        scales: of the factors of both branches, with {n} for 1 and 2; empty without them.
        to: beginning of the names of its weights.
        dense, norm: the rules of a layer by its name and key, in the library.
    """
    first, packed = f"{to}MultiHeadDotProductAttention_1/", tuple[Rule, ...]()
    if isinstance(attention, tuple) and len(attention) == 2:
        key = f"{layer}{attention[0]}"
        packed = fused(tuple(f"{first}{part}" for part in QKV), f"{key}weight", f"{key}bias")
        attention = {"out": attention[1]}
    if not isinstance(attention, Mapping):
        attention = dict(zip((*QKV, "out"), attention, strict=True))
    if not isinstance(mlp, Mapping):
        mlp = dict(zip(("Dense_0", "Dense_1", "gate"), mlp, strict=False))
    return (
        *norm(f"{to}LayerNorm_0", layer + norms[0]),
        *packed,
        *(rule for name, key in attention.items() for rule in dense(f"{first}{name}", layer + key)),
        *norm(f"{to}LayerNorm_2", layer + norms[1]),
        *(rule for name, key in mlp.items() for rule in dense(f"{to}MlpBlock_3/{name}", layer + key)),
        *(Rule((f"{to}LayerScale_{n}/scale",), f"{layer}{scales.format(n=n + 1)}") for n in (0, 1) if scales),
    )


POOLING_INPUTS = tuple(f"MAPHead_0/MultiHeadDotProductAttention_0/{part}" for part in QKV)


def pooling_rules(head: str, probe: str, out: str, norm_key: str) -> tuple[Rule, ...]:
    """The rules of attention pooling in PyTorch but for query, key and value; the last three are behind `head`."""
    pooling = "MAPHead_0/"
    return (
        Rule((f"{pooling}probe",), f"{head}{probe}"),
        *dense(f"{pooling}MultiHeadDotProductAttention_0/out", f"{head}{out}"),
        *norm(f"{pooling}LayerNorm_0", f"{head}{norm_key}"),
        *(rule for n in (0, 1) for rule in dense(f"{pooling}MlpBlock_0/Dense_{n}", f"{head}mlp.fc{n + 1}")),
    )


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight that is read from a file on demand."""

    source: LazyArray
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]
    """Array in the file -> weight."""
    view: Callable[[np.ndarray], np.ndarray] | None = None
    """Empty weight -> view of it with the axes of the file; None if there is no such view."""

    def read(self) -> np.ndarray:
        """Read the weight into new memory."""
        if self.view is None:
            return self.taken_from(self.source.read())
        weight = empty(self.shape)
        self.source.fill(self.view(weight))
        return weight

    def mapped(self, shape: tuple[int, ...], function: Callable[[np.ndarray], np.ndarray]) -> "Weight":
        """The weight of this shape that a function makes of this one."""
        return Weight(self.source, shape, lambda array: function(self.convert(array)))

    def taken_from(self, array: np.ndarray) -> np.ndarray:
        """Copy the weight from the complete array of the file."""
        weight = empty(self.shape)
        weight[...] = self.convert(array)
        return weight


def translate(arrays: Mapping[str, LazyArray], rules: Iterable[Rule]) -> tuple[dict[str, Weight], tuple[str, ...]]:
    """(weights by name, keys without a rule or without a weight). Raises UserError for a wrong rank."""
    weights: dict[str, Weight] = {}
    unused = []
    for key, array in arrays.items():
        for rule in rules:
            numbers = _match(rule.key, key)
            if numbers is not None:
                of_rule = _weights(array, rule, numbers)
                if duplicates := weights.keys() & of_rule.keys():
                    raise same_weight(weights[min(duplicates)].source.key, key)
                weights |= of_rule
                if not rule.names:
                    unused.append(key)
                break
        else:
            unused.append(key)
    return weights, tuple(unused)


def same_weight(key: str, other: str) -> UserError:
    """The error of two arrays for one weight."""
    return UserError(f"The arrays {key!r} and {other!r} are the same weight; keep one of them.")


def _weights(array: LazyArray, rule: Rule, numbers: dict[str, int]) -> dict[str, Weight]:
    transform, parts = rule.transform, len(rule.names)
    if not parts:
        return {}
    check_array(array.is_float, array.key, "hold floating-point numbers", f"holds {array.dtype}")
    if transform.ranks:
        check_rank(array.key, array.shape, transform.ranks)
    if parts == 1:
        name, shape = _fill(rule.names[0], numbers), transform.shape(array.shape)
        if array.part is not None:
            return {name: Weight(array, shape, functools.partial(_load_part, transform, array.part))}
        return {name: Weight(array, shape, transform.load, functools.partial(_file_view, transform, array.shape))}
    is_divisible = array.shape and array.shape[rule.axis] % parts == 0
    check_array(is_divisible, array.key, f"hold {parts} equal parts", f"has shape {array.shape}")
    size, weights = array.shape[rule.axis] // parts, {}
    shape = (*array.shape[:-1], size) if rule.axis else (size, *array.shape[1:])
    for part, name in enumerate(rule.names):
        if name:
            own = slice(part * size, (part + 1) * size)
            load = functools.partial(_load_part, transform, (..., own) if rule.axis else own)
            weights[_fill(name, numbers)] = Weight(array, transform.shape(shape), load)
    return weights


def check_array(is_right: object, key: str, should: str, but: str) -> None:
    """Raise UserError unless an array of a file is what it should be."""
    if not is_right:
        raise UserError(f"The array {key!r} should {should}, but {but}.")


def check_rank(key: str, shape: tuple[int, ...], ranks: Collection[int]) -> None:
    """Raise UserError unless an array, or what is read of it, has one of these numbers of axes."""
    is_right = len(shape) in ranks and 0 not in shape
    check_array(is_right, key, f"have {' or '.join(map(str, ranks))} axes and values", f"has shape {shape}")


def shape_of(weights: Mapping[str, Weight], rules: Iterable[Rule], name: str, rank: int) -> tuple[int, ...]:
    """The shape of a weight of this number of axes. Raises UserError if it is missing, or has others."""
    refuse_keys("is incomplete", [] if name in weights else [key_of(name, rules)])
    weight = weights[name]
    check_rank(weight.source.key, weight.shape, (rank,))
    return weight.shape


def refuse_keys(what: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
    """Raise UserError with the keys, if there are any, and what the checkpoint therefore is or does not."""
    problems = {"missing keys": missing, "unexpected keys": unexpected}
    if sentences := [f"{problem}: {join_keys(keys)}" for problem, keys in problems.items() if keys]:
        raise UserError(f"The checkpoint {what}; {'; '.join(sentences)}.")


def join_keys(keys: Sequence[str]) -> str:
    """The first ten keys for a message, each cut after 200 characters."""
    shown = ", ".join(key[:200] for key in keys[:10]) or "nothing"
    return f"{shown} and {len(keys) - 10} more" if len(keys) > 10 else shown


def _load_part(transform: Transform, part: Any, array: np.ndarray) -> np.ndarray:
    return transform.load(array[part])


def _file_view(transform: Transform, shape: tuple[int, ...], weight: np.ndarray) -> np.ndarray:
    return transform.store(weight, 1).reshape(shape, copy=False)


def untranslate(weights: Mapping[str, np.ndarray], rules: Iterable[Rule], num_heads: int) -> dict[str, np.ndarray]:
    """Weights by name -> arrays by key of the file. Raises UserError for a weight without a rule."""
    arrays: dict[str, np.ndarray] = {}
    used: set[str] = set()
    for rule in rules:
        if not rule.names:
            continue
        for name in weights:
            numbers = _match(rule.names[0], name)
            if numbers is None or name in used:
                continue
            parts = [_fill(part, numbers) for part in rule.names]
            if not all(part in weights for part in parts):
                continue
            views = [rule.transform.store(weights[part], num_heads) for part in parts]
            arrays[_fill(rule.key, numbers)] = views[0] if len(views) == 1 else np.concatenate(views, rule.axis)
            used |= set(parts)
    if unknown := sorted(weights.keys() - used):
        raise UserError(f"This layout cannot store {', '.join(unknown[:3])}; choose another.")
    return arrays


def key_of(name: str, rules: Iterable[Rule]) -> str:
    """The key that a weight has in a file; its name if the layout has none."""
    for rule in rules:
        for template in rule.names:
            if (numbers := _match(template, name)) is not None:
                return _fill(rule.key, numbers)
    return name


_NUMBER = re.compile(r"\{(\w)(-1|:02d)?\}")


@functools.cache
def _pattern(template: str) -> re.Pattern:
    pattern, end = "", 0
    for match in _NUMBER.finditer(template):
        digits = r"\d{2,9}" if match[2] == ":02d" else r"0|[1-9]\d{0,8}"
        pattern += re.escape(template[end : match.start()]) + f"(?P<{match[1]}>{digits})"
        end = match.end()
    return re.compile(pattern + re.escape(template[end:]))


def _match(template: str, key: str) -> dict[str, int] | None:
    """The numbers in a key, by letter; None if the key does not match the template."""
    match = _pattern(template).fullmatch(key)
    if match is None:
        return None
    smaller = {field[1] for field in _NUMBER.finditer(template) if field[2] == "-1"}
    return {letter: int(digits) + (letter in smaller) for letter, digits in match.groupdict().items()}


def _fill(template: str, numbers: dict[str, int]) -> str:
    def field(match: re.Match) -> str:
        if match[1] not in numbers:  # in the key alone, such as the chunk of a block
            return match[0]
        number = numbers[match[1]] - (match[2] == "-1")
        return f"{number:02d}" if match[2] == ":02d" else str(number)

    return _NUMBER.sub(field, template)


def in_halves(weights: Mapping[str, Weight], num_heads: int) -> dict[str, Weight]:
    """The weights for rotations of two halves of a head, of those that rotate pairs of neighboring channels."""
    moved = dict(weights)
    for name, weight in weights.items():
        if re.fullmatch(_ROTATED, name) and weight.shape[-1] % (2 * num_heads) == 0:
            moved[name] = weight.mapped(weight.shape, functools.partial(_reordered, num_heads=num_heads, pairs=False))
    return moved


def in_pairs(weights: Mapping[str, np.ndarray], num_heads: int) -> dict[str, np.ndarray]:
    """The inverse of `in_halves`, of arrays."""
    return {
        name: _reordered(value, num_heads=num_heads, pairs=True) if re.fullmatch(_ROTATED, name) else value
        for name, value in weights.items()
    }


_ROTATED = r"Transformer/encoderblock_\d+/MultiHeadDotProductAttention_1/(query|key)/(kernel|bias)"


def _reordered(array: np.ndarray, *, num_heads: int, pairs: bool) -> np.ndarray:
    """Reorder the channels of each head along the last axis."""
    half = array.shape[-1] // num_heads // 2
    split = (2, half) if pairs else (half, 2)
    heads = array.reshape(*array.shape[:-1], num_heads, *split)
    return np.ascontiguousarray(np.swapaxes(heads, -1, -2)).reshape(array.shape)


def heads_in(key: str, weight: Weight, known: int | None = None) -> int | None:
    """The number of heads in the shape of flax's projections; None for others. Raises UserError unless as known."""
    projection = re.search(r"/MultiHeadDotProductAttention_\d/(query|key|value|out)/(kernel|bias)$", key)
    shape = weight.source.shape
    if projection is None or len(shape) != {"kernel": 3, "bias": 2}[projection[2]]:
        return None
    heads = shape[0 if projection[1] == "out" else -2]
    if known not in (None, heads):
        raise UserError(f"The file has {heads} heads ({weight.source.key!r}), not {known}.")
    return heads
