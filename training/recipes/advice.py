"""Advice for training from the number of images of each class."""

import statistics
from collections.abc import Sequence

from keras_vit import cli

# A model from scratch learns fewer images of a class than this by heart (in the median class).
FEW_PER_CLASS = 500
# Times as many images in the largest class as in the smallest, from which on the accuracy hides the small classes.
UNBALANCED = 3
# The checkpoint to begin with: 22 million parameters, which a CPU can fine-tune, trained on ImageNet-21k.
CHECKPOINT = "augreg:S_16"


def advice(counts: Sequence[int], *, from_scratch: bool) -> list[str]:
    """Return sentences for few or uneven training images, and none where there is nothing to say.

    Args:
        counts: training images of each class.
        from_scratch: whether the model has random initial weights.
    """
    least, median, most = min(counts), statistics.median(counts), max(counts)
    few = from_scratch and median < FEW_PER_CLASS
    uneven = most >= UNBALANCED * least
    if not few and not uneven:
        return []
    sentences = [f"Training images per class: smallest class {least:,}, median {median:,.0f}, largest {most:,}."]
    if few:
        sentences.append(
            "They are few for a model from scratch; fine-tuning is usually far better: "
            + cli.as_typed(f"keras-vit finetune --checkpoint {CHECKPOINT}, with the same --data.")
        )
    if uneven:
        sentences.append(
            "The classes are uneven: --balance shows all of them equally often, --class-weights makes the images of "
            "small ones count more, and the report of evaluate has the means over the classes beside the accuracy."
        )
    return sentences
