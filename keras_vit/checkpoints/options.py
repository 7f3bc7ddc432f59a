"""The keywords of `from_checkpoint` as one object."""

import dataclasses
import numbers
import typing
from collections.abc import Sequence

from keras_vit.checkpoints.formats.file_config import FileConfig
from keras_vit.errors import UserError, check_choice, check_integers
from keras_vit.models.config import Classes, Classifier, Gelu, PositionEmbeddingKind, ViTConfig, convert_fields
from keras_vit.models.weight_resizing import ChannelRule, Resampler, check_resampler

RATES = ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The arguments of `from_checkpoint`, which documents them; None: as the file says."""

    image_size: int | tuple[int, int] | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    patch_size: int | tuple[int, int] | None = None
    channels: int | None = None
    channel_rule: ChannelRule = "mean"
    resampler: Resampler | None = None
    stored_grid: tuple[int, int] | None = None
    classifier: Classifier | None = None
    position_embedding: PositionEmbeddingKind | None = None
    num_heads: int | None = None
    num_groups: int | None = None
    conv_stem_strides: tuple[int, ...] | None = None
    gelu: Gelu | None = None
    layer_norm_epsilon: float | None = None
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth_rate: float = 0.0
    keep_pre_logits: bool = False
    classifier_activation: str | None = None
    dtype: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("num_classes", self.num_classes, least=0)
        for field in ("channels", "num_heads", "num_groups"):
            check_integers(field, getattr(self, field))
        check_integers("stored_grid", self.stored_grid, length=2)
        check_integers("conv_stem_strides", self.conv_stem_strides, length=0)
        if self.patch_size is not None and not isinstance(self.patch_size, numbers.Integral):
            check_integers("patch_size", self.patch_size, length=2)
        check_choice("channel_rule", self.channel_rule, typing.get_args(ChannelRule))
        if self.resampler is not None:
            check_resampler(self.resampler)
        if self.classes is not None:
            self.refuse({"num_classes": "classes has a name for each class"})
        if self.num_classes is None:
            self.refuse({"keep_pre_logits": "it is for a new head of num_classes"})

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def rates(self) -> dict[str, typing.Any]:
        """The rates for further training, by field of ViTConfig."""
        return {name: getattr(self, name) for name in RATES}

    def for_classes(self, known: Classes | None) -> tuple["LoadOptions", Classes | None, list[int | None]]:
        """Return the options with `num_classes`, the classes of the model, and the row of each in a head that stays."""
        if self.classes is None:
            return self, known if self.num_classes is None else None, []
        rows = rows_of(self.classes, known.labels if known else ())
        print(_sentence_on_head(rows, self.classes, known))
        if known is None or not any(row is not None for row in rows):
            number = len(self.classes)
            return dataclasses.replace(self, classes=None, num_classes=number), Classes(self.classes), []
        return self, dataclasses.replace(known.selected(rows), labels=self.classes), rows

    def refuse(self, reasons: typing.Mapping[str, str]) -> None:
        """Raise UserError for an option that was given and does not apply; the reasons by its name."""
        for field in dataclasses.fields(self):
            value, reason = getattr(self, field.name), reasons.get(field.name)
            if reason is not None and value != field.default:
                raise UserError(f"{field.name}={value!r:.80} does not apply, because {reason}; leave it out.")

    def override(self, config: FileConfig) -> FileConfig:
        """The settings of a config.json with those that the caller gave instead."""
        names = ("num_heads", "num_groups", "gelu", "layer_norm_epsilon")
        return dataclasses.replace(
            config, **{name: value for name in names if (value := getattr(self, name)) is not None}
        )

    def with_patch(self, config: ViTConfig) -> ViTConfig:
        """The config with the new patch size."""
        return config if self.patch_size is None else dataclasses.replace(config, patch_size=self.patch_size)


def rows_of(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Return where each class is among the known ones, whatever its case and with underscores for spaces; else None."""
    rows: dict[str, int | None] = {}
    for row, name in enumerate(known):
        rows[_key(name)] = None if _key(name) in rows else row
    keys = [_key(name) for name in names]
    return [rows.get(key) if keys.count(key) == 1 else None for key in keys]


def _key(name: str) -> str:
    return name.casefold().replace("_", " ").strip()


def _sentence_on_head(rows: Sequence[int | None], names: Sequence[str], known: Classes | None) -> str:
    new = [name for name, row in zip(names, rows, strict=True) if row is None]
    if known is None:
        return f"The head is new, with {len(names)} classes: the model that it begins with does not name its own."
    if len(new) == len(names):
        return f"The head is new: none of its {len(names)} classes is among the {len(known.labels):,} of the model."
    if new:
        some = f"{', '.join(new[:5])}{' …' if new[5:] else ''}"
        return f"The head is kept for {len(names) - len(new)} of {len(names)} classes, and new for {some}."
    of_all = "" if len(known.labels) == len(names) else f", of the {len(known.labels):,} of the model"
    in_order = "" if list(rows) == list(range(len(rows))) else ", in the order of the data"
    return f"The head is kept: it knows all {len(names)} classes{of_all}{in_order}."
