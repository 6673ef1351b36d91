"""The list of runs is in a folder of the test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
