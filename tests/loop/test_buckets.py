"""Runs whose every path is in a bucket, on TensorFlow's ram://, with a file system that fails now and then."""

import collections
import pathlib
import re
import time

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.files.atomic import locked
from keras_vit.files.remote import RemotePath, to_path
from keras_vit.files.transfer import TransferError
from keras_vit.run import Run
from tests.interruptions import killed_after
from tests.support import fetched, without_pauses
from training import evaluate, pretrain, shard
from training.data.sources import open_source
from training.data.tfrecord import record_lengths
from training.loop import checkpoints
from training.options.common import DataOptions

COMMAND = [
    "digits", "--deterministic", "--seed", "5", "--epochs", "2", "--batch-size", "16", "--warmup-steps", "1",
    "--checkpoint-every", "2", "--model.num-layers", "1", "--model.hidden-size", "24", "--model.mlp-dim", "48",
]  # fmt: skip
RECORDS = "tfrecord:ram://data/digits/*.tfrecord"


class Gfile:
    """tf.io.gfile that counts its calls for buckets, and how many are under way at the same time.

    It fails every n-th of them, before or after it was done, and takes so many seconds longer for each.
    """

    def __init__(self, monkeypatch, every: int = 0, latency: float = 0.0):
        self.calls: collections.Counter = collections.Counter()
        self.most_at_once = 0
        self._every, self._latency = every, latency
        self._under_way: list[str] = []  # appended to and shortened by several threads
        names = ("copy", "exists", "glob", "isdir", "listdir", "makedirs", "remove", "rename", "rmtree", "stat", "walk")
        for name in (*names, "GFile"):
            monkeypatch.setattr(tf.io.gfile, name, self._counted(name, getattr(tf.io.gfile, name)))
        without_pauses(monkeypatch)

    def _counted(self, name: str, call):
        def counted(*arguments, **options):
            self.calls[name] += 1
            number = self.calls.total()
            fails = self._every and number % self._every == 0
            if fails and number // self._every % 2:
                raise tf.errors.UnavailableError(None, None, "503")
            self._under_way.append(name)
            self.most_at_once = max(self.most_at_once, len(self._under_way))
            time.sleep(self._latency)
            self._under_way.pop()
            result = call(*arguments, **options)
            if fails:
                raise tf.errors.UnavailableError(None, None, "the answer was lost")
            return result

        return counted


def train(workdir, data: str = RECORDS) -> None:
    pretrain.main([*COMMAND, "--data", data, "--workdir", str(workdir)])


def state(workdir) -> dict[str, np.ndarray]:
    return fetched(checkpoints.load_latest(Run.at(to_path(workdir)).path / "checkpoints")[2])


@pytest.fixture(name="calls", scope="module")
def _calls(tmp_path_factory) -> dict[str, int]:
    """The calls of a run that reads 48 records of a bucket, every call 2 ms late: to open the data, and all."""
    images, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(60):
        file = images / ("train" if number < 48 else "test") / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(rng.integers(0, 256, (8, 8, 1), np.uint8)).numpy())
    shard.main(["--data", f"folder:{images}", "--output", "ram://data/digits", "--shards", "2"])
    with pytest.MonkeyPatch.context() as patched:
        gfile = Gfile(patched, latency=0.002)
        open_source(DataOptions(RECORDS))
        opened = gfile.calls.total()
        train("ram://runs/undisturbed")
        return {"opened": opened, "trained": gfile.calls.total() - opened}


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(calls) -> dict[str, np.ndarray]:
    """The end of that run."""
    return state("ram://runs/undisturbed")


@pytest.mark.slow
def test_a_run_in_a_bucket_that_was_killed_ends_in_the_same_bits(undisturbed, monkeypatch, capsys):
    gfile = Gfile(monkeypatch, every=10)

    with killed_after(4):
        train("ram://runs/killed")
    train("ram://runs/killed")
    assert "Continuing after step 4, in epoch 2." in capsys.readouterr().out
    assert gfile.calls.total() > 20
    actual = state("ram://runs/killed")
    assert actual.keys() == undisturbed.keys()
    for name, array in actual.items():
        np.testing.assert_array_equal(array, undisturbed[name], err_msg=name)


@pytest.mark.slow
def test_a_finished_run_in_a_bucket_is_evaluated(undisturbed, capsys):
    evaluate.main(["--run", "ram://runs/undisturbed", "--data", RECORDS])
    assert "report in ram://runs/undisturbed/report.html" in capsys.readouterr().out
    assert "predictions.csv" in {file.name for file in to_path("ram://runs/undisturbed").iterdir()}
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


def test_a_file_that_only_credentials_open_is_read_through_tensorflow(tmp_path, monkeypatch):
    from keras_vit.checkpoints import find as download

    def refuse(*_, **__):
        raise UserError("cannot be downloaded") from TransferError("403 Forbidden", retry=False)

    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path))
    monkeypatch.setattr(download, "download_file", refuse)
    monkeypatch.setattr(download, "local_copy", lambda source: source)
    assert download.find_checkpoint("gs://private/x.npz") == "gs://private/x.npz"
    with pytest.raises(UserError, match="cannot be downloaded"):
        download.find_checkpoint("https://private/x.npz")


def test_a_checkpoint_file_in_a_bucket_is_read(tmp_path):
    to_path("ram://models/x.npz").parent.mkdir()
    to_path("ram://models/x.npz").write_bytes(b"content")
    assert keras_vit.find_checkpoint("ram://models/x.npz").read_bytes() == b"content"
    with pytest.raises(UserError, match="ram://models/y.npz cannot be read .*check the name"):
        keras_vit.find_checkpoint("ram://models/y.npz")


ARRAYS = {"weight": np.arange(5.0)}


@pytest.fixture(name="folder")
def _folder(request) -> RemotePath:
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
        with pytest.raises(UserError, match="step 2 could not be written .* earlier ones are intact"):
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
    with pytest.raises(UserError, match="ram://checkpoints/.* cannot be read or written .*503"):
        checkpoints.load_latest(folder)


def test_a_bucket_has_no_lock_and_the_command_says_so(folder, monkeypatch, capsys):
    gfile = Gfile(monkeypatch)
    with locked(folder.parent), locked(folder.parent):
        pass
    sentence = f"{folder.parent} has no locks; make sure that no other process trains there."
    assert capsys.readouterr().out.splitlines() == [sentence, sentence]
    assert not gfile.calls


def documented(row: str) -> list[int]:
    """The numbers in a row of the table of docs/reference/devices.md."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "devices.md").read_text()
    return [int(number) for number in re.findall(r"\d+", re.search(rf"^\| {row} \|(.*)$", text, re.MULTILINE)[1])]


def test_requests_of_a_checkpoint_are_as_documented(folder, monkeypatch):
    for step in (1, 2):
        checkpoints.save(folder, step, {}, ARRAYS)
    gfile = Gfile(monkeypatch)
    checkpoints.save(folder, 3, {}, ARRAYS)
    assert [gfile.calls.total()] == documented("a checkpoint"), gfile.calls
    gfile.calls.clear()
    checkpoints.load_latest(folder)
    assert [gfile.calls.total()] == documented("to continue"), gfile.calls


@pytest.mark.slow
def test_requests_of_a_run_are_as_documented(calls):
    opening, per_file = documented("to open TFRecord files")
    assert calls["opened"] == opening + 4 * per_file
    # Two epochs of three steps, with checkpoints after the steps 2, 3, 4 and 6. The first two remove none.
    (whole,), (epoch,), (checkpoint,) = map(documented, ("begin and end of a run", "an epoch", "a checkpoint"))
    assert calls["trained"] == calls["opened"] + whole + 2 * epoch + 4 * checkpoint - 2


def reads_and_bytes(work) -> np.ndarray:
    """What this process, TensorFlow included, reads of files in the meantime: calls of the system, and bytes."""

    def now() -> np.ndarray:
        counts = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
        return np.array([int(counts["syscr"]), int(counts["rchar"])])

    before = now()
    work()
    return now() - before


@pytest.mark.skipif(not pathlib.Path("/proc/self/io").exists(), reason="only Linux counts the reads of a process")
def test_reads_of_an_image_are_as_documented(tmp_path):
    for number in range(24):
        file = tmp_path / "pictures" / ("train" if number < 12 else "test") / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(np.eye(8, dtype=np.uint8)[..., None]).numpy())
    shard.main(["--data", f"folder:{tmp_path}/pictures", "--output", f"{tmp_path}/records", "--shards", "1"])

    def per_image(data: str) -> np.ndarray:
        split = open_source(DataOptions(data)).train
        few, many = (tf.data.Dataset.range(count).map(split.read) for count in (4, 12))
        list(few)  # loads libraries
        return (reads_and_bytes(lambda: list(many)) - reads_and_bytes(lambda: list(few))) / (12 - 4)

    record = (tmp_path / "records/train-00000-of-00001.tfrecord").stat().st_size / 12
    reads = documented("an image of a TFRecord file")[0]
    np.testing.assert_array_equal(per_image(f"tfrecord:{tmp_path}/records/*.tfrecord"), [reads, record + 1])
    reads = documented("an image of a folder")[0]
    # Of a local file, one more read finds its end.
    np.testing.assert_array_equal(per_image(f"folder:{tmp_path}/pictures"), [reads + 1, file.stat().st_size])


def test_records_of_many_files_are_looked_for_at_the_same_time(monkeypatch):
    for number in range(32):
        with tf.io.TFRecordWriter(f"ram://data/many/{number}.tfrecord") as writer:
            writer.write(b"record")
    gfile = Gfile(monkeypatch, latency=0.05)
    actual = record_lengths([f"ram://data/many/{number}.tfrecord" for number in range(32)])
    assert [lengths.tolist() for lengths in actual.values()] == [[6]] * 32
    assert gfile.most_at_once >= 16


@pytest.mark.parametrize("error", [tf.errors.PermissionDeniedError, tf.errors.NotFoundError])
def test_a_bucket_that_may_not_be_written_is_one_sentence(error, monkeypatch):
    def refuse(*_):
        raise error(None, None, "The caller may not do this,\nor there is no such bucket")

    monkeypatch.setattr(tf.io.gfile, "makedirs", refuse)
    with pytest.raises(UserError, match=r"^ram://none/run cannot be read .* bucket\);"):
        train("ram://none/run", "digits")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("folder:ram://none", "There is no folder 'ram://none'; --data folder:PATH takes"),
        ("tfrecord:ram://none/*.tfrecord", "'ram://none/.*tfrecord' matches none"),
        ("folder:none://bucket", "none://bucket cannot be .*; TensorFlow has no file system of this scheme"),
    ],
)
def test_data_in_a_bucket_that_is_not_there_are_one_sentence(data, words, tmp_path):
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", data)
