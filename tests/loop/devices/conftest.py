"""Fixtures of the devices."""

import os

import pytest

from training.loop.devices import cluster, strategies


@pytest.fixture(name="met")
def _met(monkeypatch) -> list[tuple]:
    """The addresses, the own one and the timeout of each cluster that was opened; nobody is waited for."""
    calls: list[tuple] = []
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(cluster, "wait_for_workers", lambda *call: calls.append(call))
    monkeypatch.setattr(strategies, "_MULTI_WORKER", lambda communication_options: None)
    return calls


@pytest.fixture(name="exit_codes")
def _exit_codes(monkeypatch) -> list[int]:
    """The codes with which the process would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes
