"""Confident learning, and the page on which a person reviews a data set."""

import csv
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from keras_vit import UserError
from tests.browser import open_browser
from tests.features.places import image_place
from training import embed, review
from training.features import findings
from training.features.findings import confident_joint, suspicious_labels
from training.features.linear_models import out_of_fold_probabilities
from training.features.store import NO_SPLIT, Part, open_index, write_description, write_part

pytestmark = pytest.mark.usefixtures("models_read_once")


def test_the_confident_joint_is_that_of_the_paper():
    labels = np.array([0, 0, 0, 1, 1, 1])
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.3, 0.7], [0.2, 0.8], [0.4, 0.6]])
    # Thresholds: the means 0.6 of the class 0 and 0.7 of the class 1. The third image counts as class 1, the last
    # reaches neither threshold; the rows are scaled to three images each.
    np.testing.assert_allclose(confident_joint(labels, probabilities), [[2.0, 1.0], [0.0, 3.0]])
    assert suspicious_labels(labels, probabilities).tolist() == [2]


def blobs(seed: int, wrong_share: float = 0.05) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features (600, 16), labels with errors (600,), which of them are wrong)."""
    rng = np.random.default_rng(seed)
    truth = np.arange(600) % 6
    values = (rng.normal(size=(6, 16))[truth] + 0.7 * rng.normal(size=(600, 16))).astype(np.float32)
    wrong = np.zeros(600, bool)
    wrong[rng.choice(600, int(600 * wrong_share), replace=False)] = True
    return values, np.where(wrong, (truth + rng.integers(1, 6, 600)) % 6, truth), wrong


def test_wrong_labels_are_found_and_the_worst_comes_first():
    values, labels, wrong = blobs(0)
    probabilities = out_of_fold_probabilities(values, labels, np.arange(600), 6, findings.HEAD_C)
    found = suspicious_labels(labels, probabilities)
    assert wrong[found].sum() >= 0.8 * wrong.sum()
    assert wrong[found[:20]].mean() >= 0.9


def test_an_image_is_judged_by_heads_that_never_saw_its_copies():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=(60, 400)).astype(np.float32), 2, axis=0)  # two copies of each, without classes
    labels = np.repeat(rng.integers(0, 2, 60), 2)
    groups = np.repeat(np.arange(60), 2)
    apart = out_of_fold_probabilities(values, labels, groups, 2, 1.0).argmax(1) == labels
    known = out_of_fold_probabilities(values, labels, np.arange(120), 2, 1.0).argmax(1) == labels
    assert apart.mean() < 0.7 < known.mean()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_labels_are_found_as_well_as_by_cleanlab_on_the_same_probabilities(seed):
    filters = pytest.importorskip("cleanlab.filter", reason="cleanlab is not installed")
    values, labels, wrong = blobs(seed)
    probabilities = out_of_fold_probabilities(values, labels, np.arange(600), 6, findings.HEAD_C)
    ours = suspicious_labels(labels, probabilities)
    theirs = np.flatnonzero(filters.find_label_issues(labels, probabilities))
    assert len({*ours} ^ {*theirs}) <= 0.1 * len(theirs)
    assert wrong[ours].mean() >= wrong[theirs].mean() - 0.02


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """A folder of images with a copy in the other class, their index, and that of the images without classes."""
    place = image_place(tmp_path_factory.mktemp("review"))
    # Every tenth is for evaluation, so this copy is in the other split, too.
    (place / "data" / "bee" / "0.png").write_bytes((place / "data" / "ant" / "03.png").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        embed.main(["--run", "model.keras", "--data", "folder:data", "--group", "none", "--output", "features"])
        index, values = open_index("features"), open_index("features").embeddings()
        description = dataclasses.replace(index.description, labels=(), splits={NO_SPLIT: len(values)}, data=None)
        digests = np.array([int(digest, 16) for digest in index.images.digests], np.uint64)
        part = Part(index.images.paths, digests, [None] * len(values), values, {})
        write_description(place / "unlabeled", description)
        write_part(place / "unlabeled", description, NO_SPLIT, 0, part)
    return place


@pytest.fixture(autouse=True)
def _in_the_place(place, monkeypatch):
    monkeypatch.chdir(place)


def test_copies_in_two_splits_are_on_the_page_and_in_the_file(tmp_path, capsys):
    review.main(["--index", "features", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "in two splits." in printed
    start = "auto --data folder:data --checkpoint model.keras"
    assert f"{start} --exclude {tmp_path}/decisions.csv" in printed
    rows = {row["path"]: row for row in csv.DictReader((tmp_path / "decisions.csv").read_text().splitlines())}
    assert rows["data/ant/03.png"]["digest"] == rows["data/bee/0.png"]["digest"]
    assert "copy" in rows["data/ant/03.png"]["reason"]
    assert {row["decision"] for row in rows.values()} == {"keep"}
    page = (tmp_path / "review.html").read_text()
    assert "the same file, <b>in two splits</b>, <b>different labels</b>" in page
    assert "Coverage of the classes" in page
    assert "data:image/jpeg;base64," in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert {one["path"] for one in data["rows"].values()} == rows.keys()


def test_decisions_that_were_made_are_kept_by_the_next_review(tmp_path):
    review.main(["--index", "features", "--output", str(tmp_path)])
    file = tmp_path / "decisions.csv"
    lines = file.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("data/bee/0.png"))
    path, digest, *_ = lines[number].split(",")
    lines[number] = f"{path},{digest},relabel,ant,mine"
    file.write_text("\n".join(lines) + "\n")
    review.main(["--index", "features", "--output", str(tmp_path)])
    rows = {row["path"]: row for row in csv.DictReader(file.read_text().splitlines())}
    assert (rows[path]["decision"], rows[path]["new_label"]) == ("relabel", "ant")
    assert '"decision": "relabel", "label": "ant"' in (tmp_path / "review.html").read_text()


def test_images_without_classes_are_reviewed_for_copies_and_odd_ones(tmp_path):
    review.main(["--index", "unlabeled", "--output", str(tmp_path)])
    page = (tmp_path / "review.html").read_text()
    assert "Unlike all others" in page
    assert "Suspicious labels" not in page


@pytest.mark.parametrize("counts", [(2, 2), (6, 1), (3, 3)])
def test_too_few_images_are_reviewed_without_their_labels(counts, tmp_path, capsys):
    index = open_index("features")
    names = index.description.labels[:2]
    chosen = [np.flatnonzero(np.array(index.images.labels) == n)[:k] for n, k in zip(names, counts, strict=True)]
    rows = np.concatenate(chosen)
    description = dataclasses.replace(index.description, splits={"train": len(rows)})
    digests = np.arange(len(rows), dtype=np.uint64)
    labels = [index.images.labels[row] for row in rows]
    part = Part([index.images.paths[row] for row in rows], digests, labels, index.embeddings()[rows], {})
    write_description(tmp_path / "few", description)
    write_part(tmp_path / "few", description, "train", 0, part)
    review.main(["--index", str(tmp_path / "few"), "--duplicate-similarity", "1"])
    assert "The labels are not judged" in capsys.readouterr().out


def test_mistakes_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="features.json"):
        review.main(["--index", "data"])
    with pytest.raises(UserError, match=r"must be in \(0, 1\]"):
        review.main(["--index", "features", "--duplicate-similarity", "1.5"])


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_person_decides_on_the_page_and_saves_the_file(tmp_path, width):
    review.main(["--index", "features", "--output", str(tmp_path)])
    with open_browser() as page:
        page.open((tmp_path / "review.html").as_uri(), width)
        assert page.overflow() <= 0
        keep = "blob => { blob.text().then(text => saved = text); return '#'; }"
        page.evaluate(f"window.saved = ''; URL.createObjectURL = {keep}")
        page.evaluate("document.querySelector('.card[data-row] input[value=drop]').click()")
        page.evaluate("document.getElementById('save').click()")
        page.wait_for("saved")
        saved = page.evaluate("saved")
        assert not page.problems
    assert saved.splitlines()[0] == "path,digest,decision,new_label,reason"
    assert saved.count(",drop,") == 1
