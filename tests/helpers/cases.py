"""Splits the cases of a test between `make test` and `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for parametrize, all except ``short`` marked long; a tuple is identified by its first value."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if values[0] in short else pytest.param(*values, marks=pytest.mark.long))
    return found


# Of tests that run on either back end: on the second one in `make test-all`.
BACKENDS = long_but(("megatron",), ("megatron", "fsdp"))
