"""The index of features: what it holds, that it continues, and what it refuses."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.features.places import CONFIG, image_place
from training import embed, knn
from training.features import extraction, store
from training.features.nearest_neighbors import nearest_neighbors
from training.features.probe import Features
from training.features.store import open_index
from training.options.features import EmbedOptions

pytestmark = pytest.mark.usefixtures("models_read_once")


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """Two models and their images, with an index of the first in files of 16 images."""
    place = image_place(tmp_path_factory.mktemp("features"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_small_parts(patch)
        run("full", "--dtype", "float32")
    return place


def make_small_parts(patch: pytest.MonkeyPatch) -> None:
    for module in (store, extraction):
        patch.setattr(module, "PART", 16)


@pytest.fixture(autouse=True)
def _in_the_place(place, monkeypatch):
    monkeypatch.chdir(place)
    make_small_parts(monkeypatch)


def run(output, *options: str, model: str = "model.keras", photos=("--data", "folder:data")) -> None:
    embed.main(["--run", model, *photos, "--output", str(output), "--batch-size", "4", *options])


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".parquet", ".json")}


@pytest.fixture(name="copy")
def _copy(tmp_path) -> pathlib.Path:
    """A copy of the index."""
    return pathlib.Path(shutil.copytree("full", tmp_path / "copy"))


def test_an_index_has_the_features_of_the_model_with_path_digest_label_and_split():
    index = open_index("full")
    table = index.images
    assert table.splits == ["train"] * 20 + ["test"] * 4
    assert {pathlib.Path(path).parent.name for path in table.paths} == {"ant", "bee"}
    assert [pathlib.Path(path).parent.name for path in table.paths] == table.labels
    assert len(set(table.digests)) == 24
    model = load_model("model.keras")
    features = keras_vit.intermediates(model, "pre_logits")
    preprocess = keras_vit.preprocessing_of(model)
    images = np.stack([np.asarray(preprocess(PIL.Image.open(path))) for path in table.paths])
    np.testing.assert_allclose(index.embeddings(), np.asarray(features(images)), rtol=0, atol=1e-5)
    raw = pyarrow.parquet.read_table("full/train-00000.parquet")
    assert raw.column_names == ["path", "digest", "label", "split", "embedding"]
    assert raw.schema.metadata[b"fingerprint"].decode() == index.description.fingerprint
    assert index.description.labels == ("ant", "bee")
    assert index.description.splits == {"train": 20, "test": 4}


def test_a_command_that_was_killed_continues_and_ends_in_the_same_bytes(copy):
    whole, kept = files_of(copy), copy / "train-00000.parquet"
    (copy / "train-00001.parquet").unlink()
    (copy / "test-00000.parquet").rename(copy / "test-00000.parquet.7.tmp.parquet")
    before = kept.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"is not complete, train-00001.parquet is missing;"):
        open_index(str(copy))
    run(copy, "--dtype", "float32")
    assert kept.stat().st_mtime_ns == before
    assert files_of(copy) == whole


def test_features_of_single_images_are_those_of_the_content_that_files_have_now(place, tmp_path, monkeypatch, capsys):
    """A replaced file keeps its time and size; one is repaired, and another one is broken."""
    shutil.copytree("loose", tmp_path / "loose")
    monkeypatch.chdir(tmp_path)
    model = str(place / "model.keras")
    run("f", model=model, photos=("loose",))
    index = open_index("f")
    assert index.images.labels == [None] * len(index.images.paths) == [None] * 23
    assert [*index.problems] == ["loose/05.png"]
    assert "Not embedded: loose/05.png" in capsys.readouterr().out
    kept = (tmp_path / "f" / "pictures-00001.parquet").stat().st_mtime_ns
    first, second = (tmp_path / "loose" / name for name in ("00.png", "01.png"))
    time = first.stat()
    first.write_bytes(second.read_bytes())
    os.utime(first, ns=(time.st_atime_ns, time.st_mtime_ns))
    shutil.copy(first, tmp_path / "loose" / "05.png")
    (tmp_path / "loose" / "07.png").write_bytes(b"broken")
    run("f", model=model, photos=("loose",))
    assert "Changed after their features were computed: 3 images, such as loose/00.png" in capsys.readouterr().out
    index = open_index("f")
    names, features = index.images.paths, index.embeddings()
    for name in ("00", "05"):
        np.testing.assert_array_equal(features[names.index(f"loose/{name}.png")], features[names.index("loose/01.png")])
    assert [*index.problems] == ["loose/07.png"]
    assert (tmp_path / "f" / "pictures-00001.parquet").stat().st_mtime_ns == kept
    run("f", model=model, photos=("loose",))
    assert "Changed" not in capsys.readouterr().out


def test_only_images_that_were_added_are_computed_also_after_a_kill(place, copy, tmp_path, monkeypatch):
    data, options = tmp_path / "data", ("--dtype", "float32")
    shutil.copytree("data", data)
    monkeypatch.chdir(tmp_path)
    images = functools.partial(run, model=str(place / "model.keras"))
    compute, write, computed = extraction._computed, store.write_part, list[int]()

    def counted(split, *more):
        computed.append(split.num_examples)
        return compute(split, *more)

    def killed(folder, description, split, number, part):
        write(folder, description, split, number, part)
        raise KeyboardInterrupt

    monkeypatch.setattr(extraction, "_computed", counted)
    PIL.Image.effect_noise((9, 9), 90).save(data / "ant" / "000.png")  # the first, so that all others move
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(extraction, "write_part", killed)
        images(copy, *options)
    with pytest.raises(UserError, match="is not complete"):
        open_index(str(copy))
    images(copy, *options)
    assert sum(computed) == 1
    images("anew", *options)
    index, anew = open_index(str(copy)), open_index("anew")
    assert index.images == anew.images
    np.testing.assert_allclose(index.embeddings(), anew.embeddings(), rtol=0, atol=1e-6)
    assert files_of(copy).keys() == files_of(tmp_path / "anew").keys()
    assert not (copy / "earlier").exists()


def test_features_of_two_models_never_mix(copy):
    with pytest.raises(UserError, match="of two models are never mixed"):
        run(copy, model="other.keras")
    with pytest.raises(UserError, match="has features of other images"):
        run(copy, "--dtype", "float32", photos=("loose",))
    with pytest.raises(UserError, match="has features of the type float32, not float16"):
        run(copy)
    part = copy / "train-00001.parquet"
    table = pyarrow.parquet.read_table(part)
    pyarrow.parquet.write_table(table.replace_schema_metadata({"fingerprint": "of another"}), part)
    with pytest.raises(UserError, match="cannot be read as features .it is of another model"):
        open_index(str(copy)).embeddings()


def test_damaged_files_are_one_sentence(copy):
    part = copy / "test-00000.parquet"
    content = part.read_bytes()
    assert b".png" in content
    part.write_bytes(content.replace(b".png", b"\x80png"))
    with pytest.raises(UserError, match=r"test-00000.parquet cannot be read as features .*UTF8"):
        _ = open_index(str(copy)).images
    part.write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"test-00000.parquet cannot be read .*; remove it"):
        open_index(str(copy)).embeddings()
    (copy / "features.json").write_text("{}")
    with pytest.raises(UserError, match=r"features.json should have a text as model"):
        open_index(str(copy))


def test_a_probe_reads_the_index_instead_of_computing(tmp_path, compute_no_more):
    compute_no_more()
    command = ["--run", "model.keras", "--data", "folder:data", "--neighbors", "3", "--index", "full", "--output"]
    knn.main([*command, str(tmp_path)])
    index = open_index("full")
    labels = np.array([("ant", "bee").index(label) for label in index.images.labels])
    train, test = (Features(index.embeddings([name]), labels[rows]) for name, rows in
                   (("train", slice(20)), ("test", slice(20, None))))  # fmt: skip
    expected = nearest_neighbors(train, test, 2, neighbors=(3,))
    assert json.loads((tmp_path / "knn.json").read_text())["results"] == expected
    with pytest.raises(UserError, match="has the features of other images, labels or"):
        knn.main([*command, str(tmp_path), "--split-seed", "3"])


@pytest.mark.parametrize("photos", [(), ("--data", "folder:data", "loose"), ("nowhere",)])
def test_mistakes_are_one_sentence(photos, tmp_path):
    with pytest.raises(UserError, match="no image 'nowhere'" if len(photos) == 1 else "Give --data, .* but not both"):
        run(tmp_path / "f", photos=photos)


def test_numbers_that_cannot_be_stored_are_refused(copy):
    description = dataclasses.replace(open_index(str(copy)).description, dtype="float16")

    def stored(value: float) -> np.ndarray:
        part = store.Part(["a"], np.zeros(1, np.uint64), ["ant"], np.full((1, 12), value, np.float32), {})
        return extraction.as_stored(part, description).embeddings

    assert stored(0.1).dtype == np.float16
    for value, words in ((np.nan, "are not finite numbers"), (1e6, "they are too large for float16")):
        with pytest.raises(UserError, match=words):
            stored(value)


def test_kind_and_size_of_the_features_are_those_of_the_options():
    options = EmbedOptions(run="model.keras", images=("x",), output="f", features="both", image_size=(12, 12))
    description, _ = extraction.describe_features(Run.open("model.keras", image_size=(12, 12)), options, (), {}, 0)
    assert (description.features, description.width) == ("both", 24)
    assert description.settings == {"image_size": (12, 12), "num_heads": None, "resize": None}


def test_images_whose_transparency_is_lost_are_announced(tmp_path, monkeypatch, capsys):
    preprocessing = keras_vit.Preprocessing((8, 8), background=None)
    keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=2).save(tmp_path / "drops.keras")
    for number, label in enumerate(("ant", "ant", "bee", "bee")):
        (tmp_path / "clear" / label).mkdir(parents=True, exist_ok=True)
        pixels = np.full((9, 9, 4), (0, 0, 0, number), np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / "clear" / label / f"{number}.png")
    copied = functools.partial(shutil.copytree, "full", dirs_exist_ok=True)
    monkeypatch.setattr(extraction, "write_features", lambda folder, *_: open_index(str(copied(folder))))
    for model, is_lost in ((str(tmp_path / "drops.keras"), True), ("model.keras", False)):
        run(tmp_path / "f", model=model, photos=("--data", f"folder:{tmp_path / 'clear'}"))
        assert ("--resize pad puts such images on white" in capsys.readouterr().out) == is_lost
