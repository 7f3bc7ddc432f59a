"""Shared by the tests of evaluation."""

import pytest

from training.evaluation import plots, report

_DRAWN = ("draw_confusion", "draw_reliability", "draw_mistakes")


@pytest.fixture(autouse=True, scope="package")
def _figures_are_files_alone():
    """To draw the figures of a report takes seconds; `drawn` is for the test that looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _DRAWN:
            patch.setattr(report, name, lambda *arguments: arguments[-1].write_bytes(b"an image"))
        yield


@pytest.fixture(name="drawn")
def _drawn(monkeypatch) -> None:
    for name in _DRAWN:
        monkeypatch.setattr(report, name, getattr(plots, name))
