"""Memory of training steps that were compiled for chips of Cloud TPU, from `python -m benchmarks.tpu`.

In bfloat16 with 1,000 classes, on one chip; docs/reference/benchmarks.md has the complete table. A step that was
compiled for one number of images has no entry.
"""

from typing import TypeAlias

Compiled: TypeAlias = tuple[tuple[int, float], tuple[int, float]]
"""Two of (images on a chip, bytes)."""

COMPILED: dict[tuple[str, str, str], Compiled] = {
    ("augreg-b16-i21k", "v5e", "training"): ((32, 3.49e9), (64, 5.71e9)),
    ("vit-b16-i21k", "v5e", "training"): ((32, 4.52e9), (64, 7.39e9)),
}
"""By recipe, kind of chip, and training or remat (rematerialization)."""
