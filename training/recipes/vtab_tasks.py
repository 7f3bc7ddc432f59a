"""The 19 tasks of VTAB-1k: data sets, splits, and which augmentations preserve the class.

"A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark" (arXiv 1910.04867); splits
of its code, google-research/task_adaptation `data/`. Which tasks exclude an augmentation: "Big Transfer" (1912.11370)
appendix F.
"""

import dataclasses
from typing import Literal

Group = Literal["natural", "specialized", "structured"]
Part = Literal["train800", "val200", "train800val200", "test"]

# The recipe of "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 4.
RECIPE_NAME = "vit-finetune-vtab"
# Images of train800 and val200.
NUM_TRAIN, NUM_VAL = 800, 200


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """One task."""

    name: str
    group: Group
    dataset: str
    """TFDS name: NAME or NAME/CONFIG."""
    validation: str | int
    """The split whose first 200 images are val200; or the percentage of train where they begin."""
    test: str = "test"
    """TFDS split."""
    binary: bool = False
    """Whether pixels are 0 and 1 instead of 0 to 255."""
    flip: bool = True
    """False where mirroring changes the class."""
    crop: bool = True
    """False where a random window changes the class."""

    def split(self, part: Part, num_train: int) -> str:
        """Return the TFDS split of a part, for a training split of `num_train` images."""
        train, validation = f"train[:{NUM_TRAIN}]", f"{self.validation}[:{NUM_VAL}]"
        if isinstance(self.validation, int):
            begin = self.validation * num_train // 100
            validation = f"train[{begin}:{begin + NUM_VAL}]"
        parts = {"train800": train, "val200": validation, "train800val200": f"{train}+{validation}", "test": self.test}
        return parts[part]


TASKS = (
    VtabTask("caltech101", "natural", "caltech101", 90),
    VtabTask("cifar100", "natural", "cifar100", 90),
    VtabTask("dtd", "natural", "dtd", "validation"),
    VtabTask("oxford_flowers102", "natural", "oxford_flowers102", "validation"),
    VtabTask("oxford_iiit_pet", "natural", "oxford_iiit_pet", 80),
    VtabTask("sun397", "natural", "sun397/tfds", "validation"),
    VtabTask("svhn", "natural", "svhn_cropped", 90),
    VtabTask("patch_camelyon", "specialized", "patch_camelyon", "validation"),
    VtabTask("eurosat", "specialized", "eurosat/rgb", 60, "train[80%:]"),
    VtabTask("resisc45", "specialized", "resisc45", 60, "train[80%:]"),
    VtabTask("diabetic_retinopathy", "specialized", "diabetic_retinopathy_detection/btgraham-300", "validation"),
    VtabTask("clevr-count", "structured", "clevr", 90, "validation", crop=False),
    VtabTask("clevr-distance", "structured", "clevr", 90, "validation", crop=False),
    VtabTask("dmlab", "structured", "dmlab", "validation", crop=False),
    VtabTask("dsprites-location", "structured", "dsprites", 80, "train[90%:]", binary=True, flip=False, crop=False),
    VtabTask("dsprites-orientation", "structured", "dsprites", 80, "train[90%:]", binary=True, flip=False),
    VtabTask("kitti-distance", "structured", "kitti", "validation", crop=False),
    VtabTask("smallnorb-azimuth", "structured", "smallnorb", "test", "test[50%:]", flip=False),
    VtabTask("smallnorb-elevation", "structured", "smallnorb", "test", "test[50%:]"),
)
