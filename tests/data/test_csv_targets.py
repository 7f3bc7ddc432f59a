"""CSV files whose images have several classes each, or a share of each class."""

import collections
import dataclasses
import pathlib

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from training.data.dataset import balanced
from training.data.pipeline import evaluation_batches, training_batches
from training.data.sources import DataOptions, DataSet, open_source
from training.data.write import shard
from training.recipes.pretrain import find_recipe

# Images of "dog" are rare.
LINES = [f"{number}.png,{labels}" for number, labels in enumerate(("cat", "cat|sofa", "", "dog | cat", "sofa") * 8)]


def csv_file(folder: pathlib.Path, header: str, lines) -> DataOptions:
    for line in filter(None, lines):
        PIL.Image.fromarray(np.full((8, 8), 40, np.uint8)).save(folder / line.split(",")[0])
    (folder / "list.csv").write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return DataOptions(f"csv:{folder / 'list.csv'}")


@pytest.fixture(name="several", scope="module")
def _several(tmp_path_factory) -> DataSet:
    return open_source(csv_file(tmp_path_factory.mktemp("several"), "path,labels", LINES), multi_label=True)


def targets(source: DataSet) -> dict[str, list[float]]:
    """File name -> target, of both splits."""
    return {
        pathlib.Path(split.name(index)).name: split.target(tf.constant(index, tf.int64)).numpy().tolist()
        for split in (source.train, source.evaluation)
        for index in range(split.num_examples)
    }


def test_each_class_of_an_image_is_one_in_its_target(several):
    assert several.labels == ("cat", "dog", "sofa")
    assert several.multi_label
    found = targets(several)
    assert [found[f"{number}.png"] for number in range(5)] == [[1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert int(several.train.read(tf.constant(0, tf.int64))[1]) == -1


def test_a_tenth_is_kept_for_evaluation_of_rare_classes_too(several):
    assert (several.train.num_examples, several.evaluation.num_examples) == (36, 4)
    kept = [several.evaluation.target(tf.constant(index, tf.int64)).numpy() for index in range(4)]
    assert np.sum(kept, axis=0).tolist() == [3.0, 1.0, 1.0]  # of 24, 8 and 16 images


def test_another_seed_draws_other_images(tmp_path):
    data = csv_file(tmp_path, "path,labels", LINES).data
    names = []
    for seed in (None, 1, 1, 2):
        split = open_source(DataOptions(data, split_seed=seed), multi_label=True).evaluation
        names.append([split.name(index) for index in range(split.num_examples)])
    assert names[1] == names[2]
    assert names[0] != names[1] != names[3]


def test_shares_are_the_target_and_the_likeliest_class_the_label(tmp_path):
    lines = [f"{number}.png,a=0.25|b=0.7502|c=0" for number in range(20)] + ["20.png,c=1", "21.png,a = 1.0"]
    source = open_source(csv_file(tmp_path, "path,probabilities", lines))
    assert not source.multi_label
    found = targets(source)
    np.testing.assert_allclose(found["3.png"], [0.25 / 1.0002, 0.7502 / 1.0002, 0.0], rtol=1e-6)
    assert found["20.png"] == [0.0, 0.0, 1.0]
    counts = collections.Counter(source.train.labels.tolist())
    assert counts[1] > 15
    assert int(source.train.read(tf.constant(0, tf.int64))[1]) == source.train.labels[0]
    assert balanced(source.train).num_examples > source.train.num_examples


def test_a_subset_keeps_the_targets_of_its_images(several):
    part = several.train.take(np.array([5, 2]))
    expected = several.train.target(tf.constant(2, tf.int64))
    assert part.multi_label
    assert part.target(tf.constant(1, tf.int64)).numpy().tolist() == expected.numpy().tolist()


def test_of_equal_shares_the_first_class_is_the_label(tmp_path):
    lines = [f"{i}.png,{'c=0.5|a=0.5' if i % 2 else 'b=0.4|c=0.3|a=0.3'}" for i in range(20)]
    source = open_source(csv_file(tmp_path, "path,probabilities", lines))
    labels = [int(source.train.read(tf.constant(i, tf.int64))[1]) for i in range(source.train.num_examples)]
    assert source.labels == ("a", "b", "c")
    assert set(labels) == {0, 1}  # as argmax over the classes


@pytest.mark.slow
def test_training_mixes_the_targets_and_evaluation_shows_each_once(several):
    recipe = dataclasses.replace(find_recipe("digits"), batch_size=12, mixup=0.0)
    options = {"preprocessing": Preprocessing((8, 8), 1), "num_classes": 3, "seed": 3, "first_step": 0}
    batches = list(training_batches(several.train, recipe, num_steps=3, **options))
    plain = np.concatenate([labels for _, labels in batches])  # one epoch
    everything = [several.train.target(tf.constant(index, tf.int64)).numpy() for index in range(36)]
    assert plain.sum(axis=0).tolist() == np.sum(everything, axis=0).tolist()
    mixing = dataclasses.replace(recipe, mixup=1.0)
    [(_, mixed)] = training_batches(several.train, mixing, num_steps=1, **options)
    partners = np.roll(plain[:12], 1, axis=0) if recipe.mixup_partner == "next" else plain[:12][::-1]
    both = np.stack([plain[:12].ravel(), partners.ravel()], axis=1)
    shares, errors, *_ = np.linalg.lstsq(both, mixed.numpy().ravel(), rcond=None)
    assert 0.0 < shares.min() < shares.max() < 1.0
    np.testing.assert_allclose([shares.sum(), *errors], [1.0, 0.0], atol=1e-5)
    shown = list(evaluation_batches(several.evaluation, Preprocessing((8, 8), 1), num_classes=3, batch_size=3))
    labels = np.concatenate([labels[weights > 0] for _, labels, weights in shown])
    assert labels.sum(axis=0).tolist() == [3.0, 1.0, 1.0]
    assert len(labels) == 4


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("path,label,labels", "a.png,x,x"), "must name the columns path and one of label"),
        (("path,labels", "a.png,x|x", "b.png,y"), r"Line 2 of .* has the labels 'x\|x'; give different classes"),
        (("path,labels", "a.png,x", "b.png,"), "at least two classes"),
        (("path,labels", "", "", "a.png,x", "b.png,y||z"), r"Line 5 of .* has the labels 'y\|\|z'"),
        (("path,labels", 'a.png,"x\ny"', "b.png,z"), "Line 3 of .* the column labels"),
        (("path,labels", 'a.png,"x|y', "b.png,z"), "cannot be read as CSV .*unexpected end of data"),
        (("path,labels", "a.png,x,y", "b.png,z"), "Line 2 of .* no more values than .* between several"),
        (("path,labels", "a.png,x|y"), "no image to train on"),
        (("path,probabilities", "a.png,x=0.5|y=0.4"), "Line 2 of .* each class once, with a sum of 1"),
        (("path,probabilities", "a.png,x=nan|y=1"), r"Line 2 of .* give them as cat=0.7\|dog=0.3"),
        (("path,probabilities", "a.png,x=1|x=0"), "each class once"),
        (("path,probabilities", "a.png,0.5|0.5"), "each class once"),
        (("path,probabilities", "a.png,"), "in the column probabilities"),
        (("path,labels,split", "a.png,x|y,train", "b.png,z,test"), r"no image of the class 'z' to train on"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, words):
    with pytest.raises(UserError, match=words):
        open_source(csv_file(tmp_path, lines[0], lines[1:]), multi_label=True)


def test_a_class_without_an_image_to_evaluate_on_is_said(tmp_path, capsys):
    lines = ("a.png,x|y,train", "b.png,x,test")
    open_source(csv_file(tmp_path, "path,labels,split", lines), multi_label=True)
    assert "no evaluation image has the class y." in capsys.readouterr().out


def test_a_name_is_one_class_however_its_letters_are_encoded(tmp_path):
    lines = [f"{number}.png,{name}|b" for number, name in enumerate(("caf\u00e9", "cafe\u0301") * 4)]
    source = open_source(csv_file(tmp_path, " path , labels", lines), multi_label=True)
    assert source.labels == ("b", "caf\u00e9")


def test_records_do_not_take_shares_of_classes(tmp_path):
    lines = [f"{number}.png,cat={0.1 * number:.1f}|dog={1 - 0.1 * number:.1f}" for number in range(11)]
    data = csv_file(tmp_path, "path,probabilities", lines)
    with pytest.raises(UserError, match="A record holds one class of its image, but csv:.*"):
        shard(data, str(tmp_path / "shards"))
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("column", "name", "other", "warned"),
    [
        ("label", "x|y", "z", True),
        ("labels", "lynx, wild", "x", True),  # no bar separates any classes
        ("labels", "lynx, wild", "x|y", False),
        ("labels", "lynx, wild", "lynx|wild", True),
    ],
)
def test_a_name_that_may_be_several_classes_is_pointed_out(column, name, other, warned, tmp_path, capsys):
    lines = [f'{number}.png,"{name if number < 20 else other}"' for number in range(40)]
    source = open_source(csv_file(tmp_path, f"path,{column}", lines), multi_label=True)
    assert name in source.labels
    assert (f"'{name}' is one class" in capsys.readouterr().out) == warned


def test_a_command_for_one_class_and_balancing_refuse_several(tmp_path, several):
    with pytest.raises(UserError, match="have several classes each, .* not this command"):
        open_source(csv_file(tmp_path, "path,labels", LINES))
    with pytest.raises(UserError, match="these images have several classes; leave it out"):
        balanced(several.train)
