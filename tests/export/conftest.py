"""Fixtures of the exports."""

import pytest

from export import parity
from export.saved_model import export as saved_model_export


@pytest.fixture(name="without_cpp_loader")
def _without_cpp_loader(monkeypatch):
    """TensorFlow's C++ library takes seconds to load; the exports of other tests are run by it."""
    monkeypatch.setattr(saved_model_export, "run_cpp_loader", lambda *_: {})


@pytest.fixture(name="no_tolerance")
def _no_tolerance(monkeypatch):
    """No file in float32 is near enough to its model."""
    monkeypatch.setattr(parity, "FLOAT_TOLERANCE", -1.0)
