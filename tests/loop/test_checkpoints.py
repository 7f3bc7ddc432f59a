"""States: whole, checked, the last two kept."""

import shutil

import keras
import numpy as np
import pytest

from keras_vit import UserError
from keras_vit.run import Run
from tests.support import full_disk
from training.loop import checkpoints


def save(folder, step):
    checkpoints.save(folder, step, {"records": [step]}, {"w": np.full(3, step, np.float32)})


def test_the_newest_state_is_the_one_that_was_saved_last_and_the_last_two_are_kept(tmp_path):
    assert checkpoints.load_latest(tmp_path) is None
    for step in (5, 12, 100_000_000):
        save(tmp_path, step)
    step, progress, arrays = checkpoints.load_latest(tmp_path)
    assert (step, progress["records"]) == (100_000_000, [100_000_000])
    np.testing.assert_array_equal(arrays["w"].fetch(), np.full(3, 1e8, np.float32))
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == [12, 100_000_000]


@pytest.mark.parametrize("damage", ["half", "empty", "one bit", "another step"])
def test_a_damaged_state_is_passed_over_for_the_one_before(damage, tmp_path, capsys):
    save(tmp_path, 5)
    save(tmp_path, 12)
    newest = max(tmp_path.iterdir())
    content = newest.read_bytes()
    if damage == "another step":
        newest = newest.rename(newest.with_name(newest.name.replace("00000012", "00000099")))
    else:
        flipped = content[:200] + bytes([content[200] ^ 1]) + content[201:]
        newest.write_bytes({"half": content[: len(content) // 2], "empty": b"", "one bit": flipped}[damage])
    assert checkpoints.load_latest(tmp_path)[0] == 5
    assert f"Skipped the damaged checkpoint {newest.name}: its hash does not match" in capsys.readouterr().out


def test_a_state_of_other_rules_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_VERSION", 1)
    save(tmp_path, 5)
    monkeypatch.undo()
    weight = keras.Variable(np.zeros(3), name="w")
    with pytest.raises(UserError, match="saved by another version"):
        checkpoints.restore(tmp_path, {"w": weight})
    save(tmp_path, 12)
    assert checkpoints.restore(tmp_path, {"w": weight}) == (12, {"records": [12]})


def test_a_full_disk_leaves_the_state_before(tmp_path, monkeypatch):
    save(tmp_path, 5)

    refused = "step 12 could not be written .*File too large.* earlier ones are intact"
    with full_disk(100), pytest.raises(UserError, match=refused):
        save(tmp_path, 12)
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000005"]
    assert checkpoints.load_latest(tmp_path)[0] == 5


def test_a_state_of_another_run_is_not_believed_and_without_a_whole_one_no_run_begins_anew_by_itself(tmp_path):
    here, there = Run.at(tmp_path / "here"), Run.at(tmp_path / "there")
    for run in (here, there):
        run.start({"epochs": 3}, ("ant", "bee"))
    save(there.path / "checkpoints", 12)
    assert checkpoints.load_latest(there.path / "checkpoints")[0] == 12
    for state in (there.path / "checkpoints").iterdir():
        shutil.copy(state, here.path / "checkpoints")
    with pytest.raises(UserError, match="are damaged, so the run cannot continue"):
        checkpoints.load_latest(here.path / "checkpoints")
