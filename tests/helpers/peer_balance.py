"""Random batches of sequence lengths, and where another library's divisions of them are kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "peer_balance.npz"


def make_batch(seed: int) -> tuple[list[int], int]:
    """Log-normal lengths, one to 24 times as many as the 2 to 32 parts to divide them into."""
    draw = random.Random(seed)
    parts = draw.choice([2, 4, 8, 16, 32])
    return [int(draw.lognormvariate(7.5, 0.9)) + 1 for _ in range(parts * draw.randint(1, 24))], parts


def imbalance(work: Sequence[int]) -> float:
    """Maximum over mean; 1 is perfect balance."""
    return max(work) * len(work) / sum(work)
