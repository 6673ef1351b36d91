"""Choice of the exchange by which the attention of context-parallel ranks sees whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

ContextMethod = Literal["all_gather", "ulysses"]


@dataclass(frozen=True)
class ContextChoice:
    """The method, and in words why."""

    method: ContextMethod
    reason: str


def choose_context_method(heads: int, kv_heads: int, cp: int, requested: ContextMethod | None = None) -> ContextChoice:
    """Ulysses where cp divides the query heads, otherwise all-gather; ``requested`` if the heads allow it."""
    assert min(heads, kv_heads, cp) > 0
    assert heads % kv_heads == 0, (heads, kv_heads)
    if heads % cp:
        return ContextChoice("all_gather", f"{heads} query heads cannot be divided among {cp} ranks")
    if requested == "all_gather":
        return ContextChoice("all_gather", "requested")
    text = f"each of {cp} ranks takes {heads // cp} of {heads} query heads"
    copies = lcm(kv_heads, cp) // kv_heads
    if copies > 1:
        text += f"; each of {kv_heads} key-value heads is copied {copies} times to divide them"
    return ContextChoice("ulysses", text)
