"""labels.txt: one class name in each line, however an editor writes lines."""

import pytest

from keras_vit import UserError
from keras_vit.files.labels import labels_text, parse_labels, read_labels

NAMES = ("ant", "Żubr 漢", "$HOME", 'it\'s "quoted"', "a\u2028b", "a\x85b", "a\x0cb", " led by a space", "a\tb")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_names_are_read_whatever_ends_the_lines(mark, end, last, tmp_path):
    text = end.join(NAMES) + (end if last else "")
    (tmp_path / "labels.txt").write_bytes(mark + text.encode())
    assert read_labels(tmp_path / "labels.txt") == NAMES


def test_what_is_written_is_read_again():
    assert parse_labels(labels_text(NAMES).encode(), "labels.txt") == NAMES


@pytest.mark.parametrize("content", [b"caf\xe9\n", "ant\n".encode("utf-16")])
def test_text_that_is_not_utf_8_is_refused(content):
    with pytest.raises(UserError, match="labels.txt cannot be read as UTF-8"):
        parse_labels(content, "labels.txt")
