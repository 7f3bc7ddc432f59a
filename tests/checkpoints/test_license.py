"""The license of a checkpoint, as its publisher states it."""

import json
import os

import pytest

from keras_vit.checkpoints.describe import license_of


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("augreg:B_16", "vision_transformer"),
        ("imagenet21k/ViT-B_16", "vision_transformer"),
        ("imagenet21k+imagenet2012/ViT-B_16", "vision_transformer"),
        ("gsam/ViT-B_16", "vision_transformer"),
        ("gs://vit_models/sam/ViT-B_16.npz", "vision_transformer"),
        ("https://storage.googleapis.com/vit_models/sam/ViT-B_16.npz", "vision_transformer"),
        ("bit:BiT-M-R50x1", "big_transfer"),
        ("big_vision:vit_s16_i1k_300ep", "big_vision"),
    ],
)
def test_official_checkpoints_have_the_license_of_their_repository(name, repository):
    assert license_of(name) == f"Apache-2.0 (github.com/google-research/{repository})"


def test_nothing_is_guessed_of_other_addresses_and_lone_files(tmp_path):
    assert license_of("https://example.com/vit_models/x.npz") is None
    (tmp_path / "ViT-B_16.npz").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"license": "mit"}')  # of something else
    assert license_of(tmp_path / "ViT-B_16.npz") is None


@pytest.mark.parametrize(
    "config",
    [{"license": "mit"}, {"pretrained_cfg": {"license": "mit"}}, {"settings": {}, "weights": {"license": "mit"}}],
    ids=["transformers", "timm", "a run"],
)
def test_a_folder_states_its_license_in_its_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert license_of(tmp_path) == license_of(str(tmp_path / "model.safetensors")) == "mit"


def test_a_folder_of_hugging_face_states_its_license_in_its_card(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert license_of(tmp_path) is None
    (tmp_path / "README.md").write_text("---\ntags:\n- vision\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")
    os.truncate(tmp_path / "README.md", 2**42)  # whose end is not read
    assert license_of(tmp_path) == "apache-2.0"
    (tmp_path / "README.md").write_text("# A model\nlicense: none\n")
    assert license_of(tmp_path) is None
