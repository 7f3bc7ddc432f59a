"""The line of a long job: on a terminal, in a log, and one job within another."""

import contextlib
import io
import time

import pytest

from keras_vit.cli import progress
from keras_vit.cli.progress import Progress, tracked
from tests.support import Terminal, on_a_terminal

_JOB = """
import time
from keras_vit.cli import progress
progress._LOOK_SECONDS = 0.01
with progress.Progress("int8 (3 of 7)") as outer:
    for _ in progress.tracked(range(40), "verifying model-int8.tflite"):
        time.sleep(0.01)
print("done")
"""


@pytest.fixture(name="impatient")
def _impatient(monkeypatch) -> None:
    """A log has a line every tenth of a second instead of every half minute."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.01)


def test_a_log_has_a_line_every_half_minute_and_no_control_characters(impatient, capsys):
    with Progress("int8 (3 of 7)"):
        time.sleep(0.13)
        for _ in tracked(range(100, 110), "verifying"):
            time.sleep(0.03)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "int8 (3 of 7): 0 s so far"
    assert all(line.startswith("int8 (3 of 7): verifying: ") and " of 10 images" in line for line in lines[1:])
    assert 2 <= len(lines) <= 5
    assert all(line.isprintable() for line in lines)


def test_a_job_that_is_silenced_inside_another_is_shown(impatient, capsys):
    with Progress("int8"), contextlib.redirect_stdout(io.StringIO()):
        for _ in tracked(range(2), "ranges"):
            time.sleep(0.12)
    assert "int8: ranges: 1 of 2 images" in capsys.readouterr().out


def test_a_short_job_leaves_no_line_in_a_log(capsys):
    assert list(tracked(iter("abc"), "letters", 3, "letters")) == ["a", "b", "c"]
    assert capsys.readouterr().out == ""


def test_a_job_that_fails_is_over():
    with pytest.raises(ValueError, match="broken"), Progress("outer"), Progress("inner"):
        raise ValueError("broken")
    with contextlib.redirect_stdout(Terminal()) as stream, Progress("next", 3):
        pass
    assert "next: 0/3" in stream.getvalue()
    assert "outer" not in stream.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_has_one_line_which_is_gone_at_the_end(columns):
    text = on_a_terminal(_JOB, columns)
    assert text.count("\n") == 1  # after "done"
    assert text.replace("\x1b[A", "").splitlines()[-1].strip().endswith("done")
    shown = [part.rstrip("\r\n") for part in text.split("\r")]
    assert max(len(part.replace("\x1b[A", "")) for part in shown) <= columns
    assert any("verifying model-int8.tflite" in part and "of 7" in part for part in shown)
