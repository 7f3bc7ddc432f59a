"""Find pictures of an index by other pictures or by a text, and write what was found."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

import keras_vit
from keras_vit import UserError
from keras_vit.cli.pages import render
from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import CsvWriter, markdown_table
from keras_vit.run import Run
from training.data.dataset import check_some_read
from training.features.embed import Extractor, embed_rows, listing_of_files
from training.features.extractors import extractor_of, fingerprint_of
from training.features.neighbors import NeighborGraph, nearest_rows, unit_chunks, unit_length
from training.features.store import NO_SPLIT, FeatureIndex, Pictures, check_same_model, open_index
from training.features.thumbnails import Thumbnails, file_address
from training.options.features import LookupOptions, SearchOptions, SimilarOptions

_BATCH = 16


@dataclasses.dataclass(frozen=True)
class Found:
    """The results for one picture or text."""

    query: str
    cosines: np.ndarray
    """(k,), the largest first."""
    rows: np.ndarray
    """(k,), of the index."""
    pictures: Pictures
    """Of these rows."""


def similar(files: Sequence[str], options: SimilarOptions) -> None:
    """Find the pictures that are most similar to each file; print a table, and write the results."""
    index = open_index(options.index)
    extractor = _extractor(index, _run_of(index, options))
    listing = listing_of_files(files)
    part = embed_rows(listing, NO_SPLIT, np.arange(len(files)), extractor)
    for path, why in part.problems.items():
        print(f"Not looked up: {path}: {why}")
    check_some_read(len(part.embeddings))
    _write(index, _found(index, part.paths, part.embeddings, options), options)


def search(options: SearchOptions) -> str:
    """Find the pictures that fit a text; print a table, write the results, and return the path of the best one."""
    index = open_index(options.index)
    if index.description.features != "joint":
        raise UserError(
            f"{options.index} has the features {index.description.features} of {index.description.model}, which no "
            "text can be compared with; make an index by a checkpoint of CLIP or SigLIP."
        )
    run = _run_of(index, options)
    _extractor(index, run)
    ids = keras_vit.tokenizer(run.name)([options.text])
    embeddings = np.asarray(keras_vit.text_tower(run.name)(ids))
    found = _found(index, [options.text], embeddings, options)
    _write(index, found, options)
    return found[0].pictures.paths[0]


def _run_of(index: FeatureIndex, options: LookupOptions) -> Run:
    """The model that made an index."""
    settings, name = index.description.settings, options.run or index.description.model
    size = settings["image_size"]
    return Run.open(name, image_size=tuple(size) if size else None, num_heads=settings["num_heads"])


def _extractor(index: FeatureIndex, run: Run) -> Extractor:
    """Return the extractor of the features of an index. Raises UserError if the model is another one now."""
    description, preprocessing = index.description, run.preprocessing
    if (resize := description.settings["resize"]) is not None:
        preprocessing = preprocessing.with_resize(resize, None)
    kind = description.features
    check_same_model(index, fingerprint_of(run.model, preprocessing, kind), kind, run.name)
    return Extractor(extractor_of(run, kind), preprocessing, _BATCH)


def _found(index: FeatureIndex, names: Sequence[str], embeddings: np.ndarray, options: LookupOptions) -> list[Found]:
    queries, count = unit_length(embeddings), min(options.neighbors, sum(index.counts.values()))
    if options.approximate:
        cosines, rows = NeighborGraph(index).nearest(queries, count)
    else:
        cosines, rows = nearest_rows(unit_chunks(index), queries, count)
    found = []
    for name, one, places in zip(names, cosines, rows, strict=True):
        kept = places >= 0  # a graph may find fewer
        found.append(Found(name, one[kept], places[kept], index.some(places[kept].tolist())))
    return found


def _write(index: FeatureIndex, found: Sequence[Found], options: LookupOptions) -> None:
    for one in found:
        print(f"{one.query}:")
        table = zip(one.pictures.paths, one.pictures.labels, one.cosines, strict=True)
        rows = [[index.shown(path), label or "", f"{cosine:.4f}"] for path, label, cosine in table]
        print(markdown_table(("picture", "label", "similarity"), rows, num_text_columns=2))
    if options.output is None:
        return
    with atomic_write(pathlib.Path(options.output)) as temporary:
        if options.output.endswith(".csv"):
            _write_csv(temporary, found, raw=options.raw)
        else:
            temporary.write_text(_page(index, found), encoding="utf-8")
    print(f"Results are in {options.output}.")


def _write_csv(path: pathlib.Path, found: Sequence[Found], *, raw: bool) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = CsvWriter(stream, raw=raw)
        writer.writerow(["query", "rank", "path", "label", "split", "digest", "similarity"])
        for one in found:
            known = one.pictures.paths, one.pictures.labels, one.pictures.splits, one.pictures.digests
            for rank, (cosine, *of_picture) in enumerate(zip(one.cosines, *known, strict=True), 1):
                writer.writerow([one.query, rank, *of_picture, f"{cosine:.6f}"])


def _page(index: FeatureIndex, found: Sequence[Found]) -> str:
    thumbnails, queries = Thumbnails(index), []
    for one in found:
        known = one.pictures.paths, one.pictures.labels, one.pictures.splits
        cards = [
            {
                "address": thumbnails.address(int(row), path, split),
                "file": pathlib.PurePath(path).name,
                "name": index.shown(path),
                "label": label or "",
                "cosine": cosine,
            }
            for row, cosine, path, label, split in zip(one.rows, one.cosines, *known, strict=True)
        ]
        address = file_address(one.query) if pathlib.Path(one.query).is_file() else ""
        file = pathlib.PurePath(one.query).name
        queries.append({"name": one.query, "file": file, "address": address, "cards": cards})
    return render("similar", title="Most similar pictures", queries=queries, model=index.description.model)
