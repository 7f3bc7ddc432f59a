"""The index of features: what it holds, that it continues, and what it refuses."""

import dataclasses
import json
import pathlib

import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest

import keras_vit
from keras_vit import UserError
from tests.features.places import picture_place
from training import embed, knn
from training.features import embed as embedding
from training.features import store
from training.features.store import open_index

PART = 16


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    return picture_place(tmp_path_factory.mktemp("features"))


@pytest.fixture(autouse=True)
def _small_parts(place, monkeypatch):
    monkeypatch.chdir(place)
    for module in (store, embedding):
        monkeypatch.setattr(module, "PART", PART)


def run(output, *options: str, model: str = "model.keras", pictures=("--data", "folder:data")) -> None:
    embed.main(["--run", model, *pictures, "--output", str(output), "--batch-size", "4", *options])


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".parquet", ".json")}


def test_an_index_has_the_features_of_the_model_with_path_digest_label_and_split(tmp_path):
    run(tmp_path / "f", "--dtype", "float32")
    index = open_index(str(tmp_path / "f"))
    table = index.pictures
    assert table.splits == ["train"] * 20 + ["test"] * 4
    assert {pathlib.Path(path).parent.name for path in table.paths} == {"ant", "bee"}
    assert [pathlib.Path(path).parent.name for path in table.paths] == table.labels
    assert len(set(table.digests)) == 24
    model = keras_vit.run_directory.load_model("model.keras")
    features = keras_vit.intermediates(model, "pre_logits")
    preprocess = keras_vit.preprocessing_of(model)
    images = np.stack([np.asarray(preprocess(PIL.Image.open(path))) for path in table.paths])
    np.testing.assert_allclose(index.embeddings(), np.asarray(features(images)), rtol=0, atol=1e-5)
    raw = pyarrow.parquet.read_table(tmp_path / "f" / "train-00000.parquet")
    assert raw.column_names == ["path", "digest", "label", "split", "embedding"]
    assert raw.schema.metadata[b"fingerprint"].decode() == index.description.fingerprint


def test_half_the_space_is_half_the_precision(tmp_path):
    run(tmp_path / "full", "--dtype", "float32")
    run(tmp_path / "half")
    full, half = (open_index(str(tmp_path / name)) for name in ("full", "half"))
    assert next(half.parts()).dtype == np.float16
    np.testing.assert_allclose(half.embeddings(), full.embeddings(), rtol=1e-3, atol=1e-3)


def test_a_command_that_was_killed_continues_and_ends_in_the_same_bytes(tmp_path, monkeypatch):
    run(tmp_path / "whole")
    write, count = embedding.write_part, iter(range(100))

    def killed(*arguments):
        if next(count) == 2:
            (tmp_path / "f" / "test-00000.parquet.7.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(embedding, "write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "f")
    with pytest.raises(
        UserError, match=r"is not complete, test-00000.parquet is missing; run the same keras-vit embed"
    ):
        open_index(str(tmp_path / "f"))
    before = {
        name: (tmp_path / "f" / name).stat().st_mtime_ns for name in ("train-00000.parquet", "train-00001.parquet")
    }
    run(tmp_path / "f")
    assert {name: (tmp_path / "f" / name).stat().st_mtime_ns for name in before} == before
    assert files_of(tmp_path / "f") == files_of(tmp_path / "whole")
    assert not list((tmp_path / "f").glob("*.tmp"))


def test_single_pictures_have_no_label_and_a_broken_one_is_named(tmp_path, capsys):
    run(tmp_path / "f", pictures=("loose",))
    index = open_index(str(tmp_path / "f"))
    assert len(index.pictures.paths) == 23
    assert index.pictures.labels == [None] * 23
    assert [*index.problems] == ["loose/05.png"]
    assert "Not embedded: loose/05.png" in capsys.readouterr().out


def test_features_of_two_models_never_mix(tmp_path):
    run(tmp_path / "f")
    with pytest.raises(UserError, match="has features of another model .* are never mixed; choose another --output"):
        run(tmp_path / "f", model="other.keras")
    with pytest.raises(UserError, match="has features of another model"):
        run(tmp_path / "f", "--features", "mean")
    with pytest.raises(UserError, match="has the features of other pictures"):
        run(tmp_path / "f", pictures=("loose",))
    with pytest.raises(UserError, match="has features in float16; give --dtype float16"):
        run(tmp_path / "f", "--dtype", "float32")
    run(tmp_path / "g", model="other.keras")
    (tmp_path / "f" / "train-00001.parquet").write_bytes((tmp_path / "g" / "train-00001.parquet").read_bytes())
    with pytest.raises(UserError, match="has features of another model than .*features.json says"):
        open_index(str(tmp_path / "f")).embeddings()


def test_damaged_files_are_one_sentence(tmp_path):
    run(tmp_path / "f")
    part = tmp_path / "f" / "test-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"test-00000.parquet cannot be read .*; run keras-vit embed again"):
        open_index(str(tmp_path / "f")).embeddings()
    (tmp_path / "f" / "features.json").write_text("{}")
    with pytest.raises(UserError, match=r"features.json cannot be read"):
        open_index(str(tmp_path / "f"))


def knn_of(output, *options: str, model: str = "model.keras") -> list:
    knn.main(["--run", model, "--data", "folder:data", "--neighbors", "3", "--output", str(output), *options])
    return json.loads((output / "knn.json").read_text())["results"]


def test_a_probe_reads_the_index_instead_of_computing(tmp_path, monkeypatch):
    run(tmp_path / "f", "--dtype", "float32")
    expected = knn_of(tmp_path / "computed", "--cache", str(tmp_path / "cache"))
    monkeypatch.setattr(embedding, "_computed", None)
    assert knn_of(tmp_path / "read", "--index", str(tmp_path / "f")) == expected
    assert knn_of(tmp_path / "cached", "--cache", str(tmp_path / "cache")) == expected
    with pytest.raises(UserError, match=r"has features of model.keras, but other.keras has other weights"):
        knn_of(tmp_path / "no", "--index", str(tmp_path / "f"), model="other.keras")
    with pytest.raises(UserError, match="has the features pre_logits, not token; give --features pre_logits"):
        knn_of(tmp_path / "no", "--index", str(tmp_path / "f"), "--features", "token")
    with pytest.raises(UserError, match="has the features of other pictures, labels or splits than --data"):
        knn_of(tmp_path / "no", "--index", str(tmp_path / "f"), "--split-seed", "3")


def test_a_damaged_file_of_the_cache_is_computed_again(tmp_path):
    expected = knn_of(tmp_path / "one", "--cache", str(tmp_path / "cache"))
    for file in (tmp_path / "cache").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:50])
    assert knn_of(tmp_path / "two", "--cache", str(tmp_path / "cache")) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give --data, such as folder:pictures, or pictures"),
        (["--data", "folder:data", "loose"], "Give --data, such as folder:pictures, or pictures"),
        (["nowhere"], "There is no picture 'nowhere'"),
        (["loose", "--features", "token", "--image-size", "8"], None),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path):
    command = ["--run", "model.keras", "--output", str(tmp_path / "f"), *arguments]
    if message is None:
        embed.main(command)
        assert open_index(str(tmp_path / "f")).description.features == "token"
        return
    with pytest.raises(UserError, match=message):
        embed.main(command)


def test_features_that_are_no_numbers_are_refused(tmp_path):
    model = keras_vit.run_directory.load_model("model.keras")
    weights = model.get_weights()
    weights[0][:] = np.nan
    model.set_weights(weights)
    model.save(tmp_path / "broken.keras")
    with pytest.raises(UserError, match="are not finite numbers"):
        run(tmp_path / "f", model=str(tmp_path / "broken.keras"))


def test_a_description_says_what_the_features_are_of(tmp_path):
    run(tmp_path / "f", "--image-size", "12")
    description = open_index(str(tmp_path / "f")).description
    assert dataclasses.asdict(description)["settings"] == {
        "image_size": (12, 12),
        "num_heads": None,
        "resize": None,
    } or (description.settings["image_size"] == [12, 12])
    assert description.labels == ("ant", "bee")
    assert description.splits == {"train": 20, "test": 4}
