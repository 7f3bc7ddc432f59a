"""Checkpoints of the Hugging Face hub by name, through huggingface_hub: its cache, tokens and offline mode.

Only the weights as .safetensors and the configs are downloaded, never a pickle. Environment variables such as HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub.
"""

import contextlib
import functools
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from keras_vit.errors import UserError, needed_package
from keras_vit.files.safetensors import read_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TIMEOUT, _PAUSE = 4.0, 0.5  # seconds, for the answer of the hub, and before the second attempt
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
    folder = _weights(name, cache)
    # The commit, so that weights and configs belong together even if somebody pushes meanwhile.
    pinned = HubName(name.repository, folder.name)
    _file(pinned, "config.json", cache)
    # Repositories of transformers 5 have only the other one; those of timm have neither.
    if _file(pinned, "preprocessor_config.json", cache) is None and not name.repository.startswith("timm/"):
        _file(pinned, "processor_config.json", cache)
    return folder


def download_beside(name: HubName, folder: pathlib.Path, files: Sequence[str], instead: Sequence[str]) -> None:
    """Download further files of a repository into the cached folder of its weights, those that it has.

    Args:
        name: of the repository.
        folder: that `download` returned.
        files: their names.
        instead: names of files to download if the repository lacks the first of `files`.
    """
    pinned = HubName(name.repository, folder.name)
    cache = folder.parents[2]  # folder: CACHE/models--OWNER--NAME/snapshots/COMMIT
    found = [_file(pinned, file, cache) for file in files]
    for file in instead if found[0] is None else ():
        _file(pinned, file, cache)


def _weights(name: HubName, cache: pathlib.Path | None) -> pathlib.Path:
    weights = _file(name, _WEIGHTS, cache)
    if weights is not None:
        return weights.parent
    index = _file(name, _INDEX, cache)
    if index is None:
        raise UserError(
            f"{name.repository} on the Hugging Face hub has no {_WEIGHTS}, and pickles such as pytorch_model.bin are "
            "not read; convert it where you trust it, or give another repository."
        )
    pinned = HubName(name.repository, index.parent.name)
    shards = read_json(index).get("weight_map")
    for shard in sorted({str(file) for file in shards.values()} if isinstance(shards, dict) else ()):
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.safetensors", shard) or _file(pinned, shard, cache) is None:
            raise UserError(f"{_INDEX} of {name.repository} names {shard[:200]!r}, which is not a file of weights.")
    return index.parent


def _file(name: HubName, file: str, cache: pathlib.Path | None) -> pathlib.Path | None:
    """The cached path of a file; None if the repository does not have it."""
    hub = _huggingface_hub()
    with _one_sentence(name, hub):
        known = hub.try_to_load_from_cache(name.repository, file, cache_dir=cache, revision=name.revision)
        try:
            if not isinstance(known, str):
                _check_answers(hub, hub.constants.ENDPOINT)
            path = hub.hf_hub_download(name.repository, file, revision=name.revision, cache_dir=cache)
        except (hub.errors.LocalEntryNotFoundError, ConnectionError):
            # Without a network: either the cache knows that the repository has no such file, or nothing is known.
            if known is None or isinstance(known, str):
                raise
            return None
        except hub.errors.EntryNotFoundError:
            return None
    return pathlib.Path(path)


@functools.cache
def _check_answers(hub, endpoint: str) -> None:
    """Raise ConnectionError unless the hub answers anything at all; not asked again after an answer.

    hf_hub_download would repeat its first request for half a minute, or minutes, and print each attempt.
    """
    for pause in (_PAUSE, None):
        try:
            hub.utils.get_session().head(endpoint, timeout=_TIMEOUT)
            return
        except OSError:  # HF_HUB_OFFLINE is set
            raise
        except Exception as error:  # of httpx or httpx2, whichever this version of huggingface_hub uses
            if pause is None:
                raise ConnectionError(f"{endpoint} cannot be reached ({error})") from error
            time.sleep(pause)


@contextlib.contextmanager
def _one_sentence(name: HubName, hub) -> Iterator[None]:
    errors = hub.errors
    try:
        yield
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError too
        shown, endpoint = name.repository[:200], hub.constants.ENDPOINT
        is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        reason = "HF_HUB_OFFLINE is set" if is_offline else f"{endpoint} cannot be reached"
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


def _huggingface_hub() -> ModuleType:
    for part in ("errors", "utils"):
        needed_package(f"huggingface_hub.{part}", "Names of the Hugging Face hub need", "huggingface_hub")
    return sys.modules["huggingface_hub"]
