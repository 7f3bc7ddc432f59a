"""Learn a memory of good parts, and find what differs from it: PatchCore on patch tokens of a Vision Transformer."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import matplotlib
import numpy as np
import PIL.Image
import tensorflow as tf
from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

from keras_vit import Preprocessing, UserError, ViTConfig, config_of, preprocessing_of
from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.cli.progress import tracked
from keras_vit.errors import ParityError, reading
from keras_vit.files.atomic import atomic_folder, atomic_write, write_text
from keras_vit.files.documents import read_json
from keras_vit.files.keras_model import find, load_model
from keras_vit.files.tables import markdown_table, write_csv
from keras_vit.images.files import Image, read_image
from keras_vit.images.preprocessing import to_channels
from keras_vit.inspection.compute import model_inputs
from keras_vit.models.patch_memory import anomaly_model, local_features
from keras_vit.run import Run
from keras_vit.scores import threshold_of
from training.data.dataset import check_some_read
from training.data.file_contents import shown
from training.features.extraction import check_finite
from training.options.predict import AnomalyFitOptions, AnomalyPredictOptions
from training.prediction.classifier import try_to_read

FACTS = "anomaly.json"
# Most patches in memory; most numbers of all patches of good parts (2 GiB); every fifth good part is held out.
_MOST_PATCHES, _MOST_NUMBERS, _HELD_OUT = 10_000, 2**29, 5
_EPSILON = 0.9  # distortion of distances by the random projection, as in PatchCore's code and anomalib
# Images on which the SavedModel is compared, and its largest difference that rounding explains, relative to the
# largest score or to 1. Distances are roots, which double the relative error of a small square.
_COMPARED, _TOLERANCE = 4, 1e-3
_SIDE = 320  # longest side of an image on the page, in pixels


@dataclasses.dataclass(frozen=True)
class AnomalyDetector:
    """A model of good parts with its threshold."""

    model: keras.Model
    """Images -> {"score": (B,), "map": (B, height, width)}."""
    threshold: float
    """A part with a larger score is defective."""

    @property
    def preprocessing(self) -> Preprocessing:
        """Whole images, stretched."""
        return stretched(self.model)

    def inspect(self, image: Image) -> tuple[float, np.ndarray]:
        """Return the score of an image and its map (height, width)."""
        found = self.model.predict_on_batch(model_inputs([image], self.preprocessing)[1])
        return float(found["score"][0]), found["map"][0]


def stretched(model: keras.Model) -> Preprocessing:
    """Return the preprocessing of a model without a crop: a defect at the edge counts too."""
    return preprocessing_of(model).with_resize("stretch", None)


def fit_anomaly(run: Run, files: Sequence[pathlib.Path], options: AnomalyFitOptions) -> AnomalyDetector:
    """Fill the memory with patches of the images, calibrate the threshold, and write the directory.

    Raises UserError for fewer than five images, for one that cannot be decoded, and for a model without patches.
    """
    if len(files) < _HELD_OUT:
        raise UserError(f"{options.data} has {len(files)} images; give at least {_HELD_OUT} of good parts.")
    order = np.random.default_rng(options.seed).permutation(len(files))
    held_out = [files[index] for index in sorted(order[: len(files) // _HELD_OUT])]
    good = [files[index] for index in sorted(order[len(files) // _HELD_OUT :])]
    config = config_of(run.model)
    # Of another model than a Vision Transformer the last block, which `local_features` refuses.
    middle = (config.num_layers - 1) // 2 if isinstance(config, ViTConfig) else -1
    blocks = options.blocks or (middle,)
    extractor = local_features(run.model, blocks)
    most = max(1, _MOST_NUMBERS // int(np.prod(extractor.output_shape[1:])))
    if len(good) > most:
        print(f"The patches of {most:,} of the {len(good):,} images are used; more exceed 2 GiB of memory.")
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
    Run.at(workdir).save_model(model)
    export_anomaly(detector, held_out, workdir / "saved_model" / "1")
    write_text(workdir / FACTS, json.dumps(facts, indent=2) + "\n")
    print(
        f"{workdir}: {count:,} patches of {len(good):,} good parts; a score above {detector.threshold:.4g} is a defect "
        f"(calibrated on {len(held_out)} other good parts); {1000 * seconds:.0f} ms per image."
    )
    if len(held_out) + 1 < 1.0 / options.false_alarms:
        print(
            f"{len(held_out)} held-out parts are too few for {100.0 * options.false_alarms:g}% false alarms: the "
            "threshold is their largest score; add images of good parts."
        )
    return detector


def open_anomaly_detector(directory: str) -> AnomalyDetector:
    """Open what `fit_anomaly` has written. Raises UserError for anything else."""
    file = find(directory, FACTS)
    with reading(file, "what keras-vit anomaly fit writes", KeyError, TypeError):
        threshold = float(read_json(file)["threshold"])
    return AnomalyDetector(load_model(directory), threshold)


def _patches(
    extractor: keras.Model, files: Sequence[pathlib.Path], preprocessing: Preprocessing, batch_size: int
) -> np.ndarray:
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
    """Return the scores of images, and the seconds for one, without the first, which compiles."""
    scores, seconds = [], []
    for file in files:
        started = time.perf_counter()
        scores.append(detector.inspect(read_image(file, detector.preprocessing))[0])
        seconds.append(time.perf_counter() - started)
    return np.array(scores), float(np.mean(seconds[1:] or seconds))


def export_anomaly(detector: AnomalyDetector, files: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Write a SavedModel, compared with the model on some of the files before it is renamed.

    Its signature takes `image_bytes` (B,), image files of any size, and returns `score` (B,), `map` (B, height, width)
    of the whole image at the model's size, and `defect` (B,) bool. Raises ParityError if it differs by more than
    rounding.
    """
    model, preprocessing = detector.model, detector.preprocessing
    shape = (*preprocessing.image_size, preprocessing.channels)

    def read(data: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.cast(preprocessing.read(data), tf.float32), shape)

    def serve(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        pixels = tf.map_fn(read, image_bytes, fn_output_signature=tf.TensorSpec(shape, tf.float32))
        found = model(preprocessing.normalize(pixels), training=False)
        return {**found, "defect": found["score"] > detector.threshold}

    with atomic_folder(output) as folder:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serving_default", serve, [tf.TensorSpec((None,), tf.string, name="image_bytes")])
        archive.write_out(str(folder), verbose=False)
        signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
        for file in files[:_COMPARED]:
            data = file.read_bytes()
            expected = model.predict_on_batch(np.asarray(preprocessing.normalize(read(tf.constant(data))[None])))
            found = signature(image_bytes=tf.constant([data]))
            for name in ("score", "map"):
                difference = float(np.abs(found[name].numpy() - expected[name]).max())
                if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected[name]).max())):
                    raise ParityError(
                        f"The {name} of {file.name} by the SavedModel differs from the model's by {difference:.3g}, "
                        "more than rounding, so it was not kept."
                    )


# Results


@dataclasses.dataclass(frozen=True)
class Part:
    """An inspected part."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8."""
    score: float
    heat: np.ndarray
    """(height, width) at the model's size: the distance of each pixel to good parts."""
    threshold: float

    @property
    def is_defect(self) -> bool:
        return self.score > self.threshold

    @property
    def verdict(self) -> str:
        return "defect" if self.is_defect else "good"

    @property
    def peak(self) -> tuple[int, int]:
        """Return the pixel (x, y) of the image with the most heat."""
        row, column = np.unravel_index(np.argmax(self.heat), self.heat.shape)
        height, width = self.pixels.shape[:2]
        return int((column + 0.5) * width / self.heat.shape[1]), int((row + 0.5) * height / self.heat.shape[0])


def predict_anomaly(detector: AnomalyDetector, files: Sequence[pathlib.Path], options: AnomalyPredictOptions) -> None:
    """Score images, print a table, and write `--output`. Raises UserError if no image can be read."""
    parts, problems = [], dict[str, str | None]()
    for file in tracked(files, "Looking at images"):
        image, problem = try_to_read(file, detector.preprocessing)
        if image is None:
            problems[shown(str(file))] = problem
        else:
            parts.append(Part(image.name, image.pixels, *detector.inspect(image), detector.threshold))
    if parts:
        rows = [[each.name, f"{each.score:.4g}", each.verdict, "{}, {}".format(*each.peak)] for each in parts]
        print(markdown_table(["image", "score", "verdict", "at x, y"], rows, num_text_columns=1))
    for name, problem in problems.items():
        print(f"Not read: {name}: {problem}")
    if options.output is not None and parts:
        with atomic_write(pathlib.Path(options.output)) as temporary:
            if options.output.endswith(".csv"):
                write_csv(temporary, _csv_rows(parts, problems), raw=options.raw)
            else:
                temporary.write_text(_page(parts, problems), encoding="utf-8")
        print(f"Results are in {options.output}.")
    check_some_read(len(parts))


def _csv_rows(parts: Sequence[Part], problems: Mapping[str, str | None]) -> Iterator[Sequence]:
    yield "picture", "score", "threshold", "defect", "x", "y", "problem"
    for each in parts:
        yield each.name, f"{each.score:.6g}", f"{each.threshold:.6g}", each.is_defect, *each.peak, ""
    for name, problem in problems.items():
        yield name, "", "", "", "", "", problem


def _page(parts: Sequence[Part], problems: Mapping[str, str | None]) -> str:
    """Return a page, the most suspicious first. All maps have one scale, from their lowest value to twice the limit."""
    low = min(float(each.heat.min()) for each in parts)
    return render(
        "anomaly",
        title="Defects",
        num_defects=sum(each.is_defect for each in parts),
        threshold=parts[0].threshold,
        cards=[_card(each, low) for each in sorted(parts, key=lambda each: -each.score)],
        problems=problems,
    )


def _card(part: Part, low: float) -> dict[str, Any]:
    shown = PIL.Image.fromarray(np.asarray(to_channels(part.pixels, 3, "white")).round().astype(np.uint8))
    shown.thumbnail((_SIDE, _SIDE))
    scaled = np.clip((part.heat - low) / max(2.0 * part.threshold - low, 1e-12), 0.0, 1.0)
    colors = (255 * matplotlib.colormaps["inferno"](scaled)[..., :3]).astype(np.uint8)
    heat_map = PIL.Image.blend(shown, PIL.Image.fromarray(colors).resize(shown.size), 0.6)
    return {
        "name": part.name,
        "verdict": part.verdict,
        "score": part.score,
        "image": thumbnail_address(np.asarray(shown), _SIDE),
        "heat_map": thumbnail_address(np.asarray(heat_map), _SIDE),
    }
