"""Tar files of images, as webdataset writes them: read by number without unpacking, and what is wrong with them."""

import io
import json
import pathlib
import re
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data import tar_index
from training.data.dataset import bad_examples_reported
from training.data.sources import DataOptions, DataSet, open_source

Member = tuple[str, bytes]


def png(value: int) -> bytes:
    """An image that ends in zeros, which a string of NumPy would lose."""
    return tf.io.encode_png(np.full((5, 6, 3), value, np.uint8)).numpy() + bytes(3)


def write(path: pathlib.Path, members: list[Member], kind: int = tarfile.USTAR_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def labeled(numbers: range, label: str = "cls") -> list[Member]:
    """Images of this number as color, each with the class number % 2 behind it."""
    return [member for n in numbers for member in ((f"{n:04}.png", png(n)), (f"{n:04}.{label}", f"{n % 2}\n".encode()))]


def opened(path: pathlib.Path, pattern: str = "*.tar", **options) -> DataSet:
    return open_source(DataOptions(f"tar:{path}/{pattern}", **options))


def contents(split) -> list[tuple[bytes, int]]:
    data = tf.data.Dataset.range(split.num_examples).map(split.read, num_parallel_calls=4)
    return [(image, int(label)) for image, label in data.as_numpy_iterator()]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_absolute_and_foreign_names_are_names_and_nothing_is_unpacked(kind, tmp_path):
    names = [f"/tmp/{'far/' * 30}../../{n}{'a' * 90}" for n in range(4)]
    if kind != tarfile.USTAR_FORMAT:
        names += ["Grünes Blatt 日本", "x" * 3000]
    members = [m for name in names for m in ((f"{name}.JPEG", png(1)), (f"{name}.txt", "Blätter\n".encode()))]
    members += [("readme.txt", b"about"), ("._1.jpg", b"of macOS"), ("more.json", b"{}")]
    write(tmp_path / "train.tar", members, kind)
    write(tmp_path / "test.tar", [("a.b/1.webp", png(2)), ("a.b/1.seg.png", png(3)), ("a.b/1.cls", b"Bl\xc3\xa4tter")])
    source = opened(tmp_path)
    assert source.labels == ("Blätter",)
    assert contents(source.train) == [(png(1), 0)] * len(names)
    assert contents(source.evaluation) == [(png(2), 0)]
    assert source.train.name(3).endswith(" of train.tar")
    assert {path.name for path in tmp_path.iterdir()} == {"train.tar", "test.tar", "tars.npz"}


def test_a_label_is_a_number_a_name_or_in_an_object(tmp_path):
    members: list[Member] = []
    for n in range(4):
        label = json.dumps({"label": n % 2, "width": 5}).encode()
        members += [(f"{n}.txt", b"a caption before .json"), (f"{n}.jpg", png(n)), (f"{n}.json", label)]
    write(tmp_path / "all.tar", members)
    assert opened(tmp_path).labels == ("0", "1")
    (tmp_path / "labels.txt").write_text("ant\nbee\ncat\n")
    source = opened(tmp_path)
    assert source.labels == ("ant", "bee", "cat")
    assert source.train.labels.tolist() == [0, 1]


def test_splits_are_of_the_names_of_files_or_of_folders_and_else_a_tenth_is_kept(tmp_path, capsys):
    write(tmp_path / "imagenet1k-train-0000.tar", labeled(range(6)))
    write(tmp_path / "imagenet1k-validation-00.tar", labeled(range(2)))
    write(tmp_path / "split" / "train" / "0.tar", labeled(range(6)))
    write(tmp_path / "split" / "val" / "0.tar", labeled(range(2)))
    for source in (opened(tmp_path), opened(tmp_path / "split", "*/*.tar")):
        assert (source.train.num_examples, source.evaluation.num_examples, source.held_out) == (6, 2, False)
    write(tmp_path / "one" / "part0.tar", labeled(range(30)))
    write(tmp_path / "one" / "part1.tar", labeled(range(30, 50)))
    source = opened(tmp_path / "one")
    assert [image for image, _ in contents(source.evaluation)] == [png(n) for n in (0, 1, 20, 21, 40, 41)]
    assert source.train.num_examples == 44
    assert source.held_out
    assert "Every tenth image of each class is kept for evaluation: 6 of 50 images" in capsys.readouterr().out


def test_headers_are_read_once_and_again_where_a_file_has_changed(tmp_path, monkeypatch, capsys):
    for n in range(3):
        write(tmp_path / f"part{n}.tar", labeled(range(10 * n, 10 * n + 10)))
    expected = contents(opened(tmp_path).train)
    scanned, scan = [], tar_index.scan
    monkeypatch.setattr(tar_index, "scan", lambda path: scanned.append(pathlib.Path(path).name) or scan(path))
    assert contents(opened(tmp_path).train) == expected
    assert not scanned
    write(tmp_path / "part1.tar", labeled(range(100, 104), "txt"))
    assert opened(tmp_path).train.num_examples == 20
    assert scanned == ["part1.tar"]
    scanned.clear()
    (tmp_path / "tars.npz").write_bytes((tmp_path / "tars.npz").read_bytes()[:99])
    opened(tmp_path)
    assert len(scanned) == 3
    with np.load(tmp_path / "tars.npz") as archive:
        arrays = dict(archive)
    arrays["images"].view(tar_index.IMAGE)["label"] = -1
    np.savez(tmp_path / "tars.npz", **arrays)
    opened(tmp_path)
    assert len(scanned) == 6
    assert capsys.readouterr().out.count("tars.npz is damaged; the tar files are indexed again") == 2


def test_images_are_not_read_to_index_them(tmp_path, monkeypatch):
    write(tmp_path / "a.tar", [m for n in range(3) for m in ((f"{n}.png", bytes(10**6)), (f"{n}.cls", b"1"))])
    read, original = [], tar_index.read_places

    def counted(path, use):
        return original(path, lambda get: use(lambda position, size: read.append(size) or get(position, size)))

    monkeypatch.setattr(tar_index, "read_places", counted)
    images, labels = tar_index.scan(str(tmp_path / "a.tar"))
    assert images["size"].tolist() == [10**6] * 3
    assert labels == ["1"]
    assert sum(read) < 50_000


def test_the_fingerprint_is_that_of_the_members_wherever_they_lie(tmp_path):
    for folder, numbers in (("a", range(8)), ("b", range(8)), ("c", range(2, 10))):
        write(tmp_path / folder / "x.tar", labeled(numbers))
    first, same, other = (opened(tmp_path / folder).fingerprint for folder in "abc")
    assert first == same != other


def member(name: str, **fields) -> bytes:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


END = bytes(1024)
JPG = member("1.jpg", size=3) + bytes(512)
CLS = member("1.cls", size=1) + b"0".ljust(512, b"\0")
HOSTILE = {
    "a link": (member("1.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd") + CLS + END, "is a link or a device"),
    "a hard link": (member("1.jpg", type=tarfile.LNKTYPE, linkname="0.jpg") + CLS + END, "1.jpg of .* is a link or a"),
    "a huge size": (member("1.jpg", size=2**60) + CLS + END, "1.jpg claims 1152921504606846976 bytes; fetch"),
    "a negative size": (member("1.jpg", size=-5) + CLS + END, "1.jpg claims -5 bytes"),
    "an empty image": (member("1.jpg") + CLS + END, "1.jpg of .* is no image, but has 0 bytes"),
    "a long name of a gigabyte": (member("x", type=b"L", size=2**30) + END, "1,073,741,824 bytes should"),
    "a pax header that is none": (member("x", type=b"x", size=9) + b"99 path=a".ljust(512) + END, "or not a tar file"),
    "a pax size": (member("x", type=b"x", size=19) + b"19 size=1234567890\n".ljust(512, b"\0") + member("1.jpg") + END,
                   "1.jpg claims 1234567890 bytes"),
    "a sparse file": (member("1.jpg", type=tarfile.GNUTYPE_SPARSE) + END, "1.jpg of .* has holes; write"),
    "a text": (b"words " * 200, "or not a tar file: at byte .*; fetch or"),
    "gzip": (b"\x1f\x8b" + bytes(2000), "truncated, compressed, or not .* unpack it again"),
    "truncated in a member": (member("1.jpg", size=600) + bytes(512), "1.jpg claims 600 bytes"),
    "truncated behind a member": (CLS, "at byte .*, 512 bytes should follow"),
    "truncated in a header": (CLS + END[:512] + b"1.jpg", "512 bytes should follow byte 1,536"),
    "nothing": (b"", "512 bytes should follow byte 0"),
    "the end alone": (END, r"should hold images \(jpg, .* beside them, but is empty; give others"),
    "other files": (member("a.txt", size=1) + b"0".ljust(512, b"\0") + END, "none of its 1 files is one, a.txt first"),
    "a label alone": (CLS + END, "1.cls of .* is no image, but a label alone"),
    "no label": (member("1.jpg", size=3) + bytes(512) + END, "1.jpg of .* should have one label, .* after it; correct"),
    "two images": (member("1.jpg") + member("1.png") + END, "has the same name as .*; rename"),
    "two images of one ending": (JPG + CLS + member("1.JPG") + END, "1.JPG of .* has the same name as 1.jpg; rename"),
    "two labels of one ending": (JPG + CLS + CLS + END, "1.cls of .* has the same name as 1.cls; rename"),
    "a long label": (JPG + member("1.cls", size=2**20 + 1) + bytes(2**20 + 512) + END, "but 1.cls holds none"),
    "a label that is no text": (JPG + member("1.cls", size=2) + b"\xff\xfe".ljust(512, b"\0") + END, "cls holds none"),
    "several labels": (JPG + member("1.json", size=5) + b"[1,2]".ljust(512, b"\0") + END, "1.json holds none"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_tar_file_that_cannot_be_used_is_one_sentence(case, tmp_path):
    content, words = HOSTILE[case]
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.tar": "0", "test.tar": "x"}, "must have the same classes, but 0, x are only in one of them"),
        ({"train.tar": "7", "test.tar": str(10**9)}, "the label '1000000000', but there are 1,000 classes"),
        ({"train.tar": "0", "more.tar": "0"}, "with eval, test or val in their names, but gives more.tar, "),
        ({"train.tar": "0"}, "should give files with train and files with eval, .* gives train.tar; "),
        ({"a.tar": "0", "b.tar.gz": "0"}, "end in .tar, but .*b.tar.gz is compressed; unpack it"),
    ],
)
def test_labels_and_splits_that_do_not_fit_are_one_sentence(files, words, tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.tar._MOST_CLASSES", 1000)
    for name, label in files.items():
        write(tmp_path / name, [("1.jpg", png(1)), ("1.cls", label.encode())])
    with pytest.raises(UserError, match=words):
        opened(tmp_path, "*")


def test_a_label_that_is_no_line_of_labels_txt_is_named(tmp_path):
    write(tmp_path / "a.tar", labeled(range(4)))
    (tmp_path / "labels.txt").write_text("ant\n")
    with pytest.raises(UserError, match="the label '1', but there are 1 classes, the lines of"):
        opened(tmp_path)
    write(tmp_path / "a.tar", [("1.jpg", png(1)), ("1.cls", b"bee")])
    with pytest.raises(UserError, match="have the label 'bee', but there are 1 classes"):
        opened(tmp_path)


def test_a_file_that_changes_or_vanishes_while_it_is_read_is_named(tmp_path):
    write(tmp_path / "a.tar", labeled(range(20)))
    train = opened(tmp_path).train
    write(tmp_path / "a.tar", labeled(range(19, -1, -1)))
    with pytest.raises(UserError, match=r"tars.npz does not fit .*a.tar; remove"), bad_examples_reported(train):
        contents(train)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(UserError, match="a.tar can no longer be read"), bad_examples_reported(train):
        contents(train)


def test_a_bad_image_is_named_and_skipped_on_request(tmp_path, capsys):
    members = labeled(range(22))
    members[8] = (members[8][0], members[8][1][:40])
    write(tmp_path / "a.tar", members)
    assert opened(tmp_path, on_bad_image="skip").train.num_examples == 18
    assert re.search("Skipped: 1 of 22 images cannot be decoded: 0004.png of a.tar ", capsys.readouterr().out)


def test_tar_files_of_a_bucket_are_read_by_the_same_places(tmp_path):
    write(tmp_path / "a.tar", labeled(range(20)))
    (tmp_path / "labels.txt").write_text("ant\nbee\n")
    for name in ("a.tar", "labels.txt"):
        tf.io.gfile.copy(str(tmp_path / name), f"ram://tars/{name}", overwrite=True)
    remote, local = open_source(DataOptions("tar:ram://tars/*.tar")), opened(tmp_path)
    assert remote.fingerprint == local.fingerprint
    assert remote.labels == ("ant", "bee")
    assert contents(remote.train) == contents(local.train)
    assert (remote.train.parallel_reads, local.train.parallel_reads) == (256, None)
