from __future__ import annotations

import sys

import pytest

from tests.helpers import warm


@pytest.fixture(autouse=True)
def warm_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a launcher in this process starts are forked."""
    if request.node.get_closest_marker("ranks"):
        monkeypatch.setattr(sys, "executable", str(warm.python()))
