"""The recipes `auto`: they fit the data set, and give a reason for each choice; advice for any recipe.

That a small ResNet beats a ViT of its size until there are millions of images is Figure 4 of "An Image is Worth 16x16
Words" (arXiv 2010.11929). The learning rate was compared on 704 drawn images of 16 uneven classes, for 24 epochs.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from keras_vit import ResNetConfig, cli
from training.recipes.finetune import FINETUNE_RECIPES
from training.recipes.recipe import PretrainRecipe, Recipe, Schedule

# Images that training sees in all, and the limits of the epochs that this makes.
_IMAGES_SEEN, _FEWEST_EPOCHS, _MOST_EPOCHS = 45_000, 8, 64
# Sides of the input in pixels; images between two are reduced to the smaller one. A small model from scratch has no use
# for more than 128 pixels, and with few images for more than 64: on 714 clip-art images, 96 were no more accurate.
_SIDES = (32, 48, 64, 96, 128)
_FEW_IMAGES, _LARGEST_SIDE_OF_FEW = 10_000, 64
_PAD_REASON = "Resize: pad, the whole image on white, since most images have a transparent background."
_FLIPS = "flips; if mirroring changes the class, as for letters, use keras-vit {} --no-flip"
# How many times as long the sides may get in fine-tuning: the patches of a checkpoint for tiny images are far too small
# for 224 pixels, and the memory of attention grows with the fourth power of the side.
_MOST_GROWTH = 2

# A model from scratch learns fewer images of a class than this by heart (in the median class).
FEW_PER_CLASS = 500
# Times as many images in the largest class as in the smallest, from which on the accuracy hides the small classes.
UNBALANCED = 3
# The checkpoint to begin with: 22 million parameters, which a CPU can fine-tune, trained on ImageNet-21k.
CHECKPOINT = "augreg:S_16"


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """The data and the checkpoint, as far as the recipes depend on them."""

    num_examples: int
    """Training images."""
    image_size: tuple[int, int]
    """Typical height and width of the images in pixels."""
    channels: int = 3
    """1 if the images are gray, else 3."""
    transparent: bool = False
    """Whether most images have transparent pixels."""
    patch: int = 1
    """Pixels of which the sides of the checkpoint's images must be multiples."""
    pretrained_side: int | None = None
    """Longer side of the images that a Vision Transformer's checkpoint was trained on; None if it is not known."""


def auto_recipe(facts: DataFacts, steps: int | None = None) -> PretrainRecipe:
    """Return the recipe from scratch for a data set. steps: of the run, where they are not those of the recipe."""
    largest = min(_largest_side(facts), *facts.image_size)
    side = max((side for side in _SIDES if side <= largest), default=_SIDES[0])
    batch_size = min(32 if facts.num_examples < _FEW_IMAGES else 128, facts.num_examples)
    epochs = min(max(round(_IMAGES_SEEN / facts.num_examples), _FEWEST_EPOCHS), _MOST_EPOCHS)
    if steps is None:
        steps = epochs * (facts.num_examples // batch_size)
    return PretrainRecipe(
        model=ResNetConfig(block_units=(1, 1, 1), root_channels=32, stage_channels=(64, 128, 256), num_groups=8),
        image_size=(side, side),
        channels=facts.channels,
        # What is cut out along its outline fills its image, so that a crop would take parts of it away.
        resize="pad" if facts.transparent else "crop",
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=5e-3,
        schedule=Schedule(warmup_steps=min(50, steps // 10)),
        weight_decay=0.05,
        label_smoothing=0.1,
        flip=facts.channels == 3,
        shift=side // 10,
    )


def auto_reasons(facts: DataFacts, recipe: PretrainRecipe, used: PretrainRecipe) -> list[str]:
    """Return a sentence for each choice of `auto_recipe` that is used: the user may have set other values."""
    stays, smaller = _fields_that_stay(recipe, used), min(facts.image_size)
    reasons = [
        "Model: a small ResNet (BiT); a Vision Transformer from scratch needs millions of images, and there are "
        f"{facts.num_examples:,}."
    ]
    if "image_size" in stays:
        limit = f"below {_FEW_IMAGES:,} images" if facts.num_examples < _FEW_IMAGES else "from scratch"
        limits = f"at least {_SIDES[0]}, at most {_largest_side(facts)} {limit}"
        reasons.append(
            f"Image size: {used.image_size[0]} pixels, since the shorter side is typically {smaller} pixels; {limits}."
        )
    if "resize" in stays and used.resize == "pad":
        reasons.append(_PAD_REASON)
    if "epochs" in stays:
        images = used.num_steps(facts.num_examples) * used.batch_size
        batches = f", in batches of {used.batch_size}" if "batch_size" in stays else ""
        reasons.append(f"Epochs: {used.epochs} ({images:,} images seen{batches}).")
    changes = [f"shifts by up to {used.shift} pixels"] if "shift" in stays else []
    changes += ["label smoothing"] if "label_smoothing" in stays else []
    if "flip" in stays and used.flip:
        changes.append(cli.as_typed(_FLIPS.format("pretrain auto")))
    elif "flip" in stays and changes:
        changes[-1] += cli.as_typed("; if a mirrored image keeps its class, use keras-vit pretrain auto --flip")
    if changes:
        listed = " and ".join([", ".join(changes[:-1]), changes[-1]]) if changes[1:] else changes[0]
        reasons.append(f"Augmentation: {listed}.")
    return [*reasons, cli.as_typed("Checkpoint: none; keras-vit finetune --recipe auto starts from one.")]


def _largest_side(facts: DataFacts) -> int:
    return _LARGEST_SIDE_OF_FEW if facts.num_examples < _FEW_IMAGES else _SIDES[-1]


def auto_finetune_recipe(facts: DataFacts, steps: int | None = None) -> Recipe:
    """Return the recipe for fine-tuning a checkpoint. steps: of the run, where they are not those of the recipe.

    The image sizes are those of the BiT-HyperRule, rounded up to whole patches, but at most twice those that the
    checkpoint was trained on. The steps of the HyperRule, 500 for a batch of 512, are many more images than a folder of
    hundreds has; here they are 20 epochs within limits. Images that are mostly transparent are shown whole.
    """
    usual, crop_from = _hyperrule(facts)
    target = usual if facts.pretrained_side is None else min(usual, _MOST_GROWTH * facts.pretrained_side)
    side = -(-target // facts.patch) * facts.patch
    base = FINETUNE_RECIPES["photos-finetune"]
    own_steps = min(max(20 * facts.num_examples // base.batch_size, 100), 10_000)
    return dataclasses.replace(
        base,
        image_size=(side, side),
        resize="pad" if facts.transparent else base.resize,
        crop_from=None if facts.transparent else crop_from * side // usual,
        batch_size=min(base.batch_size, facts.num_examples),
        steps=own_steps,
        schedule=Schedule("cosine", (own_steps if steps is None else steps) // 10),
    )


def auto_finetune_reasons(facts: DataFacts, recipe: Recipe, used: Recipe) -> list[str]:
    """Return a sentence for each choice of `auto_finetune_recipe` that is used; see `auto_reasons`."""
    stays, reasons = _fields_that_stay(recipe, used), []
    if "image_size" in stays:
        typical = f"{facts.image_size[0]} x {facts.image_size[1]}"
        rule = f"as in the BiT-HyperRule for images that are typically {typical} pixels"
        if facts.pretrained_side is not None and _MOST_GROWTH * facts.pretrained_side < _hyperrule(facts)[0]:
            rule = f"twice the {facts.pretrained_side} of the checkpoint's own images"
        reasons.append(f"Image size: {used.image_size[0]} pixels, {rule}.")
    if "resize" in stays and used.resize == "pad":
        reasons.append(_PAD_REASON)
    if "steps" in stays:
        reasons.append(f"Steps: {used.steps:,}, about 20 epochs of {facts.num_examples:,} images, but 100 to 10,000.")
    changes = ["random crops"] if "inception_crop" in stays else []
    changes += [cli.as_typed(_FLIPS.format("finetune --recipe auto"))] if "flip" in stays else []
    return [*reasons, f"Augmentation: {' and '.join(changes)}."] if changes else reasons


def _hyperrule(facts: DataFacts) -> tuple[int, int]:
    """Return the side of the input, and the side that images are stretched to before a window is taken."""
    return (128, 160) if facts.image_size[0] * facts.image_size[1] < 96 * 96 else (224, 256)


def _fields_that_stay(recipe: Recipe, used: Recipe) -> set[str]:
    names = {field.name for field in dataclasses.fields(recipe)}
    return {name for name in names if getattr(recipe, name) == getattr(used, name)}


def advice(counts: Sequence[int], *, from_scratch: bool) -> list[str]:
    """Return sentences for few or uneven training images; counts: of each class."""
    least, median, most = min(counts), statistics.median(counts), max(counts)
    few = from_scratch and median < FEW_PER_CLASS
    uneven = most >= UNBALANCED * least
    if not few and not uneven:
        return []
    sentences = [f"Training images per class: smallest class {least:,}, median {median:,.0f}, largest {most:,}."]
    if few:
        sentences.append(
            "That is too few to train from scratch. Fine-tune instead: "
            + cli.as_typed(f"keras-vit finetune --checkpoint {CHECKPOINT}, with the same --data.")
        )
    if uneven:
        sentences.append(
            "The classes are uneven: --balance shows all of them equally often, --class-weights makes the images of "
            "small ones count more, and the report of evaluate has the means over the classes beside the accuracy."
        )
    return sentences
