"""The nearest of stored features: as scikit-learn finds them, by a graph, and the commands similar and search."""

import csv
import json
import pathlib
import shutil

import numpy as np
import PIL.Image
import pytest
import sklearn.neighbors

import keras_vit
from keras_vit import UserError
from tests.features.places import image_place
from tests.text.towers import CLIP, SIGLIP, with_tokenizer
from training import embed, search, similar
from training.features.lookup import NeighborGraph, nearest_rows, unit_chunks, unit_length
from training.features.store import FeatureDescription, FeatureIndex, Part, open_index, write_description, write_part

pytestmark = pytest.mark.usefixtures("models_read_once")


@pytest.mark.parametrize("chunks", [(500,), (3, 200, 297)])
def test_neighbors_are_those_of_scikit_learn(chunks):
    rng = np.random.default_rng(0)
    values, queries = rng.normal(size=(500, 20)).astype(np.float32), rng.normal(size=(7, 20)).astype(np.float32)
    reference = sklearn.neighbors.NearestNeighbors(n_neighbors=9, metric="cosine").fit(values)
    distances, expected = reference.kneighbors(queries)
    parts = np.split(unit_length(values), np.cumsum(chunks)[:-1])
    cosines, rows = nearest_rows(parts, unit_length(queries), 9)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(cosines, 1.0 - distances, atol=1e-6)


def test_of_equal_neighbors_the_first_comes_first_and_a_row_of_zeros_is_like_none():
    values = unit_length(np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    cosines, rows = nearest_rows([values[:2], values[2:]], values[1:2], 4)
    assert rows.tolist() == [[1, 2, 0, 3]]
    assert cosines.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    copies = np.eye(2, dtype=np.float32)[np.arange(1000) % 2]
    assert nearest_rows([copies], copies[:1], 3)[1].tolist() == [[0, 2, 4]]


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    place = image_place(tmp_path_factory.mktemp("neighbors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        embed.main(["--run", "model.keras", "--data", "folder:data", "--output", "features"])
    return place


@pytest.fixture(autouse=True)
def _in_the_place(place, monkeypatch):
    monkeypatch.chdir(place)


def rows_of(file) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_the_image_itself_is_the_most_similar_one(tmp_path, capsys):
    shutil.copy("data/ant/03.png", tmp_path / "copy.png")
    similar.main(["--index", "features", str(tmp_path / "copy.png"), "-k", "4", "--output", str(tmp_path / "out.csv")])
    rows = rows_of(tmp_path / "out.csv")
    assert len(rows) == 4
    assert (rows[0]["path"], rows[0]["label"], rows[0]["rank"]) == ("data/ant/03.png", "ant", "1")
    assert float(rows[0]["similarity"]) == pytest.approx(1.0, abs=1e-3)
    similarities = [float(row["similarity"]) for row in rows]
    assert similarities == sorted(similarities, reverse=True)
    assert "| ant/03.png " in capsys.readouterr().out


def test_a_page_has_the_images_inside(tmp_path, capsys):
    similar.main(["--index", "features", "data/bee/01.png", "--neighbors", "3", "--output", str(tmp_path / "out.html")])
    page = (tmp_path / "out.html").read_text()
    assert "| bee/01.png " in capsys.readouterr().out
    assert "<small>bee/01.png</small>" in page
    assert page.count("data:image/jpeg;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")


def test_another_model_and_other_paths_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"features pre_logits of model.keras, but asked for .* of other.keras"):
        similar.main(["--index", "features", "--run", "other.keras", "data/ant"])
    with pytest.raises(UserError, match="There is no folder 'feature'; did you mean features"):
        similar.main(["--index", "feature", "data/ant"])
    with pytest.raises(UserError, match=r"ends in .csv or .html"):
        similar.main(["--index", "features", "data/ant", "--output", "x.txt"])
    with pytest.raises(UserError, match="asked for are the features joint"):
        search.main(["an ant", "--index", "features"])
    shutil.copytree("features", tmp_path / "cached")
    description = json.loads((tmp_path / "cached" / "features.json").read_text())
    (tmp_path / "cached" / "features.json").write_text(json.dumps({**description, "settings": {}}))  # as in the cache
    with pytest.raises(UserError, match="asked for .* of other.keras"):
        similar.main(["--index", str(tmp_path / "cached"), "--run", "other.keras", "data/ant"])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(UserError, match="None of the images could be read"):
        similar.main(["--index", "features", str(tmp_path / "broken.png")])


def test_without_faiss_an_approximate_search_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match="pip install faiss-cpu"):
        NeighborGraph(open_index("features"))


def random_index(folder: pathlib.Path, count: int) -> FeatureIndex:
    """An index of random features without images, in files of up to 2,048."""
    description = FeatureDescription("none", "0", "pre_logits", 8, "float32", (), {"pictures": count}, 0, None, {})
    write_description(folder, description)
    rng = np.random.default_rng(0)
    for number, begin in enumerate(range(0, count, 2048)):
        rows = range(begin, min(begin + 2048, count))
        digests, values = np.array(rows, np.uint64), rng.normal(size=(len(rows), 8)).astype(np.float32)
        part = Part([f"{row}.png" for row in rows], digests, [None] * len(rows), values, {})
        write_part(folder, description, "pictures", number, part)
    return open_index(str(folder))


def test_some_rows_of_an_index_are_those_of_the_whole_table(tmp_path):
    index = random_index(tmp_path, 5000)
    rows = [4999, 0, 2048, 2047, 4096]
    assert index.some(rows).paths == [f"{row}.png" for row in rows] == [index.images.paths[row] for row in rows]
    assert index.some(rows).digests == [f"{row:016x}" for row in rows]


def test_a_graph_finds_nearly_what_the_products_find(tmp_path, capsys):
    pytest.importorskip("faiss", reason="faiss is not installed")
    index = random_index(tmp_path, 5000)
    queries = unit_length(index.embeddings()[:20])
    exact = nearest_rows(unit_chunks(index), queries, 5)[1]
    for _ in range(2):  # made, and read
        graph = NeighborGraph(index)
        assert graph.recall > 0.9
        assert np.mean(graph.nearest(queries, 5)[1] == exact) > 0.9
    assert capsys.readouterr().out.count("of the 10 nearest images (100 compared)") == 2


@pytest.mark.parametrize("name", [CLIP, pytest.param(SIGLIP, marks=pytest.mark.slow)])
def test_a_text_finds_the_images_that_the_two_towers_put_first(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_tokenizer(name, tmp_path / "towers")
    rng = np.random.default_rng(1)
    (tmp_path / "loose").mkdir()
    for number in range(6):
        PIL.Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(tmp_path / "loose" / f"{number}.png")
    embed.main(["--checkpoint", "towers", "loose", "--output", "features", "--dtype", "float32"])
    index = open_index("features")
    assert index.description.features == "joint"
    search.main(["w11 w21", "--index", "features", "--output", "found.csv"])
    model = keras_vit.zero_shot("towers", ["w11 w21"])
    preprocess = keras_vit.preprocessing_of(model)
    images = np.stack([np.asarray(preprocess(PIL.Image.open(path))) for path in index.images.paths])
    logits = np.asarray(model(images))[:, 0]
    rows = rows_of(tmp_path / "found.csv")
    assert [row["path"] for row in rows] == [index.images.paths[place] for place in np.argsort(-logits)]
    cosines = np.array([float(row["similarity"]) for row in rows])
    scale = np.polyfit(cosines, np.sort(logits)[::-1], 1)  # logits are a linear function of the cosine
    np.testing.assert_allclose(np.polyval(scale, cosines), np.sort(logits)[::-1], atol=1e-3)
