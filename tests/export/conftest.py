"""Fixtures of the exports."""

import pytest

from export import report


@pytest.fixture(autouse=True, scope="session")
def _no_figures():
    """Reports have an empty report.png, and one call is timed: both take half of the seconds of a tiny export.

    The demo draws them, and `test_the_figure_of_a_report_has_a_bar_for_each_number`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_draw", lambda title, panels, path: path.touch())
        patch.setattr(report, "_REPEATS", 1)
        yield
