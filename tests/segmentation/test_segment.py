"""Segmentation on made scenes: trained, evaluated, exported; folders that do not match are refused by name."""

import json
import pathlib
import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import sklearn.datasets
import tensorflow as tf
import tensorflow_datasets as tfds

import keras_vit
from keras_vit import UserError, run_directory
from tests.support import randomize
from training import segment
from training.segmentation.masks import open_scenes, read_mask
from training.segmentation.segment import evaluate
from training.segmentation.tfds_masks import open_tfds_scenes

BACKBONE = keras_vit.ViTConfig(patch_size=4, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=32)


def make_scenes(folder: pathlib.Path, count: int, seed: int = 0) -> None:
    """Handwritten digits (class 1) on a texture of dark stripes (class 0), 24x32 pixels; edges are not counted."""
    rng = np.random.default_rng(seed)
    ink = sklearn.datasets.load_digits().images[rng.integers(0, 1797, count)]
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, digit in enumerate(ink):
        image = 60.0 * (rng.random((24, 32)) < 0.5) + 40.0 * (np.arange(32) // 2 % 2)
        mask = np.zeros((24, 32), np.uint8)
        left = int(rng.integers(0, 9))
        large = np.kron(digit, np.ones((3, 3)))
        mask[:, left : left + 24] = np.where(large > 6, 1, np.where(large > 2, 255, 0))
        image[mask == 1] = 255 - 30 * rng.random(np.sum(mask == 1))
        PIL.Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{number:03d}.png")
        PIL.Image.fromarray(mask).save(folder / "masks" / f"{number:03d}.png")


@pytest.fixture(name="scenes", scope="module")
def _scenes(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder, 60)
    (folder / "labels.txt").write_text("texture\ndigit\n")
    return folder


def save_backbone(folder: pathlib.Path) -> str:
    model = randomize(keras_vit.build(BACKBONE, image_size=(24, 32), channels=1, num_classes=3))
    model.save(folder / "backbone.keras")
    return str(folder / "backbone.keras")


@pytest.mark.slow
def test_a_head_is_trained_evaluated_and_exported(scenes, tmp_path):
    command = ["--checkpoint", save_backbone(tmp_path), "--data", str(scenes), "--workdir", str(tmp_path / "run")]
    command += ["--steps", "60", "--learning-rate", "0.02", "--blocks", "0", "-1"]
    segment.main(command)
    report = json.loads((tmp_path / "run" / "segmentation.json").read_text())
    # Half of the patches are of both classes, and each has one linear prediction.
    assert report["iou"].keys() == {"texture", "digit"}
    assert report["mean_iou"] == pytest.approx(np.mean(list(report["iou"].values())))
    assert report["images"] == 6
    assert report["iou"]["digit"] > 0.4
    model, before = run_directory.load_model(tmp_path / "run"), keras.models.load_model(tmp_path / "backbone.keras")
    for weight in before.get_layer("Transformer.encoderblock_0.MlpBlock_3.Dense_0").weights:
        name = weight.path.split("/")[-1]
        (after,) = (
            w for w in model.get_layer("Transformer.encoderblock_0.MlpBlock_3.Dense_0").weights if w.path.endswith(name)
        )
        np.testing.assert_array_equal(after, weight)

    signature = tf.saved_model.load(str(tmp_path / "run" / "saved_model" / "1")).signatures["serving_default"]
    wide = np.random.default_rng(0).integers(0, 256, (2, 50, 70, 1), np.uint8)
    found = signature(image=tf.constant(wide))
    assert found["mask"].shape == (2, 50, 70)
    expected = model.predict_on_batch(tf.image.resize(tf.cast(wide, tf.float32), (24, 32)) / 127.5 - 1.0)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-3)

    saved = (tmp_path / "run" / "model.keras").read_bytes()
    segment.main(command)
    assert (tmp_path / "run" / "model.keras").read_bytes() == saved
    assert json.loads((tmp_path / "run" / "segmentation.json").read_text()) == report


@pytest.mark.slow
def test_a_finished_run_is_not_evaluated_on_a_folder_with_other_images(tmp_path):
    make_scenes(tmp_path / "scenes", 20)
    command = ["--checkpoint", save_backbone(tmp_path), "--data", str(tmp_path / "scenes"), "--workdir"]
    command += [str(tmp_path / "run"), "--steps", "1", "--batch-size", "4"]
    segment.main(command)
    for name in ("images", "masks"):
        shutil.copy(tmp_path / "scenes" / name / "005.png", tmp_path / "scenes" / name / "000a.png")
    with pytest.raises(UserError, match="images"):
        segment.main(command)


def test_iou_is_counted_at_the_size_of_the_masks_and_without_ignored_pixels(tmp_path):
    """A model that calls the left half of every image 1."""
    images = keras.Input((8, 8, 1))
    spec = keras_vit.build(BACKBONE, image_size=8, channels=1, num_classes=None).get_layer("spec")
    right = tf.constant(np.where(np.arange(8) > 3, -1.0, 1.0)[None, None], tf.float32)
    left = keras.layers.Lambda(lambda x: tf.stack([0.0 * x[..., 0], 0.0 * x[..., 0] + right], axis=-1))
    model = keras.Model(images, left(spec(images)))
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.zeros((10, 20), np.uint8)
    mask[:, :5], mask[0] = 1, 255
    for number in range(2):
        PIL.Image.fromarray(np.zeros((10, 20), np.uint8)).save(tmp_path / "images" / f"{number}.png")
        PIL.Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    labels, _, evaluation = open_scenes(str(tmp_path))
    report = evaluate(model, evaluation, labels)
    assert labels == ("0", "1")
    assert report["iou"] == {"0": pytest.approx(10 / 15), "1": pytest.approx(5 / 10)}
    assert report["pixel_accuracy"] == pytest.approx(15 / 20)


@pytest.mark.parametrize(("train", "evaluation"), [("train", "test"), ("training", "testing")])
def test_a_folder_with_splits_uses_them(train, evaluation, tmp_path):
    make_scenes(tmp_path / train, 5)
    make_scenes(tmp_path / evaluation, 3)
    assert [split.num_examples for split in open_scenes(str(tmp_path))[1:]] == [5, 3]


def test_a_mask_with_a_palette_holds_its_indices(tmp_path):
    mask = PIL.Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3), "P")
    mask.putpalette([255 - value for value in range(768 // 3) for _ in range(3)])
    mask.save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png"), np.arange(6).reshape(2, 3))


def test_a_mask_of_fractions_is_refused(tmp_path):
    PIL.Image.fromarray(np.array([[0.6, 1.7]], np.float32)).save(tmp_path / "mask.tif")
    with pytest.raises(UserError, match="holds fractions; save class numbers"):
        read_mask(tmp_path / "mask.tif")


def _missing_mask(folder):
    (folder / "masks" / "001.png").unlink()


def _extra_mask(folder):
    (folder / "masks" / "001.png").rename(folder / "masks" / "one.png")


def _other_size(folder):
    PIL.Image.fromarray(np.zeros((5, 6), np.uint8)).save(folder / "masks" / "002.png")


def _colors(folder):
    PIL.Image.fromarray(np.zeros((24, 32, 3), np.uint8)).save(folder / "masks" / "002.png")


def _binary(folder):
    for file in (folder / "masks").iterdir():
        PIL.Image.fromarray(np.where(np.asarray(PIL.Image.open(file)) == 1, 128, 0).astype(np.uint8)).save(file)


def _few_names(folder):
    (folder / "labels.txt").write_text("all\n")


def _broken_image(folder):
    (folder / "images" / "003.png").write_bytes((folder / "images" / "003.png").read_bytes()[:40])


def _no_masks(folder):
    (folder / "masks").rename(folder / "mask")


def test_files_beside_images_and_masks_that_are_no_pictures_are_ignored(tmp_path, capsys):
    make_scenes(tmp_path, 20)
    (tmp_path / "labels.txt").write_text("texture\ndigit\n")
    for name in ("images/000.txt", "images/notes.csv", "masks/000.json"):
        (tmp_path / name).write_text("no picture")
    open_scenes(str(tmp_path))
    printed = capsys.readouterr().out
    assert f"2 files in {tmp_path / 'images'} that are not pictures (1 .txt, 1 .csv)" in printed
    assert f"1 file in {tmp_path / 'masks'} that is not a picture (1 .json)" in printed


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_missing_mask, "1 files have no counterpart of the same name: the image 001.png has no mask"),
        (_extra_mask, "the image 001.png has no mask; the mask one.png has no image"),
        (_other_size, "002.png has 5x6 pixels, but its image 24x32"),
        (_colors, r"should have one channel with class numbers from 0 to 254, but has the shape \(24, 32, 3\)"),
        (_binary, "have the values 0, 128, which are not the numbers of classes from 0 on"),
        (_few_names, "names 1 classes, 0 to 0, but the masks have the values 0, 1"),
        (_broken_image, "1 of .* images cannot be read: .*003.png"),
        (_no_masks, "should hold the folders images and masks, .* but has no masks"),
    ],
)
def test_a_folder_that_does_not_match_is_refused_by_name(damage, words, tmp_path):
    make_scenes(tmp_path / "scenes", 4)
    damage(tmp_path / "scenes")
    workdir = tmp_path / "run"
    with pytest.raises(UserError, match=words):
        segment.main(["--checkpoint", "augreg:B_16", "--data", str(tmp_path / "scenes"), "--workdir", str(workdir)])
    assert not workdir.exists()


class DigitScenes(tfds.core.GeneratorBasedBuilder):
    """The scenes as a data set of TensorFlow Datasets, whose classes are 1 and 2."""

    VERSION = tfds.core.Version("1.0.0")
    scenes = pathlib.Path()

    def _info(self):
        mask = tfds.features.Image(shape=(None, None, 1), encoding_format="png")
        features = {"image": tfds.features.Image(shape=(None, None, 3)), "label": np.int64, "segmentation_mask": mask}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(range(40)), "test": self._generate_examples(range(40, 60))}

    def _generate_examples(self, numbers):
        for number in numbers:
            image, mask = (
                np.asarray(PIL.Image.open(self.scenes / name / f"{number:03d}.png")) for name in ("images", "masks")
            )
            mask = np.where(mask == 255, 255, mask + 1).astype(np.uint8)[..., None]
            yield number, {"image": np.repeat(image[..., None], 3, -1), "label": 0, "segmentation_mask": mask}


@pytest.fixture(name="tfds_directory", scope="module")
def _tfds_directory(scenes, tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tfds")
    DigitScenes.scenes = scenes
    DigitScenes(data_dir=directory).download_and_prepare()
    return directory


def test_a_data_set_of_tfds_has_the_images_and_masks_of_its_records(scenes, tfds_directory):
    labels, train, evaluation = open_tfds_scenes("digit_scenes", str(tfds_directory), "train[:30]", None)
    assert labels == ("0", "1", "2")
    assert (train.num_examples, evaluation.num_examples) == (30, 20)
    expected = {read_mask(scenes / "masks" / f"{number:03d}.png").tobytes() for number in range(40, 60)}
    for image, mask in evaluation.in_order():
        assert (image.shape, image.dtype, mask.shape, mask.dtype) == ((24, 32, 3), tf.uint8, (24, 32), tf.uint8)
        found = mask.numpy()
        assert np.where(found == 255, 255, found - 1).astype(np.uint8).tobytes() in expected
    images, classes, weights = next(iter(train.batches(keras_vit.Preprocessing((24, 32), 1), 5, seed=0)))
    assert (images.shape, classes.shape) == ((5, 24, 32, 1), (5, 24, 32))
    assert set(np.unique(classes[weights == 1.0])) == {1, 2}


@pytest.mark.slow
def test_a_run_on_a_data_set_of_tfds_is_evaluated_on_its_test_split(tfds_directory, tmp_path):
    command = ["--checkpoint", save_backbone(tmp_path), "--data", "tfds:digit_scenes", "--data-dir"]
    command += [str(tfds_directory), "--workdir", str(tmp_path / "run"), "--steps", "3"]
    segment.main(command)
    report = json.loads((tmp_path / "run" / "segmentation.json").read_text())
    assert report["images"] == 20
    assert report["iou"]["0"] is None
    assert report["iou"].keys() == {"0", "1", "2"}
    with pytest.raises(UserError, match="train_split"):
        segment.main([*command, "--train-split", "train[:30]"])


class UnmaskedScenes(DigitScenes):
    """The same scenes without their masks."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(None, None, 3)), "label": np.int64}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _generate_examples(self, numbers):
        for number, example in super()._generate_examples(numbers):
            yield number, {"image": example["image"], "label": 0}


def test_a_data_set_without_one_mask_is_refused(scenes, tmp_path):
    UnmaskedScenes.scenes = scenes
    UnmaskedScenes(data_dir=tmp_path / "tfds").download_and_prepare()
    command = ["--checkpoint", "augreg:B_16", "--data", "tfds:unmasked_scenes", "--data-dir", str(tmp_path / "tfds")]
    command += ["--workdir"]
    with pytest.raises(
        UserError, match="'?unmasked_scenes'? should have one image and one mask, .* pictures image of 3 channels"
    ):
        segment.main([*command, str(tmp_path / "run")])
    with pytest.raises(UserError, match="--data-dir applies to --data tfds:NAME only; leave it out"):
        segment.main(["--checkpoint", "augreg:B_16", "--data", "x", "--data-dir", "y", "--workdir", "z"])
    assert not (tmp_path / "run").exists()


def test_a_resnet_has_no_tokens_to_segment_by(scenes, tmp_path):
    keras_vit.build(keras_vit.ResNetConfig((1,), 4, (8,), num_groups=2), image_size=32, num_classes=3).save(
        tmp_path / "resnet.keras"
    )
    command = [
        "--checkpoint",
        str(tmp_path / "resnet.keras"),
        "--data",
        str(scenes),
        "--workdir",
        str(tmp_path / "run"),
    ]
    with pytest.raises(UserError, match="needs the patch tokens of a Vision Transformer"):
        segment.main(command)
    assert not (tmp_path / "run").exists()
