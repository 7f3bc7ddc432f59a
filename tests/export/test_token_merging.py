"""Merged tokens: the matching of the official code, exact where tokens are equal, refused where tokens keep a place."""

import dataclasses
import json

import keras
import numpy as np
import pytest

import keras_vit
from export.inference_model import inference_model
from export.source import random_images
from export.token_merging import MergeTokens, merging_rules
from keras_vit import UserError, ViTConfig
from keras_vit.errors import ParityError, refuse_first
from tests.exports import saved_model_of
from tests.support import TINY_STEM, others_slow, randomize

_WIDTH, _HEADS = 12, 3
_CONFIG = ViTConfig(patch_size=(4, 4), hidden_size=_WIDTH, num_layers=2, num_heads=_HEADS, mlp_dim=16)
_SIZE = (8, 16)  # 2 x 4 patches


def _build(**fields) -> keras.Model:
    return randomize(keras_vit.build(dataclasses.replace(_CONFIG, **fields), image_size=_SIZE, num_classes=5))


def _merged_by_loops(tokens, key, sizes, merged, prefix):
    """One image, as `bipartite_soft_matching` and `merge_wavg` do it: even tokens into odd ones, but for the prefix."""
    metric = key.reshape(len(key), _HEADS, -1).mean(axis=1)
    metric /= np.linalg.norm(metric, axis=-1, keepdims=True)
    even = [index for index in range(len(tokens)) if index % 2 == 0 and index >= prefix]
    odd = [index for index in range(len(tokens)) if index % 2 == 1 and index >= prefix]
    best = {index: max(odd, key=lambda other: metric[index] @ metric[other]) for index in even}
    order = sorted(even, key=lambda index: -(metric[index] @ metric[best[index]]))
    total, count = tokens * sizes, sizes.copy()
    for index in order[:merged]:
        total[best[index]] += tokens[index] * sizes[index]
        count[best[index]] += sizes[index]
    rest = [*range(prefix), *sorted(order[merged:]), *odd]
    return (total / count)[rest], count[rest]


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("merged", [1, 3])
def test_the_most_similar_pairs_of_patch_tokens_become_their_weighted_means(prefix, merged):
    rng = np.random.default_rng(prefix)
    tokens, key = rng.normal(size=(2, 2, prefix + 9, _WIDTH)).astype(np.float32)
    sizes = rng.integers(1, 4, (2, prefix + 9, 1)).astype(np.float32)
    found = MergeTokens(merged, prefix, _HEADS)(tokens, key, sizes)
    for image in range(2):
        expected = _merged_by_loops(tokens[image], key[image].copy(), sizes[image], merged, prefix)
        for part, values in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(part)[image], values, rtol=1e-5, atol=1e-6)


_FIELDS = (
    {}, {"classifier": "token+gap"}, {"classifier": "gap"}, {"classifier": "map"}, {"classifier": "sequence"},
    {"classifier": "gap", "norm_after_pooling": True}, {"distillation": "head"}, {"num_registers": 2},
)  # fmt: skip
_FORMS = [(fields, for_tensorflow) for fields in _FIELDS for for_tensorflow in (True, False)]


@pytest.mark.parametrize(("fields", "for_tensorflow"), others_slow(_FORMS, _FORMS[0], _FORMS[3]), ids=str)
def test_equal_tokens_are_merged_without_a_difference(fields, for_tensorflow):
    # Without positions, the patches of a row are equal tokens: four, then two, then one of the size 4.
    model = _build(position_embedding="none", **fields)
    rows = np.random.default_rng(0).uniform(-1, 1, (3, 2, 1, 4, 4, 3))
    images = np.broadcast_to(rows, (3, 2, 4, 4, 4, 3)).transpose(0, 1, 3, 2, 4, 5).reshape(3, *_SIZE, 3)
    images = images.astype(np.float32)
    merged = inference_model(model, for_tensorflow=for_tensorflow, merge_tokens=4)
    np.testing.assert_allclose(merged(images), model(images), rtol=1e-4, atol=1e-5)
    last = merged.get_layer("Transformer.encoderblock_0.merged").output[0].shape[1]
    assert last == model.get_layer("Transformer.encoderblock_0").output.shape[1] - 4


def test_half_of_the_patch_tokens_are_merged_at_most_and_none_where_the_class_token_alone_is_read():
    names = {layer.name for layer in inference_model(_build(), for_tensorflow=True, merge_tokens=1).layers}
    assert "Transformer.encoderblock_0.merged" in names
    assert "Transformer.encoderblock_1.merged" not in names
    merged = inference_model(_build(classifier="gap"), merge_tokens=100)
    assert merged.get_layer("Transformer.encoderblock_1").output.shape[1] == 2  # of 8, then of 4


@pytest.mark.parametrize(
    ("config", "merged", "reason"),
    [
        (dataclasses.replace(_CONFIG, position_embedding="relative"), 1, "relative positions"),
        (dataclasses.replace(_CONFIG, position_injection="shared"), 1, "before every block"),
        (dataclasses.replace(_CONFIG, axial=True, classifier="gap"), 1, "axial attention"),
        (dataclasses.replace(_CONFIG, locality_attention=True), 1, "locality self-attention"),
        (TINY_STEM, 1, "without tokens"),
        (_CONFIG, 33, "Of 64 patch tokens .* at most 32, but --merge-tokens is 33"),
    ],
)
def test_models_whose_tokens_keep_a_place_or_are_too_few_are_refused(config, merged, reason):
    with pytest.raises(UserError, match=reason):
        refuse_first(merging_rules(keras_vit.build(config, image_size=32, num_classes=3), merged))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_says_how_often_merged_tokens_give_the_same_class(tmp_path, dtype):
    model = _build(classifier="gap")
    labels, samples = tuple("abcde"), random_images(keras_vit.preprocessing_of(model))
    options = {"merge_tokens": 2, "dtype": dtype}
    path, found = saved_model_of(model, labels, samples, tmp_path, **options, max_disagreement=1.0)
    assert found["max_abs_diff"] > found["tolerance"]  # the tokens differ
    assert json.loads((path / "report.json").read_text())["merge_tokens"] == 2
    assert "2 patch tokens merged in each block" in (path / "README.md").read_text()
    if found["agreement"] < 15 / 16:
        with pytest.raises(ParityError, match="SavedModel with --merge-tokens 2 disagrees with the model"):
            saved_model_of(model, labels, samples, tmp_path, **options, max_disagreement=0.0)
