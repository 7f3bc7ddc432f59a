"""The studies of "An Image is Worth 16x16 Words" (arXiv 2010.11929): grids of ordinary runs around a recipe.

Figures 3 and 4: data-size. Figure 5 and Table 6: scaling. Table 8: position-embedding. Figure 9: head. Figure 8: shape.
small-data is not of that paper.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from keras_vit import ResNetConfig, UserError, ViTConfig
from keras_vit.models.config import ModelConfig
from training.recipes.pretrain import compact, with_early_convolutions, with_shifted_patches
from training.recipes.recipe import PretrainRecipe

# The paper's Figure 9: the class token learns at 8e-4; the mean of the tokens does worse there, and well at 3e-4.
_LOWER_RATE = 3 / 8
_PAPER = "arXiv 2010.11929"
_DATA_SHARES = (0.01, 0.1, 1.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting of a study, trained once for each seed."""

    name: str
    """Directory of its runs, without the seed."""
    line: str
    """The line of the figure: a family of models, a dimension, a kind of position embedding."""
    setting: str
    """Its place on that line, as text."""
    recipe: PretrainRecipe
    train_images: int
    """Number of random training images. For one seed, smaller sets are subsets of larger ones."""
    evaluations: int = 1
    """Number of evaluations, evenly spaced, the last at the end."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid and what it asks."""

    title: str
    source: str
    """Figure or table, and paper."""
    grid: Callable[..., list[Point]]
    """The base recipe and the number of all training images -> points, in the order of the table."""
    takes_sizes: bool = False
    """Whether numbers of training images may follow."""


def data_size(recipe: PretrainRecipe, num_examples: int, sizes: Sequence[int] | None = None) -> list[Point]:
    """Return models of each family on random subsets, all for the same number of steps."""
    base = _vit_of(recipe)
    models: dict[str, ModelConfig] = {"ViT": base, "hybrid": _hybrid(base, 1.0), "BiT": _bit((1, 1, 1), 16)}
    return _by_size(recipe, models, num_examples, sizes)


def small_data(recipe: PretrainRecipe, num_examples: int, sizes: Sequence[int] | None = None) -> list[Point]:
    """Return the proposals for a ViT on few images, each on random subsets, all for the same number of steps."""
    base = _vit_of(recipe)
    models = {
        "ViT": base,
        "early convolutions": with_early_convolutions(base),
        "shifted patches and locality": with_shifted_patches(base),
        "convolutions and sequence pooling": compact(base),
    }
    return _by_size(recipe, models, num_examples, sizes)


def _by_size(
    recipe: PretrainRecipe, models: Mapping[str, ModelConfig], num_examples: int, sizes: Sequence[int] | None
) -> list[Point]:
    """Return each model on subsets of these sizes; by default shares of all images."""
    sizes = sizes or [round(share * num_examples) for share in _DATA_SHARES]
    for size in sizes:
        if not recipe.batch_size <= size <= num_examples:
            raise UserError(
                f"A subset must have from {recipe.batch_size} images, a batch, to {num_examples}, all of them, "
                f"but one has {size}; give other --train-images or a smaller --batch-size."
            )
    return [
        Point(f"{_as_name(line).lower()}-{size}", line, f"{size:,} images", _of(recipe, model), size)
        for line, model in models.items()
        for size in sizes
    ]


def scaling(recipe: PretrainRecipe, num_examples: int) -> list[Point]:
    """Return three sizes of each family on all images."""
    base, scales = _vit_of(recipe), (0.5, 1.0, 2.0)
    models: dict[str, dict[str, ModelConfig]] = {
        "ViT": {f"x{scale:g}": _scaled(base, scale) for scale in scales},
        "hybrid": {f"x{scale:g}": _hybrid(base, scale) for scale in scales},
        "BiT": {"R11x0.5": _bit((1, 1, 1), 8), "R11x1": _bit((1, 1, 1), 16), "R20x1": _bit((2, 2, 2), 16)},
    }
    return [
        Point(f"{line.lower()}-{setting}", line, setting, _of(recipe, model), num_examples)
        for line, sizes in models.items()
        for setting, model in sizes.items()
    ]


# Of Table 8: kind, place, and ours for both. The fixed sines and cosines are not in the table.
_POSITIONS = (
    ("none", "-", "none", "input"),
    ("1-D", "stem", "learned", "input"),
    ("1-D", "every layer", "learned", "every-layer"),
    ("1-D", "every layer, shared", "learned", "shared"),
    ("2-D", "stem", "learned-2d", "input"),
    ("2-D", "every layer", "learned-2d", "every-layer"),
    ("2-D", "every layer, shared", "learned-2d", "shared"),
    ("relative", "-", "relative", "input"),
    ("sin-cos 2-D", "stem", "sincos-2d", "input"),
)


def position_embedding(recipe: PretrainRecipe, num_examples: int) -> list[Point]:
    """Return every kind of position embedding, added at every place."""
    change = functools.partial(dataclasses.replace, _vit_of(recipe))
    points = []
    for line, setting, embedding, place in _POSITIONS:
        model = change(position_embedding=embedding, position_injection=place)
        points.append(Point(f"{embedding}-{place}", line, setting, _of(recipe, model), num_examples))
    return points


def heads(recipe: PretrainRecipe, num_examples: int) -> list[Point]:
    """Return class token and mean of the tokens, the latter at two learning rates, as it goes while they learn."""
    points = []
    token, gap = (dataclasses.replace(_vit_of(recipe), classifier=each) for each in ("token", "gap"))
    for line, own, share in (
        ("class token", token, 1.0),
        ("mean of the tokens", gap, 1.0),
        ("mean of the tokens", gap, _LOWER_RATE),
    ):
        rate = recipe.learning_rate * share
        changed = dataclasses.replace(_of(recipe, own), learning_rate=rate)
        points.append(Point(f"{own.classifier}-{rate:g}", line, f"learning rate {rate:g}", changed, num_examples, 10))
    return points


def shape(recipe: PretrainRecipe, num_examples: int) -> list[Point]:
    """Return models with one dimension halved and doubled; patches of the nearest sizes that divide the image."""
    model = _vit_of(recipe)
    change = functools.partial(dataclasses.replace, model)
    widths = (_multiple(model.hidden_size // 2, model), 2 * model.hidden_size)
    models: dict[str, dict[str, ViTConfig]] = {
        "base": {"as it is": model},
        "depth": {str(n): change(num_layers=n) for n in (max(model.num_layers // 2, 1), 2 * model.num_layers)},
        "width": {str(n): change(hidden_size=n) for n in widths},
        "width of the MLP": {str(n): change(mlp_dim=n) for n in (max(model.mlp_dim // 2, 1), 2 * model.mlp_dim)},
        "patch": {f"{n} pixels": change(patch_size=n) for n in _other_patches(recipe)},
        "all": {f"x{scale:g}": _scaled(model, scale) for scale in (0.5, 2.0)},
    }
    return [
        Point(_as_name(f"{line}-{setting}"), line, setting, _of(recipe, changed), num_examples)
        for line, settings in models.items()
        for setting, changed in settings.items()
    ]


STUDIES = {
    "data-size": Study("Accuracy against training images", f"Figures 3 and 4 of {_PAPER}", data_size, True),
    "scaling": Study("Accuracy against the operations of training", f"Figure 5 of {_PAPER}", scaling),
    "position-embedding": Study("Position embeddings", f"Table 8 of {_PAPER}", position_embedding),
    "head": Study("Class token or mean of the tokens", f"Figure 9 of {_PAPER}", heads),
    "shape": Study("Scaling one dimension at a time", f"Figure 8 of {_PAPER}", shape),
    "small-data": Study("Models for few images", "arXiv 2112.13492 and 2104.05704", small_data, True),
}


def check_base(recipe: PretrainRecipe) -> None:
    """Raise UserError for a recipe that the studies cannot vary."""
    is_vit = isinstance(recipe.model, ViTConfig) and recipe.model.stem is None
    if not is_vit or recipe.target != "classes" or recipe.steps is None:
        raise UserError(
            "A study varies a ViT that cuts the image itself into patches and learns classes, and trains all models "
            "for the same number of steps; give such a recipe, and --steps, such as --steps 1000."
        )


def _of(recipe: PretrainRecipe, model: ModelConfig) -> PretrainRecipe:
    return dataclasses.replace(recipe, model=model)


def _as_name(text: str) -> str:
    return text.replace(" ", "-")


def _scaled(model: ViTConfig, scale: float) -> ViTConfig:
    """Return a wider and deeper model, both at once, as from Ti over S to B."""
    return dataclasses.replace(
        model,
        hidden_size=_multiple(round(model.hidden_size * scale), model),
        mlp_dim=max(round(model.mlp_dim * scale), 1),
        num_layers=max(round(model.num_layers * (1 + scale) / 2), 1),
    )


def _multiple(hidden_size: int, model: ViTConfig) -> int:
    """Return the nearest width that the heads, and sines and cosines of two axes, divide."""
    unit = 4 * model.num_heads
    return max(round(hidden_size / unit), 1) * unit


def _hybrid(model: ViTConfig, scale: float) -> ViTConfig:
    """Return the encoder on the pixels of a feature map: a root and one unit, a quarter of the image's side."""
    channels = max(round(16 * scale), 4)
    stem = ResNetConfig((1,), channels, (4 * channels,), preactivation=False, num_groups=4)
    return dataclasses.replace(_scaled(model, scale), patch_size=1, stem=stem)


def _bit(block_units: tuple[int, ...], root_channels: int) -> ResNetConfig:
    return ResNetConfig(block_units, root_channels, num_groups=4)


def _vit_of(recipe: PretrainRecipe) -> ViTConfig:
    assert isinstance(recipe.model, ViTConfig)  # as `check_base` requires
    return recipe.model


def _other_patches(recipe: PretrainRecipe) -> list[int]:
    """Return the next larger and the next smaller patch that divides the image."""
    patch, sides = _vit_of(recipe).patch[0], recipe.image_size
    dividing = [n for n in range(2, min(sides) // 2 + 1) if all(side % n == 0 for side in sides)]
    larger, smaller = [n for n in dividing if n > patch][:1], [n for n in dividing if n < patch][-1:]
    return [*larger, *smaller]
