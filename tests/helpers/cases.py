"""Cases of a test of which `make test` takes some, and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for parametrize, all but ``kept`` marked long; cases of several values are known by the first."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if values[0] in kept else pytest.param(*values, marks=pytest.mark.long))
    return found
