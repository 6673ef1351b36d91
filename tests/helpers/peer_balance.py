"""Random batches of sequence lengths, and the file with another library's partitions of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "peer_balance.npz"


def make_batch(seed: int) -> tuple[list[int], int]:
    """Log-normal lengths, 1 to 24 per part, and the number of parts, 2 to 32."""
    rng = random.Random(seed)
    parts = rng.choice([2, 4, 8, 16, 32])
    return [int(rng.lognormvariate(7.5, 0.9)) + 1 for _ in range(parts * rng.randint(1, 24))], parts


def imbalance(work: Sequence[int]) -> float:
    """Maximum over mean; 1 is perfect balance."""
    return max(work) * len(work) / sum(work)
