"""Compute the attention of a model on images, batch by batch: distances, rollouts, maps of heads, and token norms."""

import collections
import concurrent.futures
import dataclasses
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.inspection import analysis
from keras_vit.models.build import config_of, intermediates, preprocessing_of
from keras_vit.models.config import ViTConfig, check_blocks

ATTENTION_FIGURES = ("distance", "rollout", "attention", "norms")
# The largest batch, and the largest number of attention probabilities in memory at once, which limits the batch.
_LARGEST_BATCH, _LARGEST_PROBABILITIES = 64, 2**26
_DISTANCES = ("attention_distance", "attention_distance_renormalized")

Numbers = Sequence[int] | None


def as_float32(tensor) -> np.ndarray:
    """Cast to float32: NumPy cannot store every half precision dtype."""
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


@dataclasses.dataclass(frozen=True)
class Attention:
    """The figures of attention to compute for a model; those of `select`."""

    model: keras.Model
    figures: tuple[str, ...] = ()  # names from ATTENTION_FIGURES; empty for none
    shown: int = 0  # number of images that get maps
    layers: tuple[int, ...] = ()  # indices in the maps among all layers of attention; an axial block has two
    names: tuple[str, ...] = ()  # names of these layers
    heads: tuple[int, ...] = ()

    @classmethod
    def select(
        cls, model: keras.Model, figures: Sequence[str], shown: int, layers: Numbers, heads: Numbers
    ) -> "Attention":
        """Select layers and heads by their numbers, None for all. Raises UserError if they do not fit the model."""
        config, chosen = config_of(model), tuple(figure for figure in figures if figure in ATTENTION_FIGURES)
        if not chosen:
            return cls(model)
        assert isinstance(config, ViTConfig)
        blocks, axes = _checked(layers, config.num_layers, "layers"), _axes(config)
        numbers = tuple(block * len(axes) + part for block in blocks for part in range(len(axes)))
        names = tuple(f"{block} {axis}".strip() for block in blocks for axis in axes)
        return cls(model, chosen, shown, numbers, names, _checked(heads, config.num_heads, "heads"))

    def compute(self, inputs: np.ndarray, resized: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return arrays and measures. Attention probabilities are not kept between batches.

        Args:
            inputs: (B, h, w, C), normalized.
            resized: the same in 0..255.
        """
        if not self.figures:
            return {}, {}
        config = self._config
        # Grayscale images with light ink on black have a known foreground: the bright pixels.
        ink = "rollout" in self.figures and inputs.shape[-1] == 1 and config.stem is None
        if not ink and "distance" not in self.figures:
            inputs = inputs[: self.shown]
        batches = collections.defaultdict(list)
        for first, attentions, blocks in self._batches(inputs):
            mapped = max(self.shown - first, 0)
            for name, values in self._arrays(attentions, blocks, mapped, len(inputs) if ink else mapped):
                batches[name].append(values)
        arrays = {name: np.concatenate(parts) for name, parts in batches.items()}
        measures: dict[str, Any] = {}
        if "distance" in self.figures:
            arrays |= {name: arrays[name].mean(axis=0) for name in _DISTANCES}  # (L, H)
            layers = arrays["attention_distance"]  # of the heads of each, in pixels
            measures["attention_distance"] = [{"lowest": float(d.min()), "highest": float(d.max())} for d in layers]
        if ink:
            foreground = resized[..., 0] > 127.5
            has_both = foreground.any(axis=(1, 2)) & ~foreground.all(axis=(1, 2))
            if has_both.any():
                rollouts = arrays["rollout"][has_both, -1]
                inside, outside = analysis.weight_per_pixel(rollouts, foreground[has_both])
                measures["rollout"] = {"ink": inside, "background": outside, "images": int(has_both.sum())}
            arrays["rollout"] = arrays["rollout"][: self.shown]
        return arrays, measures

    @property
    def _config(self) -> ViTConfig:
        return typing.cast(ViTConfig, config_of(self.model))

    @property
    def _grid(self) -> tuple[int, int]:
        return self._config.grid(preprocessing_of(self.model).image_size)

    def _arrays(
        self, attentions: list[np.ndarray], blocks: list[np.ndarray], mapped: int, rolled: int
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays of a batch, of which the first `mapped` images get maps, and `rolled` a rollout."""
        if "distance" in self.figures:
            for name, renormalize in zip(_DISTANCES, (False, True), strict=True):
                yield name, self._distances(attentions, renormalize)
        if "rollout" in self.figures and rolled:
            rollouts = analysis.attention_rollout(probabilities[:rolled] for probabilities in attentions)
            yield "rollout", np.moveaxis(self._to_patches(rollouts), 0, 1)  # (B, L, h, w)
        if "attention" in self.figures and mapped:
            maps = [self._to_patches(attentions[layer][:mapped, list(self.heads)]) for layer in self.layers]
            yield "attention", np.stack(maps, axis=1)  # (B, L, H, h, w)
        if "norms" in self.figures and mapped:
            where = self._grid, self._config.num_prefix_tokens
            norms = [analysis.token_norms(analysis.patch_tokens(tokens[:mapped], *where)) for tokens in blocks]
            yield "norms", np.stack(norms, axis=1)  # (B, L, h, w)

    def _to_patches(self, matrix: np.ndarray) -> np.ndarray:
        config = self._config
        return analysis.attention_to_patches(matrix, self._grid, config.num_prefix_tokens, config.has_class_token)

    def _distances(self, attentions: list[np.ndarray], renormalize: bool) -> np.ndarray:
        """Mean attention distance of each image, layer and head, (B, L, H) in pixels, computed on all cores."""
        grid, prefix = self._grid, self._config.num_prefix_tokens
        height, width = preprocessing_of(self.model).image_size
        patch = height / grid[0], width / grid[1]

        def of_layer(probabilities: np.ndarray) -> np.ndarray:
            return analysis.mean_attention_distance(probabilities, grid, patch, prefix, renormalize=renormalize)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return np.stack(list(pool.map(of_layer, attentions)), axis=1)

    def _batches(self, inputs: np.ndarray) -> Iterator[tuple[int, list[np.ndarray], list[np.ndarray]]]:
        """Yield the first image index, attention (B, H, T, T) of each layer and, for "norms", tokens of each block."""
        config, grid = self._config, self._grid
        axes = _axes(config)
        names = [f"attention_{layer}_{axis}".rstrip("_") for layer in range(config.num_layers) for axis in axes]
        blocks = [f"block_{layer}" for layer in range(config.num_layers)] if "norms" in self.figures else []
        inside = intermediates(self.model, [*names, *blocks])
        num_tokens = grid[0] * grid[1] + config.num_prefix_tokens
        probabilities = len(names) * config.num_heads * num_tokens**2
        size = max(1, min(_LARGEST_BATCH, _LARGEST_PROBABILITIES // probabilities))
        shows_progress = len(inputs) > size and sys.stdout.isatty()
        progress = keras.utils.Progbar(len(inputs), unit_name="image") if shows_progress else None
        for first in range(0, len(inputs), size):
            outputs = inside(inputs[first : first + size], training=False)
            outputs = {name: as_float32(value) for name, value in outputs.items()}
            attentions = [outputs[name] for name in names]
            if config.axial:
                attentions = [analysis.unfold_axial(a, grid, axes[layer % 2]) for layer, a in enumerate(attentions)]
            yield first, attentions, [outputs[name] for name in blocks]
            if progress:
                progress.add(min(size, len(inputs) - first))


def _axes(config: ViTConfig) -> tuple[str, ...]:
    return ("row", "column") if config.axial else ("",)


def _checked(numbers: Numbers, count: int, what: str) -> tuple[int, ...]:
    """Numbers below count, or all of them for None."""
    check_blocks(range(count) if numbers is None else numbers, count, what)
    return tuple(range(count)) if numbers is None else tuple(number % count for number in numbers)
