"""Share of the token budget that microbatches use vs. the optimum: `python -m tests.helpers.packing_table`."""

from __future__ import annotations

import random
import time
from math import ceil

from rlhpc.data.packing import pack

BUDGETS = (16_640, 20_000, 24_576, 32_768, 49_152)
RANKS = (1, 2, 4, 8, 16, 32, 64)


def peer_lengths(count: int = 512, seed: int = 0) -> list[int]:
    """Lengths of the comparison with verl's balancing."""
    rng = random.Random(seed)
    return [int(rng.lognormvariate(7.5, 0.9)) for _ in range(count)]


def fewest(lengths: list[int], ranks: int, budget: int) -> int:
    """Minimum number of microbatches of any plan, with equal numbers on all ranks."""
    return ranks * ceil(ceil(sum(lengths) / budget) / ranks)


def main() -> None:
    lengths, slowest = peer_lengths(), 0.0
    print("| `train.tokens_per_microbatch` |", " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS), "|")
    print("| --- " * (len(RANKS) + 1) + "|")
    for budget in BUDGETS:
        cells = []
        for ranks in RANKS:
            began = time.process_time()
            (plan,) = pack(lengths, ranks, budget)
            slowest = max(slowest, time.process_time() - began)
            found, best = sum(map(len, plan.bins)), fewest(lengths, ranks, budget)
            used = sum(lengths) / budget
            cells.append(f"{used / found:.3f}" + (f" of {used / best:.3f}" if found > best else ""))
        print(f"| {budget:,} |", " | ".join(cells), "|")
    print(f"slowest plan: {1000 * slowest:.0f} ms")


if __name__ == "__main__":
    main()
