"""Extract features: what a model says of images before its head, written file by file; a killed process continues."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, task_of
from keras_vit.cli.progress import Progress
from keras_vit.cli.start import as_typed, native_stderr_silenced
from keras_vit.files.atomic import locked, remove_temporary
from keras_vit.files.remote import is_remote
from keras_vit.models.config import identifying_fields
from keras_vit.models.layers import PoolTokens
from keras_vit.run import Run
from keras_vit.text.checkpoint import has_text_tower
from training.data.dataset import (
    DataSet,
    ImageWarnings,
    Split,
    bad_examples_reported,
    check_some_read,
    typical_image,
    without_autograph,
)
from training.data.file_contents import FileContents, shown
from training.data.image_folder import file_problem
from training.data.pipeline import evaluation_batches
from training.features.store import (
    NO_SPLIT,
    PART,
    FeatureDescription,
    FeatureIndex,
    Part,
    check_same_model,
    part_file,
    read_description,
    write_description,
    write_part,
)
from training.options.features import DESCRIPTION, EmbedOptions, IndexKind

# The classifier of a model whose head reads the features of a kind.
POOLING = {"token": "token", "mean": "gap", "both": "token+gap"}
_EARLIER = "earlier"  # folder of files of an earlier list of images, until those of the next one are written
_MOST_NAMED = 10  # images that cannot be read of which the reasons are printed
_DROPS_ALPHA = (
    "Most of these images are transparent, and the preprocessing of this checkpoint drops the alpha channel: what is "
    "transparent is often black then. --resize pad puts such images on white."
)


@dataclasses.dataclass(frozen=True)
class Extractor:
    """Makes the features of images; `open_extractor` opens one."""

    model: keras.Model
    """Images (B, h, w, C) -> (B, D)."""
    preprocessing: Preprocessing
    features: IndexKind
    fingerprint: str
    """A hash of weights, architecture, precision, features, and what is done to the images."""
    batch_size: int

    def describe(
        self, name: str, labels: tuple[str, ...], splits: dict[str, int], checksum: int, dtype: str = "float32"
    ) -> FeatureDescription:
        """Return the description of features of these images; for arguments see `FeatureDescription`."""
        width = int(self.model.output_shape[-1])
        return FeatureDescription(name, self.fingerprint, self.features, width, dtype, labels, splits, checksum)


def open_extractor(
    model: keras.Model, preprocessing: Preprocessing, features: IndexKind = "pre_logits", batch_size: int = 64
) -> Extractor:
    """Return the extractor of a kind of features. Raises UserError for a model that does not have them."""
    fingerprint = fingerprint_of(model, preprocessing, features)
    return Extractor(feature_model(model, features), preprocessing, features, fingerprint, batch_size)


def feature_model(model: keras.Model, features: IndexKind | Literal["patches"] = "pre_logits") -> keras.Model:
    """Return the model up to its features: images -> (B, D).

    Args:
        model: built by keras_vit.
        features: pre_logits: what its head reads; joint: what texts are compared with, the output of an image tower; of
            a Vision Transformer, token: the class token; mean: the mean of its patch tokens; both; patches: each patch
            token, (B, N, D).

    Raises UserError for a model that does not have them.
    """
    if features == "joint":
        result = None if task_of(model) else model
    elif features == "pre_logits":
        inside = keras_vit.intermediates(model, ["pre_logits"])
        result = keras.Model(inside.input, inside.output["pre_logits"])
    else:
        result = _token_model(model, features)
    if result is None or len(result.output_shape) != (3 if features == "patches" else 2):
        raise UserError(
            f"This model has no features {features}: joint is for CLIP and SigLIP, and token, mean, both and the "
            "patches of --attentive are for Vision Transformers with such tokens; give others, or another model."
        )
    return result


def _token_model(model: keras.Model, features: IndexKind | Literal["patches"]) -> keras.Model | None:
    """Return the model up to its normalized tokens, pooled but for "patches"; None if it has no such tokens."""
    config = keras_vit.config_of(model)
    if not isinstance(config, ViTConfig) or config.norm_after_pooling:
        return None
    if features in ("token", "both") and not config.has_class_token:
        return None
    inside = keras_vit.intermediates(model, ["encoded"])
    tokens, prefix = inside.output["encoded"], config.num_prefix_tokens
    pooled = tokens[:, prefix:] if features == "patches" else PoolTokens(POOLING[features], prefix)(tokens)
    return keras.Model(inside.input, pooled)


def fingerprint_of(model: keras.Model, preprocessing: Preprocessing, features: IndexKind) -> str:
    """Return a hash of the weights, the architecture, the precision, the features, and what is done to the images."""
    described = [
        identifying_fields(dataclasses.asdict(keras_vit.config_of(model))),
        type(preprocessing).__name__,
        dataclasses.asdict(preprocessing),
        sorted({layer.dtype_policy.name for layer in model.layers}),
        features,
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for weight in model.weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()[:20]


@dataclasses.dataclass(frozen=True)
class Listing:
    """Images in the order in which they are stored."""

    labels: tuple[str, ...]
    splits: dict[str, Split]
    checksum: int
    """The same for the same images."""
    files: Sequence[str] | None = None
    """Single files, which may be no images; None for the examples of a data set, which can be read."""


def listing_of_data(source: DataSet) -> Listing:
    """List both splits of a data set."""
    return Listing(source.labels, {"train": source.train, "test": source.evaluation}, source.fingerprint)


def listing_of_files(files: Sequence[str]) -> Listing:
    """List single files, without classes."""
    paths = tf.constant([os.fsencode(file) for file in files])

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.read_file(paths[index]), tf.constant(-1)

    split = Split(len(files), read, lambda index: shown(files[index]))
    return Listing((), {NO_SPLIT: split}, zlib.crc32(b"\0".join(map(os.fsencode, files))), files)


def embed(run: Run, listing: Listing, options: EmbedOptions) -> FeatureIndex:
    """Write the features of all images into a folder, or what is missing there; print what cannot be read.

    Images of which the folder has features keep them, where others were added or removed. Raises UserError for a folder
    with features of another model, or of images most of which are no longer there.
    """
    splits = {name: split.num_examples for name, split in listing.splits.items()}
    description, extractor = describe_features(run, options, listing.labels, splits, listing.checksum)
    folder = options.folder
    if extractor.preprocessing.background is None and listing.files is None:
        split = next(iter(listing.splits.values()))
        with bad_examples_reported(split):
            if typical_image(split)[2]:
                print(_DROPS_ALPHA)
    with locked(folder):
        remove_temporary(folder)
        index = write_features(folder, description, listing, extractor)
    for path, why in [*index.problems.items()][:_MOST_NAMED]:
        print(f"Not embedded: {path}: {why}")
    if len(index.problems) > _MOST_NAMED:
        print(f"… and {len(index.problems) - _MOST_NAMED} more.")
    count = sum(index.counts.values())
    check_some_read(count)
    kind = f"{description.features}, {description.dtype}"
    print(f"{options.output} has {description.width} features ({kind}) of {count:,} images.")
    return index


def describe_features(
    run: Run, options: EmbedOptions, labels: tuple[str, ...], splits: dict[str, int], checksum: int
) -> tuple[FeatureDescription, Extractor]:
    """Return the description of the features to write, and their extractor; for arguments see `FeatureDescription`."""
    has_texts = not run.is_ours and has_text_tower(run.checkpoint)
    own = run.preprocessing
    preprocessing = own if options.resize is None else own.with_resize(options.resize, None)
    features = options.features or ("joint" if has_texts else "pre_logits")
    extractor = open_extractor(run.model, preprocessing, features, options.batch_size)
    description = extractor.describe(run.name, labels, splits, checksum, options.dtype)
    data = options.source.settings() if options.source.data else None
    return dataclasses.replace(description, data=data, settings=options.settings), extractor


def start_folder(folder: pathlib.Path, description: FeatureDescription, listing: Listing | None = None) -> None:
    """Make a folder ready for features. Raises UserError for one that holds the features of something else.

    listing: of the images, if what the folder has of them is to be kept; see `_set_aside`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / DESCRIPTION).is_file():
        there = read_description(folder)
        index = FeatureIndex(folder, there)
        check_same_model(index, description.fingerprint, description.features, description.model)
        if there.dtype != description.dtype:
            what = f"the type {there.dtype}, not {description.dtype}"
        elif all(getattr(there, name) == getattr(description, name) for name in ("splits", "checksum", "labels")):
            return
        elif listing is not None and _set_aside(index, listing):
            write_description(folder, description)
            return
        else:
            what = "other images"
    elif others := sorted(file.name for file in folder.glob("*.parquet")):
        what = f"something else, such as {others[0]}, but no {DESCRIPTION}"
    else:
        write_description(folder, description)
        return
    raise UserError(f"{folder} has features of {what}; choose another --output.")


def _set_aside(index: FeatureIndex, listing: Listing) -> bool:
    """Move the files of an index aside, unless most of its images are not in the listing; return whether."""
    files = [file for file in index.files() if file.is_file()]
    paths = [path for file in files for path in index.paths(file)]
    listed = {split.name(row) for split in listing.splits.values() for row in range(split.num_examples)}
    if is_remote(index.folder) or 2 * sum(path in listed for path in paths) < len(paths):
        return False
    (index.folder / _EARLIER).mkdir(exist_ok=True)
    for file in files:
        file.replace(index.folder / _EARLIER / f"{index.description.checksum:08x}-{file.name}")
    return True


def write_features(
    folder: pathlib.Path, description: FeatureDescription, listing: Listing, extractor: Extractor
) -> FeatureIndex:
    """Write the files of features that are not there yet, and those of images whose content has changed since.

    What earlier files have of an image, known by its content, is not computed again.
    """
    start_folder(folder, description, listing)
    index, changed = FeatureIndex(folder, description), list[str]()
    missing, replaced = [], sorted((folder / _EARLIER).glob("*.parquet"))
    for name, count in description.splits.items():
        for number in range(-(-count // PART)):
            file = part_file(folder, name, number)
            is_there = file.is_file()
            others = _changed(index, listing, name, number) if is_there and listing.files is not None else []
            missing += [] if is_there and not others else [(name, number)]
            replaced += [file] if others else []
            changed += others
    if changed:
        print(f"Changed after their features were computed: {len(changed):,} images, such as {shown(changed[0])}.")
    total = sum(description.splits.values())
    left = sum(len(_rows(listing.splits[name], number)) for name, number in missing)
    known = index.by_digest(replaced)
    with Progress("Features", total, done=total - left) as progress:
        for name, number in missing:
            part = embed_rows(listing, name, _rows(listing.splits[name], number), extractor, progress, known)
            write_part(folder, description, name, number, as_stored(part, description))
    if not is_remote(folder):
        shutil.rmtree(folder / _EARLIER, ignore_errors=True)
    return index


def _changed(index: FeatureIndex, listing: Listing, name: str, number: int) -> list[str]:
    """Return the files whose content is not that of a written part; all are read, since a copy may keep its time."""
    assert listing.files is not None
    digests, problems = index.contents(name, number)
    files = [listing.files[row] for row in _rows(listing.splits[name], number)]
    contents = FileContents()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        readable = list(pool.map(contents.read, files))
    known = [file for file, is_readable in zip(files, readable, strict=True) if is_readable]
    now = {shown(file): f"{digest:016x}" for file, digest in zip(known, contents.digests(known).tolist(), strict=True)}
    repaired = [file for file in files if shown(file) in problems]
    still = _problems(repaired, contents) if repaired else {}
    return [
        file
        for file in files
        if (shown(file) in digests and now.get(shown(file)) != digests[shown(file)])
        or (shown(file) in problems and file not in still)
    ]


def _rows(split: Split, number: int) -> np.ndarray:
    return np.arange(number * PART, min((number + 1) * PART, split.num_examples))


def embed_rows(
    listing: Listing,
    name: str,
    rows: np.ndarray,
    extractor: Extractor,
    progress: Progress | None = None,
    known: Mapping[int, np.ndarray] | None = None,
) -> Part:
    """Return the features of some images of a split, in float32; files that are no images are its problems.

    known: features by the digests of images, which are not computed.
    """
    split, problems = listing.splits[name], {}
    if listing.files is not None:
        files, contents = [listing.files[row] for row in rows], FileContents()
        bad = _problems(files, contents)
        problems = {shown(file): why for file, why in bad.items()}
        rows = np.array([row for row, file in zip(rows, files, strict=True) if file not in bad], np.int64)
        digests = contents.digests(listing.files[row] for row in rows)
        labels = np.full(len(rows), -1)
        if progress is not None:
            progress.update(len(bad))
    else:
        digests, labels = contents_of(split, rows)
    found = [(known or {}).get(digest) for digest in digests.tolist()]
    is_new = np.array([value is None for value in found], bool)
    values = np.empty((len(rows), extractor.model.output_shape[-1]), np.float32)
    if progress is not None:
        progress.update(int(np.sum(~is_new)))
    values[is_new] = _computed(split.take(rows[is_new]), extractor, progress)
    for row in np.flatnonzero(~is_new):
        values[row] = found[row]
    names = [listing.labels[label] if listing.labels else None for label in labels]
    return Part([split.name(int(row)) for row in rows], digests, names, values, problems)


def embed_all(listing: Listing, name: str, extractor: Extractor) -> Part:
    """Return the features of all images of a split that can be read, and print why others cannot.

    Raises UserError if none can.
    """
    part = embed_rows(listing, name, np.arange(listing.splits[name].num_examples), extractor)
    for path, why in part.problems.items():
        print(as_typed(f"Skipped {path}: {why}"))
    check_some_read(len(part.paths))
    return part


def _problems(files: Sequence[str], contents: FileContents) -> dict[str, str]:
    """Return why files are no images; the contents of the others are noted."""
    image_warnings = ImageWarnings()
    with native_stderr_silenced(), concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda file: file_problem(file, image_warnings, contents), files))
    image_warnings.warn(f"{len(files):,} images")
    return {file: why for file, why in zip(files, found, strict=True) if why}


def _computed(split: Split, extractor: Extractor, progress: Progress | None) -> np.ndarray:
    found = [np.zeros((0, extractor.model.output_shape[-1]), np.float32)]
    if not split.num_examples:
        return found[0]
    # Batches of one size for all files: the model is traced once, and the same bytes come out after an interruption.
    batches = evaluation_batches(
        dataclasses.replace(split, target=None), extractor.preprocessing, num_classes=1, batch_size=extractor.batch_size
    )
    with bad_examples_reported(split):
        for images, _, weights in batches:
            real = weights.numpy() > 0.0
            values = extractor.model.predict_on_batch(keras.ops.convert_to_tensor(images))  # of the backend
            found.append(np.asarray(values[real], np.float32))
            if progress is not None:
                progress.update(int(real.sum()))
    return np.concatenate(found)


def contents_of(split: Split, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return digests (n,) uint64 of the images as they are stored, and labels (n,) int64, of some or all of a split."""
    rows = np.arange(split.num_examples) if rows is None else rows
    if split.digests is not None and split.labels is not None:
        return split.digests[rows], split.labels[rows]

    @without_autograph
    def content(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(index)
        parts = [tf.reshape(image, (1, -1)), tf.reshape(tf.shape(image), (1, -1))]
        numbers = tf.concat([tf.fingerprint(part)[0] for part in parts], axis=0)
        return tf.fingerprint(numbers[None])[0], tf.cast(label, tf.int64)

    data = tf.data.Dataset.from_tensor_slices(np.asarray(rows, np.int64))
    data = data.map(content, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(1024)
    with bad_examples_reported(split):
        batches = [(digests.numpy(), labels.numpy()) for digests, labels in data]
    digests = np.concatenate([np.ascontiguousarray(found).view(np.uint64)[:, 0] for found, _ in batches])
    return digests, np.concatenate([labels for _, labels in batches])


def check_finite(values: np.ndarray) -> None:
    """Raise UserError for features (n, D) that are no finite numbers."""
    bad = int(np.sum(~np.all(np.isfinite(values), axis=-1)))
    if bad:
        raise UserError(
            f"The features of {bad:,} of {len(values):,} images are not finite numbers in {values.dtype}; they are too "
            "large for float16, or the model's weights are broken: give --dtype float32, or inspect it with keras-vit "
            "inspect."
        )


def as_stored(part: Part, description: FeatureDescription) -> Part:
    """Return the part in the type in which it is stored. Raises UserError for what this cannot hold."""
    with np.errstate(over="ignore"):
        values = part.embeddings.astype(description.dtype)
    check_finite(values)
    return dataclasses.replace(part, embeddings=values)
