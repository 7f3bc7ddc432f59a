"""The position embeddings of a file: which rows are of patches, of which grid, and for which images."""

import dataclasses
import math

from keras_vit.checkpoints.checkpoint import Checkpoint
from keras_vit.checkpoints.key_mapping import POSITIONS, Weight, check_rank
from keras_vit.errors import UserError
from keras_vit.models.config import ModelConfig, ResNetConfig, ViTConfig
from keras_vit.models.weight_resizing import Resampler, resize_position_embedding, square_grid


def with_prefix_positions(checkpoint: Checkpoint, config: ViTConfig, wanted_size: tuple[int, int] | None) -> ViTConfig:
    """Say whether a table of timm has rows for class and distillation token.

    It has where the patches of the stored grid, or of the images that the file or config.json names, leave as many
    rows. If neither is known, a square number of rows is that of the patches alone. The images that the model is wanted
    for, and those of config.json where they may be older than the table, decide only where no number of rows is square.
    """
    is_known = checkpoint.layout.prefix_positions is not None or POSITIONS not in checkpoint.weights
    if is_known or not config.has_class_token or config.stem is not None:  # all hybrids of timm have them
        return config
    rows, file_config = checkpoint.weights[POSITIONS].shape[1], checkpoint.file_config
    possible = (rows, rows - config.num_class_tokens)
    stated = _num_patches(file_config.image_size, config.patch, possible)
    wanted = _num_patches(wanted_size, config.patch, possible) or stated
    square = next((number for number in possible if square_grid(number) is not None), None)
    known = None if checkpoint.stored_grid is None else math.prod(checkpoint.stored_grid)
    if known not in possible and (file_config.image_size_is_exact or stated == square):
        known = stated
    if known in possible:
        return dataclasses.replace(config, prefix_positions=known != rows)
    if None not in (square, wanted) and wanted != square:
        raise UserError(
            f"The {rows} rows of {checkpoint.weights[POSITIONS].source.key!r} may be for {square} or for {wanted} "
            "patches; give stored_grid=(rows, columns) to keras_vit.from_checkpoint, or put a config.json beside the "
            "file that has img_size."
        )
    return dataclasses.replace(config, prefix_positions=(square or wanted) != rows)


def _num_patches(size: tuple[int, int] | None, patch: tuple[int, int], possible: tuple[int, int]) -> int | None:
    """The patches of an image of this size; None if it is unknown, or the number is not among the possible ones."""
    number = None if size is None else (size[0] // patch[0]) * (size[1] // patch[1])
    return number if number in possible else None


def stored_grid_of(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int] | None:
    """(rows, columns) of the stored position embeddings, as given or by config.json; None if neither says so."""
    return checkpoint.stored_grid or _file_config_grid(checkpoint, config)


def _file_config_grid(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int] | None:
    file_config = checkpoint.file_config
    size = file_config.position_size or file_config.image_size
    if size is None or isinstance(config, ResNetConfig) or POSITIONS not in checkpoint.weights:
        return None
    num_tokens = checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_positions
    holds_a_patch = config.stem is not None or (size[0] >= config.patch[0] and size[1] >= config.patch[1])
    fits = holds_a_patch and math.prod(config.grid(size)) == num_tokens
    if fits and not checkpoint.layout.square_positions:
        return config.grid(size)
    grid = square_grid(num_tokens) if fits else None
    if grid is None and (fits or file_config.image_size_is_exact):
        raise UserError(
            f"config.json says image_size={size}, but the arrays hold position embeddings for {num_tokens} patches of "
            f"{config.patch}; replace it by the one that belongs to them."
        )
    return grid


def resampler_of(checkpoint: Checkpoint, config: ModelConfig) -> Resampler:
    """How the code that wrote the file resizes its position embeddings."""
    file_config, layout = checkpoint.file_config, checkpoint.layout
    if file_config.resampler is not None:
        return file_config.resampler
    patches_alone = isinstance(config, ViTConfig) and not config.prefix_positions and file_config.gelu is None
    return (layout.patch_resampler if patches_alone else None) or layout.resampler


def known_image_size(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int] | None:
    """The (height, width) of the grid of the position embeddings, or without any of config.json; None if unknown."""
    if isinstance(config, ResNetConfig) or POSITIONS not in checkpoint.weights:
        return checkpoint.file_config.image_size
    rows = checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_positions
    stated = _file_config_grid(checkpoint, config)
    grid = checkpoint.stored_grid or stated or square_grid(rows)
    if grid is None:
        return None
    if checkpoint.file_config.image_size is not None and grid == stated:
        return checkpoint.file_config.image_size  # whose last pixels may fill no patch
    stride = 1 if config.stem is None else config.stem.total_stride
    return grid[0] * config.patch[0] * stride, grid[1] * config.patch[1] * stride


def fit_positions(
    checkpoint: Checkpoint,
    config: ModelConfig,
    grid: tuple[int, int],
    num_prefix_tokens: int,
    resampler: Resampler | None,
) -> Weight:
    """The position embeddings for a grid of the model, resized if the stored grid is another one.

    Without a known grid, an equal number of tokens means the same grid in vit_jax; in PyTorch codes a square number of
    tokens means a square grid.
    """
    table = checkpoint.weights[POSITIONS]
    check_rank(table.source.key, table.shape, (3,))
    num_tokens = table.shape[1] - num_prefix_tokens
    stored = stored_grid_of(checkpoint, config)
    if stored is None:
        stored = square_grid(num_tokens)
        if num_tokens == math.prod(grid) and (stored is None or not checkpoint.layout.torch):
            stored = grid
    if stored is None or math.prod(stored) != num_tokens:
        other = "a square" if stored is None else f"a grid of {stored}"
        raise UserError(
            f"The file has position embeddings for {num_tokens} patches, not for {other}; put the config.json beside "
            "it, or give stored_grid=(rows, columns) to keras_vit.from_checkpoint."
        )
    old_grid = (stored[0], stored[1])
    if old_grid == grid:
        return table
    shape = (table.shape[0], num_prefix_tokens + math.prod(grid), table.shape[2])
    how = resampler or resampler_of(checkpoint, config)
    return table.mapped(shape, lambda array: resize_position_embedding(array, old_grid, grid, num_prefix_tokens, how))
