"""Find a checkpoint by path, address or official name, and download it once.

Buckets and file names: README of vision_transformer and of big_transfer, `models/vit.py` of big_vision; selection of
an AugReg file: `vit_jax/train.py`.
"""

import contextlib
import csv
import datetime
import errno
import hashlib
import io
import json
import math
import os
import pathlib
import re
import types
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_vit.errors import UserError, near_path, nearest, needed_package, reading
from keras_vit.files.atomic import write_text
from keras_vit.files.remote import RemoteError, is_remote, local_copy
from keras_vit.files.transfer import download_file, is_local, sha256_of

_LONGEST_NAME = 160  # characters; file systems allow 255 bytes, and a suffix follows
_LONGEST_PATH = 4096  # characters that are compared with what there is


def cache_folder() -> pathlib.Path:
    """Return the folder for what can be downloaded or computed again: KERAS_VIT_CACHE, else ~/.cache/keras_vit."""
    return pathlib.Path(os.environ.get("KERAS_VIT_CACHE") or "~/.cache/keras_vit").expanduser()


def find_checkpoint(name: str | os.PathLike, cache: str | os.PathLike | None = None) -> pathlib.Path:
    """The local path of a checkpoint; downloads it into `cache` if necessary.

    A download is kept only if it begins like a file of its type, not like an HTML page, and has the MD5 or SHA-256 that
    Google Cloud Storage or Hugging Face publishes of it. Other servers publish none. A cached file is used if its
    SHA-256 is that in the .json file beside it. Concurrent callers each download a complete file.

    Args:
        name: existing file or folder; https://…, gs://bucket/object or another path that TensorFlow can read; official
            name such as imagenet21k/ViT-B_16, sam/ViT-B_16, augreg:B_16, bit:BiT-M-R50x1 or
            big_vision:vit_s16_i1k_300ep; hf:google/vit-base-patch16-224-in21k, with @ and a revision or without, or
            timm/vit_base_patch16_224.augreg_in21k, from the Hugging Face hub; or
            kaggle:keras/vit/keras/vit_base_patch16_224_imagenet, from Kaggle.
        cache: folder for downloads; default: the environment variable KERAS_VIT_CACHE, else ~/.cache/keras_vit; from
            the Hugging Face hub, the cache of huggingface_hub.

    Raises:
        UserError: for an unknown name, and if a download fails; the message has the path to put the file manually.
    """
    if os.path.exists(name):  # first, so that a local path never needs a network
        path = pathlib.Path(name)
        is_part = path.name.endswith(".index.json") or re.search(r"-\d{5}-of-\d{5}\.safetensors$", path.name)
        return path.parent if is_part else path
    # pathlib.Path replaces the two slashes of an address by one.
    source = re.sub(r"^(gs|https?):/(?=[^/])", r"\1://", os.fsdecode(name))
    if (hub_name := parse_hub_name(re.sub("^hf:/+", "hf:", source))) is not None:
        return _download(hub_name, pathlib.Path(cache) if cache else None)
    if (handle := parse_kaggle_name(source)) is not None:
        return _download_from_kaggle(handle)
    folder = pathlib.Path(cache).expanduser() if cache else cache_folder()
    if is_remote(source) and not source.startswith(("gs://", "https://", "http://")):
        try:
            return local_copy(source)
        except RemoteError as error:
            if error.errno != errno.ENOSYS:  # else the scheme is not known, as is said below
                raise
    try:
        return _fetch(_address(source, folder), folder)
    except UserError as error:
        if not (source.startswith("gs://") and str(error.__cause__)[:3] in ("401", "403")):
            raise
    return local_copy(source)  # with the credentials of this machine


def check_name(name: str) -> None:
    """Raise UserError unless a checkpoint exists, or can be one to download. Uses neither TensorFlow nor a network."""
    is_augreg = name.removeprefix("augreg:") in _AUGREG_MODELS  # else its index would be downloaded
    is_on_hub = parse_hub_name(name) or parse_kaggle_name(name)
    if not (os.path.exists(name) or is_remote(name) or is_on_hub or is_augreg):
        _address(name, pathlib.Path())


# Official names


def _named(prefix: str, location: str, files: Iterable[str]) -> dict[str, str]:
    return {f"{prefix}{file}": f"gs://{location}/{file}.npz" for file in files}


_BIT_SIZES = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
# fmt: off
_VTAB_TASKS = (
    "caltech101", "cifar100", "clevr-count", "clevr-distance", "diabetic_retinopathy", "dmlab",
    "dsprites-orientation", "dsprites-xpos", "dtd", "eurosat", "kitti-distance", "oxford_flowers102",
    "oxford_iiit_pet", "patch_camelyon", "resisc45", "smallnorb-azimuth", "smallnorb-elevation", "sun397", "svhn",
)
# fmt: on
_BIT_FILES = (
    *(f"BiT-{data}-{size}" for data in "SM" for size in _BIT_SIZES),
    *(f"BiT-M-{size}-ILSVRC2012" for size in _BIT_SIZES),
    *(
        f"vtab/BiT-M-{size}-run{run}-{task}"
        for size in ("R50x1", "R101x1", "R50x3", "R101x3", "R152x4")
        for run in range(3)
        for task in _VTAB_TASKS
    ),
    *("distill/R50x1_224", "distill/R50x1_160", "distill/R152x2_T_224", "distill/R152x2_T_384"),
)
_VIT_FILES = {
    "imagenet21k": "ViT-B_8 ViT-B_16 ViT-B_32 ViT-L_16 ViT-L_32 ViT-H_14 R26+ViT-B_32 R50+ViT-B_16 R50+ViT-L_32",
    "imagenet21k+imagenet2012": "ViT-B_8 ViT-B_16 ViT-B_16-224 ViT-B_32 ViT-L_16 ViT-L_16-224 ViT-L_32 R50+ViT-B_16",
    "sam": "ViT-S_16 ViT-B_16 ViT-B_32 ViT-L_16 ViT-L_32",
    "gsam": "ViT-S_16 ViT-S_32 ViT-B_16 ViT-B_32",
}
_ADDRESSES: Mapping[str, str] = types.MappingProxyType(
    {
        name: address
        for folder, files in _VIT_FILES.items()
        for name, address in _named(f"{folder}/", f"vit_models/{folder}", files.split()).items()
    }
    | _named("bit:", "bit_models", _BIT_FILES)
    | _named("big_vision:", "big_vision", (f"vit_s16_i1k_{epochs}ep" for epochs in (90, 150, 300)))
)

_AUGREG = "gs://vit_models/augreg"
_AUGREG_MODELS = ("Ti_16", "S_16", "S_32", "B_8", "B_16", "B_32", "L_16", "R_Ti_16", "R26_S_32", "R50_L_32")
_AUGREG_FILE = (
    rf"({'|'.join(_AUGREG_MODELS)})-i(1|21)k-\d+ep-lr_[\d.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(--[\w-]+-steps_\d+k-lr_[\d.]+-res_\d+)?"  # fine-tuned
)


# timm's names, such as vit_tiny_patch16_224.augreg_in21k_ft_in1k.
_TIMM_NAME = r"[a-z0-9]+_[a-z0-9_]*(patch\d+|r\d+|\d{3})[a-z0-9_]*(\.[a-z0-9_]+)?"
_AUGREG_NAMES = tuple(f"augreg:{model}" for model in _AUGREG_MODELS)


def official_names() -> tuple[str, ...]:
    """The official names of checkpoints, without the 285 that BiT's authors fine-tuned for VTAB."""
    return tuple(name for name in (*_ADDRESSES, *_AUGREG_NAMES) if not name.startswith("bit:vtab/"))


def _address(source: str, cache: pathlib.Path) -> str:
    """The address of an address or official name; for an AugReg model, its index is downloaded."""
    if "://" in source:
        return _web_address(source)
    name = source.removesuffix(".npz")
    if name in _ADDRESSES:
        return _web_address(_ADDRESSES[name])
    family, _, file = name.partition(":")
    if family == "augreg" and file in _AUGREG_MODELS:
        index = _fetch(_web_address(f"{_AUGREG}/index.csv"), cache)
        return _web_address(f"{_AUGREG}/{best_upstream(index.read_text('utf-8', 'replace'), file)}.npz")
    if family == "augreg" and re.fullmatch(_AUGREG_FILE, file, re.ASCII):
        return _web_address(f"{_AUGREG}/{file}.npz")
    known = [*_ADDRESSES, *_AUGREG_NAMES]
    bare = [official for official in known if name == re.split("[/:]", official)[-1]]  # given without folder
    begin = (*(f"{folder}/" for folder in _VIT_FILES), "augreg:", "bit:", "big_vision:")
    folder, _, last = source.rpartition("/")
    is_like_official = "/" not in folder and any(last == re.split("[/:]", official)[-1] for official in known)
    if "/" in source and not is_like_official and not source.startswith(begin):
        raise _no_path(source)
    close = bare or [nearest(source, known)]
    if re.fullmatch(_TIMM_NAME, source, re.ASCII):
        close = [f"timm/{source}"]
    raise UserError(
        f"There is no file, folder or official checkpoint {source[:200]!r}; give an existing path, an https:// or "
        f"gs:// address, the full name of an AugReg file after augreg:, or an official name like {', '.join(close)}."
    )


def _no_path(path: str) -> UserError:
    """The error of a path that does not exist, with what is called most like it in the same folder."""
    if close := near_path(path[:_LONGEST_PATH]):
        return UserError(f"There is no file or folder {path[:200]!r}{close}")
    folder, advice = os.path.dirname(path.rstrip("/")[:_LONGEST_PATH]), "check the path"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path, re.ASCII) and not os.path.isdir(folder):
        advice = f"check the path, or give hf:{path[:200]} for a model of the Hugging Face hub"
    return UserError(f"There is no file or folder {path[:200]!r}; {advice}.")


def best_upstream(index: str, model: str) -> str:
    """Return the ImageNet-21k file of a model with the first largest final_val in AugReg's index.csv."""
    with reading("AugReg's index.csv", "CSV", csv.Error, KeyError, advice="delete it to download it anew"):
        rows = csv.DictReader(io.StringIO(index, newline=""))
        of_model = [row for row in rows if (row["filename"] or "").split("-")[0] == model and row["ds"] == "i21k"]
        measured = [(accuracy, row["filename"]) for row in of_model if (accuracy := _number(row["final_val"])) >= 0]
    if not measured:
        raise UserError(f"AugReg's index.csv has no i21k file of {model!r} with a final_val; give a full file name.")
    return max(measured, key=lambda each: each[0])[1]


def _number(text: str | None) -> float:
    with contextlib.suppress(ValueError):
        return float(text or "nan")
    return math.nan


# Addresses and cache paths


def _web_address(source: str) -> str:
    """The ASCII address to download for an https:// or gs:// address. Raises UserError for any other."""
    address = source
    if re.match("gs://[^/]+/", source):
        address = f"https://storage.googleapis.com/{urllib.parse.quote(source[5:], safe='/', errors='replace')}"
    with contextlib.suppress(ValueError):  # from urlsplit, for brackets without an IPv6 address
        parts = urllib.parse.urlsplit(address)
        folders = urllib.parse.unquote(parts.path).split("/")
        safe = (parts.scheme == "https" and parts.hostname) or is_local(address)
        if safe and source.isprintable() and "@" not in parts.netloc and not {".", ".."} & {*folders} and folders[-1]:
            return urllib.parse.quote(urllib.parse.urldefrag(address).url, safe="!$%&'()*+,/:;=?@[]~")
    raise UserError(
        f"An address must be https://host/…/file or gs://bucket/…/file, without a user or '..' in it, but is "
        f"{source[:200]!r}; correct it, or download the file yourself and give its path."
    )


def _cache_path(address: str, cache: pathlib.Path) -> pathlib.Path:
    """The cache path of an address: a folder named by a hash, and in it the file name."""
    name = urllib.parse.unquote(urllib.parse.urlsplit(address).path.split("/")[-1])
    name = re.sub(r"[^A-Za-z0-9._+=-]", "_", name).lstrip(".") or "file"
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 20] + name[-20:]
    return cache / hashlib.sha256(address.encode()).hexdigest()[:20] / name


def _fetch(address: str, cache: pathlib.Path) -> pathlib.Path:
    """The cached file of an address; downloaded if it is missing. A .json file beside it has its size and hash."""
    path = _cache_path(address, cache)
    metadata_file = path.with_name(f"{path.name}.json")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata_file.unlink(missing_ok=True)  # of a deleted file
        sha256 = download_file(address, path)
        _write_metadata(metadata_file, address, path.stat().st_size, sha256, downloaded=True)
        return path
    if (metadata := _read_metadata(metadata_file)) is None:  # of a file that the user put there
        _write_metadata(metadata_file, address, path.stat().st_size, sha256_of(path), downloaded=False)
        return path
    if (sha256 := sha256_of(path)) != metadata["sha256"]:
        raise UserError(
            f"{path} should have the SHA-256 {metadata['sha256']}, but has {sha256}; delete it to download it again, "
            f"or delete {metadata_file.name} to use it as it is."
        )
    return path


def _read_metadata(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        metadata = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) and "sha256" in metadata else None


def _write_metadata(metadata_file: pathlib.Path, address: str, size: int, sha256: str, *, downloaded: bool) -> None:
    metadata = {
        "address": address.partition("?")[0],  # the query may contain a key
        "downloaded": downloaded,
        "size": size,
        "sha256": sha256,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    write_text(metadata_file, json.dumps(metadata, indent=2) + "\n")


# The Hugging Face hub, through huggingface_hub: its cache, tokens, offline mode and environment variables. Only the
# weights as .safetensors, or .weights.h5 of Keras, and the configs are downloaded, never a pickle. Presets of keras-hub
# are also on Kaggle, whose names kagglehub downloads, with its cache and credentials.

_WEIGHTS, _INDEX, _OF_KERAS = "model.safetensors", "model.safetensors.index.json", "model.weights.h5"
_FILES = (
    _WEIGHTS,
    _INDEX,
    "model-*-of-*.safetensors",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    *(_OF_KERAS, "task.json", "task.weights.h5", "image_converter.json", "preprocessor.json"),  # keras-hub
    *("zm_config.json", "zm_preprocessor.json"),  # kmodels
)
_OF_TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "spiece.model"]
_OF_TOKENIZER += ["assets/tokenizer/*"]  # of keras-hub
# kaggle:owner/model/framework/variation, and a version.
_KAGGLE_NAME = re.compile(r"kaggle:/{0,2}(?P<handle>[\w.-]+(?:/[\w.-]+){3}(?:/\d+)?)", re.ASCII)
# hf:owner/name@revision, timm/name, and the address of the file of weights.
_HUB_NAME = re.compile(r"(?:hf:|(?=timm/))(?P<repository>[^/@:]+/[^/@:]+)(?:@(?P<revision>[^@\s]+))?")
_HUB_ADDRESS = re.compile(
    r"https://huggingface\.co/(?P<repository>[^/@:]+/[^/@:]+)/(?:resolve|blob)/(?P<revision>[^/@?#]+)/model\.safetensors"
)


class HubName(NamedTuple):
    """A repository of the hub and a branch, tag or commit of it; None is its main branch."""

    repository: str
    revision: str | None


def parse_hub_name(name: str) -> HubName | None:
    """The repository that a checkpoint name means, such as hf:google/vit-base-patch16-224@main; None if it is another.

    Raises UserError for a name that begins with hf: and names no repository.
    """
    match = _HUB_NAME.fullmatch(name) or _HUB_ADDRESS.fullmatch(name)
    _check_form(match, name, "hf:", "owner/name or hf:owner/name@revision")
    return HubName(match["repository"], match["revision"]) if match else None


def _check_form(match: re.Match | None, name: str, prefix: str, form: str) -> None:
    if match is None and name.startswith(prefix):
        raise UserError(f"A name that begins with {prefix} must be {prefix}{form}, but is {name[:200]!r}.")


def _download(name: HubName, cache: pathlib.Path | None = None) -> pathlib.Path:
    """Return the folder with weights and configs of a repository. cache: instead of that of huggingface_hub."""
    folder = _snapshot(name, _FILES, cache)
    if not any((folder / file).is_file() for file in (_WEIGHTS, _INDEX, _OF_KERAS)):
        raise UserError(
            f"{name.repository} on the Hugging Face hub has no {_WEIGHTS}, and pickles such as pytorch_model.bin are "
            "not read; convert it where you trust it, or give another repository."
        )
    return folder


def parse_kaggle_name(name: str) -> str | None:
    """The handle of a model on Kaggle that a checkpoint name means; None if it is another. Raises UserError."""
    match = _KAGGLE_NAME.fullmatch(name)
    form = "owner/model/framework/variation, such as kaggle:keras/vit/keras/vit_base_patch16_224_imagenet"
    _check_form(match, name, "kaggle:", form)
    return match["handle"] if match else None


def _download_from_kaggle(handle: str) -> pathlib.Path:
    kagglehub = needed_package("kagglehub", "Names on Kaggle need", "kagglehub")
    try:
        return pathlib.Path(kagglehub.model_download(handle))
    except (OSError, ValueError) as error:  # those of the network are OSError, too
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{handle} cannot be downloaded from Kaggle ({words}); check the name and its terms, or download it on "
            "another computer and give the path of its folder."
        ) from error


def download_tokenizer(name: HubName, folder: pathlib.Path) -> None:
    """Download the files of the tokenizer into the cached folder that `find_checkpoint` returned."""
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
