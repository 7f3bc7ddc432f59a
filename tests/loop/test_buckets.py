"""Runs whose every path is in a bucket, on TensorFlow's ram://, with a file system that fails now and then."""

import collections
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.files import remote
from keras_vit.files.remote import to_path
from keras_vit.files.transfer import TransferError
from training import evaluate, pretrain, shard
from training.loop import checkpoints, setup
from training.loop.run import Run, locked

COMMAND = [
    "digits", "--deterministic", "--seed", "5", "--epochs", "2", "--batch-size", "16", "--warmup-steps", "1",
    "--checkpoint-every", "2", "--model.num-layers", "1", "--model.hidden-size", "24", "--model.mlp-dim", "48",
]  # fmt: skip
RECORDS = "tfrecord:ram://data/digits/*.tfrecord"


class Interrupted(Exception):
    """Stands for a kill."""


class Gfile:
    """tf.io.gfile that counts its calls for buckets, and fails every n-th of them: before or after it was done."""

    def __init__(self, monkeypatch, every: int = 0):
        self.calls: collections.Counter = collections.Counter()
        self._every = every
        names = ("copy", "exists", "glob", "isdir", "listdir", "makedirs", "remove", "rename", "rmtree", "stat", "walk")
        for name in (*names, "GFile"):
            monkeypatch.setattr(tf.io.gfile, name, self._counted(name, getattr(tf.io.gfile, name)))
        monkeypatch.setattr(remote, "_PAUSES", (0.0,) * len(remote._PAUSES))

    def _counted(self, name: str, call):
        def counted(*arguments, **options):
            self.calls[name] += 1
            number = self.calls.total()
            fails = self._every and number % self._every == 0
            if fails and number // self._every % 2:
                raise tf.errors.UnavailableError(None, None, "503")
            result = call(*arguments, **options)
            if fails:
                raise tf.errors.UnavailableError(None, None, "the answer was lost")
            return result

        return counted


def train(workdir, data: str = RECORDS) -> None:
    pretrain.main([*COMMAND, "--data", data, "--workdir", str(workdir)])


def state(workdir) -> dict[str, np.ndarray]:
    return checkpoints.load_latest(Run(to_path(workdir)).checkpoints_folder)[2]


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory) -> dict[str, np.ndarray]:
    """The end of a run that reads 48 records of a bucket."""
    pictures, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(60):
        file = pictures / ("train" if number < 48 else "test") / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(rng.integers(0, 256, (8, 8, 1), np.uint8)).numpy())
    shard.main(["--data", f"folder:{pictures}", "--output", "ram://data/digits", "--shards", "2"])
    train("ram://runs/undisturbed")
    return state("ram://runs/undisturbed")


@pytest.mark.slow
def test_a_run_in_a_bucket_that_was_killed_ends_in_the_same_bits(undisturbed, monkeypatch, capsys):
    gfile, save = Gfile(monkeypatch, every=10), checkpoints.save

    def save_and_stop(folder, step, progress, arrays):
        save(folder, step, progress, arrays)
        if step == 4:
            raise Interrupted

    monkeypatch.setattr(checkpoints, "save", save_and_stop)
    with pytest.raises(Interrupted):
        train("ram://runs/killed")
    monkeypatch.setattr(checkpoints, "save", save)
    train("ram://runs/killed")
    assert "Continuing after step 4, in epoch 2." in capsys.readouterr().out
    assert gfile.calls.total() > 20
    found = state("ram://runs/killed")
    assert found.keys() == undisturbed.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, undisturbed[name], err_msg=name)


def test_a_finished_run_in_a_bucket_is_evaluated(undisturbed, capsys):
    evaluate.main(["--run", "ram://runs/undisturbed", "--data", RECORDS])
    assert "report in ram://runs/undisturbed/evaluation.md" in capsys.readouterr().out
    assert to_path("ram://runs/undisturbed/evaluation.md").read_text().startswith("# undisturbed on")


@pytest.mark.slow
def test_a_finished_run_in_a_bucket_is_exported_and_inspected(undisturbed, capsys):
    from export.saved_model.__main__ import main as export_saved_model
    from export.tflite.__main__ import main as export_tflite
    from keras_vit.inspection.__main__ import main as inspect

    run = ["--run", "ram://runs/undisturbed"]
    export_saved_model([*run, "--output", "ram://exports/served"])
    export_tflite([*run, "--output", "ram://exports/phone", "--formats", "float32"])
    inspect([*run, "--output", "ram://exports/figures", "--count", "4", "--show", "1"])
    capsys.readouterr()
    for name in ("served/1/saved_model.pb", "served/1/report.json", "phone/model-float32.tflite", "figures/index.html"):
        assert to_path(f"ram://exports/{name}").stat().st_size > 100
    evaluate.main(["--run", "ram://exports/served", "--data", RECORDS, "--output", "ram://exports/evaluation"])
    evaluate.main(["--run", "ram://exports/phone/model-float32.tflite", "--data", RECORDS, "--output", "ram://e"])
    assert capsys.readouterr().out.count("Accuracy") == 2
    evaluate.main(["--run", "ram://runs/undisturbed", "--data", RECORDS, "--save-predictions"])


def test_a_file_that_only_credentials_open_is_read_through_tensorflow(monkeypatch):
    from keras_vit.checkpoints import download

    def refuse(*_):
        raise UserError("cannot be downloaded") from TransferError("403 Forbidden", retry=False)

    monkeypatch.setattr(download, "_fetch", refuse)
    monkeypatch.setattr(download, "_from_bucket", lambda source: source)
    assert download.find_checkpoint("gs://private/x.npz") == "gs://private/x.npz"
    with pytest.raises(UserError, match="cannot be downloaded"):
        download.find_checkpoint("https://private/x.npz")


def test_a_checkpoint_file_in_a_bucket_is_read(tmp_path):
    to_path("ram://models/x.npz").parent.mkdir()
    to_path("ram://models/x.npz").write_bytes(b"content")
    assert keras_vit.find_checkpoint("ram://models/x.npz").read_bytes() == b"content"
    with pytest.raises(UserError, match="There is no file or folder ram://models/y.npz; check the path"):
        keras_vit.find_checkpoint("ram://models/y.npz")


def test_workers_compare_the_images_of_their_data(monkeypatch):
    compared = {}

    def note(strategy, values):
        compared.update(values)
        raise Interrupted

    monkeypatch.setattr(setup, "check_equal_on_workers", note)
    with pytest.raises(Interrupted):
        train("ram://runs/compared", "digits")
    assert compared["the images of their data, by its files or by the index of its records"] is not None
    assert len(compared) == 2


ARRAYS = {"weight": np.arange(5.0)}


@pytest.fixture(name="folder")
def _folder(request) -> remote.RemotePath:
    folder = to_path(f"ram://checkpoints/{request.node.name}/checkpoints")
    folder.mkdir(parents=True)
    (folder.parent / "config.json").write_text('{"id": "1"}')
    return folder


def test_a_half_uploaded_checkpoint_is_not_believed(folder, monkeypatch):
    checkpoints.save(folder, 1, {}, ARRAYS)

    def breaks(source, target, overwrite=False):
        data = pathlib.Path(source).read_bytes()
        with tf.io.gfile.GFile(target, "wb") as stream:
            stream.write(data[: len(data) // 2])

    with monkeypatch.context() as patched:
        Gfile(patched)
        patched.setattr(tf.io.gfile, "copy", breaks)
        with pytest.raises(
            UserError, match="step 2 could not be written to ram:.* bytes arrived of .* that of step 1 is"
        ):
            checkpoints.save(folder, 2, {}, ARRAYS)
    assert checkpoints.load_latest(folder)[0] == 1


def test_the_pointer_names_the_checkpoint_to_load_and_a_damaged_one_is_skipped(folder, capsys):
    for step in (1, 2):
        checkpoints.save(folder, step, {}, ARRAYS)
    latest, before = (folder / "latest").read_text(), next(folder.glob("step-00000001-*")).name
    assert latest.startswith("step-00000002-")
    (folder / "latest").write_text(before)  # the process was killed before it wrote the pointer
    assert checkpoints.load_latest(folder)[0] == 1
    (folder / before).write_bytes((folder / before).read_bytes()[:-9])
    assert checkpoints.load_latest(folder)[0] == 2
    assert f"Skipped the damaged checkpoint {before}" in capsys.readouterr().out


def test_a_bucket_that_does_not_answer_is_no_damaged_checkpoint(folder, monkeypatch):
    checkpoints.save(folder, 1, {}, ARRAYS)
    Gfile(monkeypatch, every=1)
    with pytest.raises(
        UserError, match="ram://checkpoints/.* cannot be read or written .*503.*; check the name of the"
    ):
        checkpoints.load_latest(folder)


def test_a_bucket_has_no_lock_and_the_command_says_so(folder, monkeypatch, capsys):
    gfile = Gfile(monkeypatch)
    with locked(folder.parent), locked(folder.parent):
        pass
    sentence = f"{folder.parent} has no locks; make sure that no other process trains there."
    assert capsys.readouterr().out.splitlines() == [sentence, sentence]
    assert not gfile.calls


def test_requests_of_a_checkpoint_are_as_documented(folder, monkeypatch):
    for step in (1, 2):
        checkpoints.save(folder, step, {}, ARRAYS)
    gfile = Gfile(monkeypatch)
    checkpoints.save(folder, 3, {}, ARRAYS)
    assert gfile.calls.total() == 9, gfile.calls
    checkpoints.load_latest(folder)
    assert gfile.calls.total() == 9 + 7, gfile.calls


@pytest.mark.parametrize("error", [tf.errors.PermissionDeniedError, tf.errors.NotFoundError])
def test_a_bucket_that_may_not_be_written_is_one_sentence(error, monkeypatch):
    def refuse(*_):
        raise error(None, None, "The caller may not do this,\nor there is no such bucket")

    monkeypatch.setattr(tf.io.gfile, "makedirs", refuse)
    with pytest.raises(
        UserError, match=r"^ram://none/run cannot be read or written \(The caller .* bucket\); check the"
    ):
        train("ram://none/run", "digits")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("folder:ram://none", "There is no folder 'ram://none'; --data folder:PATH takes"),
        ("tfrecord:ram://none/*.tfrecord", "No file is called 'ram://none/.*tfrecord'; --data tfrecord:GLOB takes"),
        ("folder:none://bucket", "none://bucket cannot be .*; TensorFlow has no file system of this scheme"),
    ],
)
def test_data_in_a_bucket_that_is_not_there_are_one_sentence(data, words, tmp_path):
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", data)
