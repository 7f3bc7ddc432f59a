"""Patch kernels of another size or other channels: what they keep, and agreement with torch.

`fixtures/resamplers.npz`, made with torch 2.13.0 on CPU: `patch.{old}-{new}.kernel` is (h, w, 3, 2) float32, standard
normal; `patch.{old}-{new}.resized` is `torch.linalg.pinv` (float64) of the transpose of the whole matrix B, times that
kernel, where column i of B is `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)` of basis patch i.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_vit import UserError
from keras_vit.models.weight_resizing import adapt_channels, resampling_matrix, resize_patch_kernel
from tests.support import FIXTURES

SIDES = st.integers(1, 9)
CHANNELS = st.integers(1, 7)
TORCH = np.load(FIXTURES / "resamplers.npz")
CASES = [name.removeprefix("patch.").removesuffix(".kernel") for name in TORCH if name.endswith(".kernel")]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape)


def resize(patches: np.ndarray, new_patch: tuple[int, int]) -> np.ndarray:
    """B: the bilinear resize of (h, w, ...) that the kernel is made for."""
    rows, columns = (
        resampling_matrix(old, new, "bilinear") for old, new in zip(patches.shape[:2], new_patch, strict=True)
    )
    return np.einsum("yh,xw,hw...->yx...", rows, columns, patches)


def embed(patch: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return np.einsum("hwc,hwcd->d", patch, kernel)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_pseudo_inverse_of_the_whole_resize(case):
    new_patch = tuple(map(int, case.split("-")[1].split("x")))
    resized = resize_patch_kernel(TORCH[f"patch.{case}.kernel"].astype(np.float64), new_patch)
    np.testing.assert_allclose(resized, TORCH[f"patch.{case}.resized"], rtol=0, atol=1e-12)


@hypothesis.given(SIDES, SIDES, st.integers(0, 6), st.integers(0, 6))
def test_a_patch_made_larger_has_the_same_embedding(height, width, more_height, more_width):
    kernel, patch = random(height, width, 3, 2), random(height, width, 3)
    new_patch = (height + more_height, width + more_width)
    embedding = embed(resize(patch, new_patch), resize_patch_kernel(kernel, new_patch))
    np.testing.assert_allclose(embedding, embed(patch, kernel), atol=1e-11)


def test_a_half_precision_kernel_is_rounded_once_at_the_end():
    kernel = random(5, 3, 2, 7).astype(np.float16)
    for adapted, exact in [
        (resize_patch_kernel(kernel, (4, 6)), resize_patch_kernel(kernel.astype(np.float64), (4, 6))),
        (adapt_channels(kernel, 3, "mean"), adapt_channels(kernel.astype(np.float64), 3, "mean")),
        (adapt_channels(kernel, 3, "repeat"), adapt_channels(kernel.astype(np.float64), 3, "repeat")),
    ]:
        assert adapted.dtype == np.float16
        np.testing.assert_array_equal(adapted, exact.astype(np.float16))


@hypothesis.given(SIDES, SIDES, CHANNELS, CHANNELS)
def test_mean_keeps_the_embedding_of_a_grey_patch(height, width, channels, new_channels):
    kernel, gray = random(height, width, channels, 2), random(height, width, 1)
    adapted = adapt_channels(kernel, new_channels, "mean")
    assert adapted.shape == (height, width, new_channels, 2)
    before, after = embed(gray.repeat(channels, 2), kernel), embed(gray.repeat(new_channels, 2), adapted)
    np.testing.assert_allclose(after, before, atol=1e-12)
    if new_channels != channels:
        np.testing.assert_array_equal(adapted, adapted[:, :, :1].repeat(new_channels, 2))


@pytest.mark.parametrize(("channels", "taken"), [(1, [0]), (2, [0, 1]), (5, [0, 1, 2, 0, 1]), (7, [0, 1, 2] * 2 + [0])])
def test_repeat_cycles_through_the_channels_and_scales_as_timm_does(channels, taken):
    kernel = random(5, 4, 3, 2)
    np.testing.assert_array_equal(adapt_channels(kernel, channels, "repeat"), kernel[:, :, taken] * (3 / channels))


@pytest.mark.parametrize(("channels", "how", "words"), [(0, "mean", "at least 1, but is 0"), (1, "sum", "is 'sum'")])
def test_no_channels_and_an_unknown_rule_are_refused(channels, how, words):
    with pytest.raises(UserError, match=words):
        adapt_channels(random(5, 4, 3, 2), channels, how)
