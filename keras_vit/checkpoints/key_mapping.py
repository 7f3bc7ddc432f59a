"""Rules of translation between the keys and shapes of a file and those of our models, in both directions.

A rule pairs templates of keys: "{i}" stands for a number, "{s-1}" for one that is smaller by one, "{u:02d}" for one of
at least two digits. Its form says how the array stands in the file. One table of rules reads a layout and writes it.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray, empty


@dataclasses.dataclass(frozen=True)
class Form:
    """How an array stands in a file, against the weight of our model that it is."""

    ranks: tuple[int, ...]
    """Numbers of axes that it may have in the file; empty for any."""
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Shape in the file -> shape of the weight."""
    load: Callable[[np.ndarray], np.ndarray]
    """Array of the file -> weight."""
    store: Callable[[np.ndarray, int], np.ndarray]
    """Weight, number of heads -> array of the file; a view."""


def _merge_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return *shape[:-2], shape[-2] * shape[-1]


def _merge_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0] * shape[1], *shape[2:]


def _only_ones(sides: tuple[int, ...], stored: tuple[int, ...], squeezed: tuple[int, ...]) -> tuple[int, ...]:
    """The squeezed shape if what is squeezed has length one; else the stored one, which will fit no weight."""
    return squeezed if set(sides) <= {1} else stored


SAME = Form((), lambda shape: shape, lambda array: array, lambda weight, heads: weight)
# torch's Linear: (out, in).
LINEAR = Form((2,), lambda s: (s[1], s[0]), lambda a: a.T, lambda w, heads: w.T)
# torch's Conv2d: (out, in, height, width).
CONV = Form(
    (4,),
    lambda s: (s[2], s[3], s[1], s[0]),
    lambda a: a.transpose(2, 3, 1, 0),
    lambda w, heads: w.transpose(3, 2, 0, 1),
)
# flax's projections to query, key and value: kernels (D, heads, d) and biases (heads, d).
TO_HEADS = Form(
    (2, 3),
    _merge_last,
    lambda a: a.reshape(_merge_last(a.shape)),
    lambda w, heads: w.reshape(*w.shape[:-1], heads, w.shape[-1] // heads),
)
# flax's projection from the heads: (heads, d, D).
FROM_HEADS = Form(
    (3,),
    _merge_first,
    lambda a: a.reshape(_merge_first(a.shape)),
    lambda w, heads: w.reshape(heads, w.shape[0] // heads, w.shape[1]),
)
# GroupNorm: (C), in files of older flax (1, 1, 1, C).
CHANNELS = Form((1, 4), lambda s: _only_ones(s[:-1], s, s[-1:]), lambda a: a.reshape(-1), lambda w, heads: w)
# A dense layer kept as a 1x1 convolution: (1, 1, in, out), torch's (out, in, 1, 1).
POINTWISE = Form(
    (4,), lambda s: _only_ones(s[:2], s, s[2:]), lambda a: a.reshape(a.shape[2:]), lambda w, heads: w[None, None]
)
POINTWISE_TORCH = Form(
    (4,),
    lambda s: _only_ones(s[2:], s, (s[1], s[0])),
    lambda a: a[:, :, 0, 0].T,
    lambda w, heads: w.T[:, :, None, None],
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One key of a file, and the weights it holds: one, none (a counter that inference does not read), or several one
    after another along the file's first axis.
    """

    ours: tuple[str, ...]
    theirs: str
    form: Form = SAME


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of a file as a weight of a model: shape known, numbers read on demand."""

    source: LazyArray
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]
    """The array of the file -> the weight."""
    place: Callable[[np.ndarray], np.ndarray] | None = None
    """A weight to be filled -> the view of it that has the axes of the file; None if there is none."""

    def read(self) -> np.ndarray:
        """The numbers of the weight in memory of their own."""
        if self.place is None:
            return self.taken_from(self.source.read())
        weight = empty(self.shape)
        self.source.fill(self.place(weight))
        return weight

    def taken_from(self, array: np.ndarray) -> np.ndarray:
        """The numbers of the weight, copied out of the whole array of the file."""
        weight = empty(self.shape)
        weight[...] = self.convert(array)
        return weight


def translate(arrays: Mapping[str, LazyArray], rules: Iterable[Rule]) -> tuple[dict[str, Weight], tuple[str, ...]]:
    """(weights by our names, keys that no rule knows or that hold no weight). Raises UserError for a wrong rank."""
    weights, unused = {}, []
    for key, stored in arrays.items():
        for rule in rules:
            numbers = _match(rule.theirs, key)
            if numbers is not None:
                found = _weights(stored, rule, numbers)
                if twice := weights.keys() & found.keys():
                    raise UserError(f"The file holds the weight {min(twice)!r} twice, the second time as {key!r}.")
                weights |= found
                if not rule.ours:
                    unused.append(key)
                break
        else:
            unused.append(key)
    return weights, tuple(unused)


def _weights(stored: LazyArray, rule: Rule, numbers: dict[str, int]) -> dict[str, Weight]:
    form, parts = rule.form, len(rule.ours)
    if parts and not stored.is_float:
        raise UserError(f"The array {stored.key!r} should hold floating-point numbers, but holds {stored.dtype}.")
    if form.ranks and len(stored.shape) not in form.ranks:
        ranks = " or ".join(map(str, form.ranks))
        raise UserError(f"The array {stored.key!r} should have {ranks} axes, but has shape {stored.shape}.")
    if parts == 1:
        name, shape = _fill(rule.ours[0], numbers), form.shape(stored.shape)
        if stored.part is not None:
            return {name: Weight(stored, shape, functools.partial(_load_part, form, stored.part))}
        return {name: Weight(stored, shape, form.load, functools.partial(_place, form, stored.shape))}
    if parts and (not stored.shape or stored.shape[0] % parts):
        raise UserError(f"The array {stored.key!r} should hold {parts} equal parts, but has shape {stored.shape}.")
    found = {}
    for part, name in enumerate(rule.ours):
        size = stored.shape[0] // parts
        load = functools.partial(_load_part, form, slice(part * size, (part + 1) * size))
        found[_fill(name, numbers)] = Weight(stored, form.shape((size, *stored.shape[1:])), load)
    return found


def _load_part(form: Form, part: int | slice, array: np.ndarray) -> np.ndarray:
    return form.load(array[part])


def _place(form: Form, stored: tuple[int, ...], weight: np.ndarray) -> np.ndarray:
    """A weight as the array of the file that it is; axes of length one and those of the heads are of no account."""
    return form.store(weight, 1).reshape(stored, copy=False)


def untranslate(weights: Mapping[str, np.ndarray], rules: Iterable[Rule], num_heads: int) -> dict[str, np.ndarray]:
    """The arrays of a file that holds these weights (by our names). Raises UserError for a weight without a rule."""
    arrays, used = {}, set()
    for rule in rules:
        if not rule.ours:
            continue
        for name in weights:
            numbers = _match(rule.ours[0], name)
            if numbers is None or name in used:
                continue
            parts = [_fill(part, numbers) for part in rule.ours]
            if not all(part in weights for part in parts):
                continue
            stored = [rule.form.store(weights[part], num_heads) for part in parts]
            arrays[_fill(rule.theirs, numbers)] = stored[0] if len(stored) == 1 else np.concatenate(stored)
            used |= set(parts)
    if homeless := sorted(weights.keys() - used):
        raise UserError(f"This layout has no place for {', '.join(homeless[:3])}; choose another.")
    return arrays


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
    """The numbers in a key, by letter; None if the key is not of this template."""
    match = _pattern(template).fullmatch(key)
    if match is None:
        return None
    smaller = {field[1] for field in _NUMBER.finditer(template) if field[2] == "-1"}
    return {letter: int(digits) + (letter in smaller) for letter, digits in match.groupdict().items()}


def _fill(template: str, numbers: dict[str, int]) -> str:
    def field(match: re.Match) -> str:
        number = numbers[match[1]] - (match[2] == "-1")
        return f"{number:02d}" if match[2] == ":02d" else str(number)

    return _NUMBER.sub(field, template)
