"""The exchange for attention over context-parallel ranks, from the numbers of heads."""

from __future__ import annotations

import pytest

from rlhpc.sharding.layout import choose_context_method


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "method", "reason"),
    [
        (32, 8, 4, "ulysses", "each of 4 ranks takes 8 of 32 query heads"),
        (32, 2, 8, "ulysses", "each of 2 key-value heads is copied 4 times to divide them"),
        (12, 3, 2, "ulysses", "each of 3 key-value heads is copied 2 times to divide them"),
        (14, 2, 4, "all_gather", "14 query heads cannot be divided among 4 ranks"),
    ],
)
def test_heads_are_divided_where_they_can_be(heads: int, kv_heads: int, cp: int, method: str, reason: str) -> None:
    choice = choose_context_method(heads, kv_heads, cp)
    assert choice.method == method
    assert choice.reason.endswith(reason)


def test_a_request_holds_where_heads_allow_it() -> None:
    assert choose_context_method(32, 8, 4, "all_gather").method == "all_gather"
    assert choose_context_method(32, 8, 4, "ulysses").method == "ulysses"
    assert choose_context_method(14, 2, 4, "ulysses").method == "all_gather"
