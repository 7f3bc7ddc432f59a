"""Checkpoints of the Hugging Face hub by name, through huggingface_hub: its cache, tokens and offline mode.

Only the weights as .safetensors, or .weights.h5 of Keras, and the configs are downloaded, never a pickle. Presets of
keras-hub are also on Kaggle, whose names kagglehub downloads, with its cache and credentials. Environment variables
such as HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub.
"""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from keras_vit.errors import UserError, needed_package

_WEIGHTS, _INDEX, _OF_KERAS = "model.safetensors", "model.safetensors.index.json", "model.weights.h5"
_FILES = (
    _WEIGHTS,
    _INDEX,
    "model-*-of-*.safetensors",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    *(_OF_KERAS, "task.json", "task.weights.h5", "image_converter.json", "preprocessor.json"),
)
_OF_TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "spiece.model"]
_OF_TOKENIZER += ["assets/tokenizer/*"]  # of keras-hub
# kaggle:owner/model/framework/variation, and a version.
_KAGGLE = re.compile(r"kaggle:/{0,2}(?P<handle>[\w.-]+(?:/[\w.-]+){3}(?:/\d+)?)", re.ASCII)
# hf:owner/name@revision, timm/name, and the address of the file of weights.
_NAME = re.compile(r"(?:hf:|(?=timm/))(?P<repository>[^/@:]+/[^/@:]+)(?:@(?P<revision>[^@\s]+))?")
_ADDRESS = re.compile(
    r"https://huggingface\.co/(?P<repository>[^/@:]+/[^/@:]+)/(?:resolve|blob)/(?P<revision>[^/@?#]+)/model\.safetensors"
)


class HubName(NamedTuple):
    """A repository of the hub and a branch, tag or commit of it; None is its main branch."""

    repository: str
    revision: str | None


def parse_name(name: str) -> HubName | None:
    """The repository that a checkpoint name means, such as hf:google/vit-base-patch16-224@main; None if it is another.

    Raises UserError for a name that begins with hf: and names no repository.
    """
    match = _NAME.fullmatch(name) or _ADDRESS.fullmatch(name)
    if match is None and name.startswith("hf:"):
        raise UserError(
            f"A name on the Hugging Face hub must be hf:owner/name or hf:owner/name@revision, but is {name[:200]!r}."
        )
    return HubName(match["repository"], match["revision"]) if match else None


def download(name: HubName, cache: pathlib.Path | None = None) -> pathlib.Path:
    """The folder with weights and configs of a repository, downloaded if it is not in the cache of huggingface_hub.

    Args:
        name: of the repository.
        cache: folder instead of that of huggingface_hub.

    Raises:
        UserError: if there is no such repository or revision, its terms are not accepted, it has no .safetensors
            weights, or the hub cannot be reached and the files are not in the cache.
    """
    folder = _snapshot(name, _FILES, cache)
    if not any((folder / file).is_file() for file in (_WEIGHTS, _INDEX, _OF_KERAS)):
        raise UserError(
            f"{name.repository} on the Hugging Face hub has no {_WEIGHTS}, and pickles such as pytorch_model.bin are "
            "not read; convert it where you trust it, or give another repository."
        )
    return folder


def parse_kaggle(name: str) -> str | None:
    """The handle of a model that a name beginning with kaggle: means; None if it is another name. Raises UserError."""
    match = _KAGGLE.fullmatch(name)
    if match is None and name.startswith("kaggle:"):
        raise UserError(
            "A name on Kaggle must be kaggle:owner/model/framework/variation, such as "
            f"kaggle:keras/vit/keras/vit_base_patch16_224_imagenet, but is {name[:200]!r}."
        )
    return match["handle"] if match else None


def download_kaggle(handle: str) -> pathlib.Path:
    """The folder of a model on Kaggle, downloaded if it is not in the cache of kagglehub. Raises UserError."""
    kagglehub = needed_package("kagglehub", "Names on Kaggle need", "kagglehub")
    try:
        return pathlib.Path(kagglehub.model_download(handle))
    except (OSError, ValueError) as error:  # whose errors of the network are OSError
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{handle} cannot be downloaded from Kaggle ({words}); check the name and its terms, or download it on "
            "another computer and give the path of its folder."
        ) from error


def download_tokenizer(name: HubName, folder: pathlib.Path) -> None:
    """Download the files of the tokenizer into the cached folder that `download` returned."""
    # folder: CACHE/models--OWNER--NAME/snapshots/COMMIT
    _snapshot(HubName(name.repository, folder.name), _OF_TOKENIZER, folder.parents[2])


def _snapshot(name: HubName, files: Sequence[str], cache: pathlib.Path | None) -> pathlib.Path:
    errors = needed_package("huggingface_hub.errors", "Names of the Hugging Face hub need", "huggingface_hub")
    from huggingface_hub import constants, snapshot_download  # lazy: not everybody has it

    try:
        folder = snapshot_download(name.repository, revision=name.revision, cache_dir=cache, allow_patterns=[*files])
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError, too
        shown, endpoint = name.repository[:200], constants.ENDPOINT
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{endpoint} cannot be reached"
        sentences = {
            errors.GatedRepoError: f"{shown} is gated: accept its terms at {endpoint}/{shown}, and give your token by "
            "`hf auth login` or HF_TOKEN.",
            errors.RepositoryNotFoundError: f"The Hugging Face hub has no repository {shown!r} that you may read; "
            "check the name, or give a token by `hf auth login` or HF_TOKEN if it is private.",
            errors.RevisionNotFoundError: f"{shown} has no branch, tag or commit {name.revision!r}; leave out @ for "
            "its main.",
            errors.HFValidationError: f"{shown!r} cannot be the name of a repository of the Hugging Face hub; check "
            "it.",
            Exception: f"{shown} is not complete in the cache of huggingface_hub, and {reason}; download it on another "
            "computer and give the path of its folder.",
        }
        raise UserError(next(text for kind, text in sentences.items() if isinstance(error, kind))) from error
    return pathlib.Path(os.fspath(folder))
