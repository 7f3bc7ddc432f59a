"""Fixtures of the exports."""

import pytest

from export import parity


@pytest.fixture(name="no_tolerance")
def _no_tolerance(monkeypatch):
    """No file in float32 is near enough to its model."""
    monkeypatch.setattr(parity, "FLOAT_TOLERANCE", -1.0)
