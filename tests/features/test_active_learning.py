"""What to label next: better than random images, no copies, an honest gain, and the command."""

import csv

import numpy as np
import pytest
import sklearn.datasets

import keras_vit
from tests.features.places import WIDER, digit_images, write_images
from tests.support import randomize
from training import label_next
from training.features.active_learning import choose, head_probabilities, worth
from training.features.probe import Features

pytestmark = pytest.mark.usefixtures("models_read_once")


def digits_features() -> Features:
    """Features (1797, 64) float32 and labels (1797,) of handwritten digits."""
    values, labels = sklearn.datasets.load_digits(return_X_y=True)
    return Features(values.astype(np.float32), labels)


def accuracy_after(chosen, rounds: int) -> float:
    """The accuracy on the last 800 images of a head fitted to the 20 that `chosen(known, free)` takes in each round."""
    digits, known = digits_features(), np.zeros(0, np.int64)
    for _ in range(rounds):
        free = np.setdiff1d(np.arange(len(digits.labels) - 800), known)
        known = np.concatenate([known, free[chosen(known, free)]])
    assert len(known) == rounds * 20
    classes, probabilities = head_probabilities(digits.take(known), digits.values[-800:])
    return float(np.mean(classes[probabilities.argmax(axis=1)] == digits.labels[-800:]))


def test_chosen_images_teach_more_than_random_ones():
    digits, rng = digits_features(), np.random.default_rng(0)
    for rounds in (2, 6):  # with few labels, and with more
        ours = accuracy_after(lambda known, free: choose(digits.take(known), digits.values[free], 20).rows, rounds)
        random = [accuracy_after(lambda _, free: rng.choice(len(free), 20, replace=False), rounds) for _ in range(5)]
        assert ours > np.mean(random) + 0.01


def test_of_copies_one_is_chosen_none_of_a_labelled_image_and_without_labels_typical_ones():
    digits = digits_features()
    unlabelled = np.concatenate([np.repeat(digits.values[100:110], 5, axis=0), digits.values[:20]])
    for few in (4, 20):  # of typical images, and of unsure ones
        choice = choose(digits.take(np.arange(few)), unlabelled, 15)
        assert len({*(choice.rows[choice.rows < 50] // 5)}) == len(choice.rows[choice.rows < 50])
        assert not {*choice.rows} & {*range(50, 50 + few)}
    without_labels = choose(digits.take(np.arange(0)), digits.values[:200], 10)
    assert (without_labels.typical, len(without_labels.rows)) == (True, 10)
    assert (without_labels.suggested == -1).all()


def test_more_labels_are_worth_something_until_they_are_not():
    digits = digits_features()
    few = worth(digits.take(np.arange(120)), 100)
    assert "raise the accuracy" in few
    assert "hardly help" not in few
    assert "More labels will hardly help" in worth(digits, 50)
    assert "label four images of each class" in worth(digits.take(np.arange(12)), 10)


def test_the_command_writes_a_list_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.features.active_learning._DRAWS", 2)
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    images, labels = digit_images(120), digits_features().labels[:80]
    for label in range(10):
        write_images(tmp_path / "labelled" / str(label), images[:80][labels == label])
    write_images(tmp_path / "new", images[80:])
    (tmp_path / "new" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    model = randomize(keras_vit.build(WIDER, image_size=8, channels=1, num_classes=None))
    model.save(tmp_path / "backbone.keras")
    arguments = ["--checkpoint", str(tmp_path / "backbone.keras"), "--data", f"folder:{tmp_path / 'labelled'}"]
    output = tmp_path / "next"
    label_next.main([*arguments, "--unlabelled", str(tmp_path / "new"), "--count", "7", "--output", str(output)])
    with (output / "label_next.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["path"] for row in rows}) == 7
    assert all(row["suggested"] in map(str, range(10)) and row["label"] == "" for row in rows)
    assert (output / "label_next.html").read_text().count("<img") == 7
    printed = capsys.readouterr().out
    assert "broken.png" in printed
    assert "7 of 40 images" in printed
