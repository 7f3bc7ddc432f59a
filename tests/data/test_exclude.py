"""`--exclude decisions.csv`: images that are left out, and those with another label."""

import hashlib
import pathlib

import numpy as np
import PIL.Image
import pytest

from keras_vit import UserError
from training.data.sources import DataOptions, open_source

HEADER = "path,digest,decision,new_label,reason\n"


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder of two classes with three images in train and two in test each; one is there twice."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 2)):
        for label in ("ant", "bee"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                PIL.Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "data/train/bee/copy.png").write_bytes((tmp_path / "data/train/ant/1.png").read_bytes())
    return tmp_path


def line(path: str, decision: str, label: str = "") -> str:
    digest = hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8).hexdigest()
    return f"{path},{digest},{decision},{label},\n"


def labeled(data: str = "folder:data", exclude: str | None = "decisions.csv") -> dict[str, str]:
    """Path -> class of all images."""
    source = open_source(DataOptions(data, exclude=exclude))
    return {
        split.name(index): source.labels[split.labels[index]]
        for split in (source.train, source.evaluation)
        for index in range(split.num_examples)
    }


def test_dropped_images_are_left_out_and_relabeled_ones_have_the_new_label(place, capsys):
    (place / "decisions.csv").write_text(
        HEADER
        + line("data/train/bee/copy.png", "drop")  # not the other one
        + line("data/test/bee/1.png", "relabel", "ant")
        + line("data/train/bee/0.png", "keep", "ant")
    )
    before, after = labeled(exclude=None), labeled()
    assert before.keys() - after.keys() == {"data/train/bee/copy.png"}
    assert {path for path in after if before[path] != after[path]} == {"data/test/bee/1.png"}
    assert after["data/test/bee/1.png"] == "ant"
    assert "decisions.csv: 1 of 11 images is left out, and 1 has another label." in capsys.readouterr().out


def test_an_image_is_known_by_its_content_after_the_folder_was_moved(place):
    (place / "decisions.csv").write_text(HEADER + line("data/train/ant/0.png", "drop"))
    (place / "data").rename(place / "moved")
    assert "moved/train/ant/0.png" not in labeled("folder:moved")
    (place / "moved/train/ant/0.png").write_bytes((place / "moved/train/ant/2.png").read_bytes())  # another image
    assert "moved/train/ant/0.png" in labeled("folder:moved")


def test_a_csv_file_of_images_is_decided_in_the_same_way(place):
    paths = sorted(map(str, pathlib.Path("data").rglob("?.png")), reverse=True)
    (place / "list.csv").write_text("path,label\n" + "".join(f"{path},{path.split('/')[2]}\n" for path in paths))
    (place / "decisions.csv").write_text(HEADER + line(paths[0], "drop") + line(paths[1], "relabel", "ant"))
    before, found = labeled("csv:list.csv", exclude=None), labeled("csv:list.csv")
    assert before.keys() - found.keys() == {paths[0]}
    assert (before[paths[1]], found[paths[1]]) == ("bee", "ant")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a.png,00,remove,,\n", "Line 2 .* decision 'remove'"),
        ("a.png,00,relabel,,\n", "Line 2 .* a new_label"),
        ("a.png,00\n", "Line 2 .* decision ''"),
    ],
)
def test_wrong_files_are_one_sentence(rows, message, place):
    (place / "decisions.csv").write_text(HEADER + rows)
    with pytest.raises(UserError, match=message):
        labeled()


def test_what_the_data_do_not_allow_is_one_sentence(place):
    with pytest.raises(UserError, match=r"There is no file 'none.csv'; --exclude takes decisions.csv"):
        labeled(exclude="none.csv")
    with pytest.raises(UserError, match="--exclude applies only to --data folder"):
        labeled("digits", exclude="none.csv")
    (place / "decisions.csv").write_text(HEADER + line("data/train/ant/0.png", "relabel", "aunt"))
    with pytest.raises(UserError, match="the label 'aunt', which the data do not have; correct it; the nearest: ant"):
        labeled()
    (place / "decisions.csv").write_text(HEADER + "".join(line(f"data/test/ant/{n}.png", "drop") for n in (0, 1)))
    with pytest.raises(UserError, match="The class 'ant' of .* drops has no image"):
        labeled()
