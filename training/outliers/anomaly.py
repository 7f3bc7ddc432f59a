"""Learn a memory of good parts, and find what differs from it: PatchCore on patch tokens of a Vision Transformer."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import keras
import numpy as np
from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

from keras_vit import Preprocessing, UserError, ViTConfig, config_of, preprocessing_of
from keras_vit.cli.progress import tracked
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.documents import read_json
from keras_vit.files.keras_model import MODEL, find, load_model
from keras_vit.files.tables import CsvWriter, markdown_table
from keras_vit.images.files import Image, read_image
from keras_vit.inspection.compute import model_inputs
from keras_vit.models.patch_memory import anomaly_model, local_features
from keras_vit.run import Run
from keras_vit.scores import threshold_of
from training.data.dataset import check_some_read
from training.features.embed import check_finite
from training.options.outliers import AnomalyFitOptions
from training.outliers.anomaly_export import export_anomaly
from training.outliers.anomaly_page import Finding, anomaly_page

FACTS = "anomaly.json"
# Most patches in memory; most numbers of all patches of good parts (2 GiB); every fifth good part is held out.
_MOST_PATCHES, _MOST_NUMBERS, _HELD_OUT = 10_000, 2**29, 5
# Distortion of distances by the random projection, as in PatchCore's code and anomalib.
_EPSILON = 0.9


@dataclasses.dataclass(frozen=True)
class AnomalyDetector:
    """A model of good parts with its threshold."""

    model: keras.Model
    """Images -> {"score": (B,), "map": (B, height, width)}."""
    threshold: float
    """A part with a larger score is defective."""

    @property
    def preprocessing(self) -> Preprocessing:
        """Whole pictures, stretched."""
        return stretched(self.model)

    def inspect(self, images: Sequence[Image]) -> tuple[np.ndarray, np.ndarray]:
        """The scores (n,) and the maps (n, height, width) of pictures."""
        found = self.model.predict_on_batch(model_inputs(images, self.preprocessing)[1])
        return found["score"], found["map"]


def stretched(model: keras.Model) -> Preprocessing:
    """The preprocessing of a model without a crop: a defect at the edge counts too."""
    return preprocessing_of(model).with_resize("stretch", None)


def fit_anomaly(run: Run, files: Sequence[pathlib.Path], options: AnomalyFitOptions) -> AnomalyDetector:
    """Fill the memory with patches of the pictures, calibrate the threshold, and write the directory.

    Raises UserError for fewer than five pictures, for one that cannot be decoded, and for a model without patches.
    """
    if len(files) < _HELD_OUT:
        raise UserError(f"{options.data} has {len(files)} pictures; give at least {_HELD_OUT} of good parts.")
    order = np.random.default_rng(options.seed).permutation(len(files))
    held_out = [files[index] for index in sorted(order[: len(files) // _HELD_OUT])]
    good = [files[index] for index in sorted(order[len(files) // _HELD_OUT :])]
    blocks = options.blocks or _middle_block(run.model)
    extractor = local_features(run.model, blocks)
    most = max(1, _MOST_NUMBERS // int(np.prod(extractor.output_shape[1:])))
    if len(good) > most:
        print(f"The patches of {most:,} of the {len(good):,} pictures are used; more exceed 2 GiB of memory.")
        good = good[:most]
    patches = _patches(extractor, good, stretched(run.model), options.batch_size)
    count = min(max(1, round(options.coreset * len(patches))), _MOST_PATCHES)
    model = anomaly_model(run.model, blocks, patches[k_center(patches, count, options.seed)])
    scores, seconds = _scores(AnomalyDetector(model, np.inf), held_out)
    detector = AnomalyDetector(model, threshold_of(scores, options.false_alarms))
    facts = {
        "checkpoint": options.checkpoint,
        "blocks": list(blocks),
        "threshold": detector.threshold,
        "false_alarms": options.false_alarms,
        "good_pictures": len(good),
        "held_out_pictures": len(held_out),
        "patches_in_memory": count,
        "seconds_per_picture": round(seconds, 4),
    }
    workdir = pathlib.Path(options.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with atomic_write(workdir / MODEL) as temporary:
        named = temporary.with_suffix(".keras")  # Keras goes by the name
        model.save(named)
        named.replace(temporary)
    export_anomaly(detector.model, detector.preprocessing, detector.threshold, held_out, workdir / "saved_model" / "1")
    write_text(workdir / FACTS, json.dumps(facts, indent=2) + "\n")
    print(
        f"{workdir}: {count:,} patches of {len(good):,} good parts; a score above {detector.threshold:.4g} is a defect "
        f"(calibrated on {len(held_out)} other good parts); {1000 * seconds:.0f} ms per picture."
    )
    if len(held_out) + 1 < 1.0 / options.false_alarms:
        print(
            f"{len(held_out)} held-out parts are too few for a share of {options.false_alarms:.0%}: the threshold is "
            "their largest score; add pictures of good parts."
        )
    return detector


def _middle_block(model: keras.Model) -> tuple[int]:
    """The block in the middle of a Vision Transformer; of another model the last, which `local_features` refuses."""
    config = config_of(model)
    return ((config.num_layers - 1) // 2,) if isinstance(config, ViTConfig) else (-1,)


def open_anomaly_detector(directory: str) -> AnomalyDetector:
    """Open what `fit_anomaly` has written. Raises UserError for anything else."""
    facts = read_json(find(directory, FACTS))
    if not (isinstance(facts, dict) and isinstance(facts.get("threshold"), float)):
        raise UserError(f"{directory}/{FACTS} has no threshold; write it again by keras-vit anomaly fit.")
    return AnomalyDetector(load_model(directory), facts["threshold"])


def predict_anomaly(
    detector: AnomalyDetector, files: Sequence[pathlib.Path], output: str | None, *, raw: bool
) -> list[Finding]:
    """Score pictures, print a table, and write `output` (`raw`: see `CsvWriter`).

    Raises UserError if none can be read.
    """
    findings, problems = [], dict[str, str]()
    for file in tracked(files, "Looking at pictures"):
        name = str(file).encode("utf-8", "replace").decode("utf-8")
        try:
            image = read_image(file, detector.preprocessing)
        except (UserError, OSError) as error:
            problems[name] = str(error)
            continue
        scores, maps = detector.inspect([image])
        findings.append(Finding(name, image.pixels, maps[0], float(scores[0]), detector.threshold))
    rows = [
        [each.name, f"{each.score:.4g}", "defect" if each.is_defect else "good", "{}, {}".format(*each.peak)]
        for each in findings
    ]
    if rows:
        print(markdown_table(["picture", "score", "verdict", "at x, y"], rows, num_text_columns=1))
    for name, problem in problems.items():
        print(f"Not read: {name}: {problem}")
    if output is not None and findings:
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                _write_csv(temporary, findings, problems, raw=raw)
            else:
                temporary.write_text(anomaly_page(findings, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    check_some_read(len(findings))
    return findings


def _patches(
    extractor: keras.Model, files: Sequence[pathlib.Path], preprocessing: Preprocessing, batch_size: int
) -> np.ndarray:
    """The patches (n, D) float32 of all pictures."""
    found = []
    for begin in tracked(range(0, len(files), batch_size), "Patches", unit="batches"):
        images = [read_image(file, preprocessing) for file in files[begin : begin + batch_size]]
        features = extractor.predict_on_batch(model_inputs(images, preprocessing)[1]).astype(np.float32)
        found.append(features.reshape(-1, features.shape[-1]))
    patches = np.concatenate(found)
    check_finite(patches)
    return patches


def k_center(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return indices (count,) of vectors (n, D) that cover all of them, by greedy k-center selection as in PatchCore.

    The first is a random one, each next the farthest from all before. The distances are those of a sparse random
    projection, where that has fewer dimensions.
    """
    if johnson_lindenstrauss_min_dim(len(vectors), eps=_EPSILON) < vectors.shape[1]:
        vectors = SparseRandomProjection(eps=_EPSILON, random_state=seed).fit_transform(vectors)
    vectors = np.ascontiguousarray(vectors, np.float32)
    squares = np.sum(np.square(vectors), axis=-1)
    chosen = [int(np.random.default_rng(seed).integers(len(vectors)))]
    distances = np.full(len(vectors), np.inf, np.float32)
    for _ in tracked(range(1, count), "Choosing patches", unit="patches"):
        last = chosen[-1]
        np.minimum(distances, squares + squares[last] - 2.0 * (vectors @ vectors[last]), out=distances)
        distances[last] = -np.inf
        chosen.append(int(np.argmax(distances)))
    return np.array(chosen)


def _scores(detector: AnomalyDetector, files: Sequence[pathlib.Path]) -> tuple[np.ndarray, float]:
    """The scores of pictures, and the seconds for one, without the first, which compiles."""
    scores, seconds = [], []
    for file in files:
        started = time.perf_counter()
        scores.append(float(detector.inspect([read_image(file, detector.preprocessing)])[0][0]))
        seconds.append(time.perf_counter() - started)
    return np.array(scores), float(np.mean(seconds[1:] or seconds))


def _write_csv(path: pathlib.Path, findings: Sequence[Finding], problems: dict[str, str], *, raw: bool) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = CsvWriter(stream, raw=raw)
        writer.writerow(["picture", "score", "threshold", "defect", "x", "y", "problem"])
        for each in findings:
            writer.writerow([each.name, f"{each.score:.6g}", f"{each.threshold:.6g}", each.is_defect, *each.peak, ""])
        for name, problem in problems.items():
            writer.writerow([name, "", "", "", "", "", problem])
