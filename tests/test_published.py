"""The list of models: every one has its numbers, and every official checkpoint belongs to one."""

import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.checkpoints.find import official_names, parse_hub_name
from keras_vit.models.complexity import costs
from keras_vit.published import find_models, upstream_checkpoint
from tests.models.test_models import COUNTS
from tests.support import others_slow


def test_a_wildcard_fits_in_any_case():
    assert keras_vit.list_models("vit*_16") == [
        "ViT-Ti_16", "ViT-S_16", "ViT-M_16", "ViT-B_16", "ViT-L_16"
    ]  # fmt: skip
    assert keras_vit.list_models("vit*_16", pretrained=True) == ["ViT-Ti_16", "ViT-S_16", "ViT-B_16", "ViT-L_16"]
    assert keras_vit.list_models("nothing") == []
    assert keras_vit.list_models() == list(keras_vit.MODELS)


def test_every_model_has_its_parameters_and_a_family_of_its_own():
    found = {model.name: model for model in find_models()}
    assert found.keys() == keras_vit.MODELS.keys()
    assert found["ViT-B_16"].millions == pytest.approx(86.6, abs=0.1)


@pytest.mark.parametrize("name", ["testing", *others_slow(["ViT-Ti_16", "BiT-R50x1", "DeiT3-S_16"])])
def test_the_multiply_adds_are_those_of_the_built_models(name):
    (model,) = (each for each in find_models() if each.name == name)
    counted = costs(keras_vit.MODELS[name], (model.pixels, model.pixels)).multiply_adds / 1e9
    assert model.gmacs == pytest.approx(counted, abs=0.051)


def test_every_official_checkpoint_belongs_to_one_model():
    listed = [checkpoint for model in find_models() for checkpoint in model.checkpoints]
    assert len(listed) == len(set(listed))
    assert {name for name in listed if parse_hub_name(name) is None} == set(official_names())


def test_the_parameters_are_those_of_the_built_models():
    models = {model.name: model for model in find_models()}
    for name, (_, _, parameters) in COUNTS.items():
        assert models[name].millions == pytest.approx(parameters / 1e6, abs=0.051), name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("ViT-B_16", "imagenet21k/ViT-B_16"),
        ("R50+ViT-B_16", "imagenet21k/R50+ViT-B_16"),
        ("ViT-S_16", "augreg:S_16"),
        ("R+ViT-Ti_16", "augreg:R_Ti_16"),
        ("BiT-R50x1", "bit:BiT-M-R50x1"),
    ],
)
def test_an_official_model_stands_for_its_checkpoint_of_imagenet_21k(model, name):
    assert upstream_checkpoint(model) == name


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("ViT-M_16", "'ViT-M_16' has no published ImageNet-21k checkpoint; the nearest models that have one are ViT-"),
        ("BiT-R26x1", "the nearest models that have one are BiT-R50x1, BiT-R101x1"),
        ("MAE-B_16", "; give --checkpoint hf:facebook/vit-mae-base, or another model: the nearest models that have"),
    ],
)
def test_a_model_without_a_checkpoint_of_imagenet_21k_names_those_near_it_that_have_one(model, words):
    with pytest.raises(UserError) as refused:
        upstream_checkpoint(model)
    assert words in str(refused.value)
