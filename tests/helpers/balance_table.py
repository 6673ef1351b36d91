"""Waiting times of ranks in microbatches and pipelines: `python -m tests.helpers.balance_table`."""

from __future__ import annotations

import random
import time

from rlhpc.data.packing import Pipeline, Schedule, pack, sample_costs
from rlhpc.sharding.layout import MICROBATCH_TOKENS

CAPACITY = 16_384
# Operations per token, and per pair of tokens, of a forward pass of models of 7 and half a billion parameters.
MODELS = {"7B": (2 * 7.0e9, 2 * 2 * 4096 * 32), "0.5B": (2 * 0.5e9, 2 * 2 * 896 * 24)}
SPREADS, PER_RANK, RANKS, STAGES = (0.7, 1.0), (16, 64), (2, 4, 8, 16, 32, 64), (2, 4, 8)


def drawn(count: int, spread: float, seed: int) -> list[int]:
    """Log-normal lengths with a mean of about 1,700 or 2,200 tokens, at most a microbatch's."""
    draw = random.Random(seed)
    return [min(CAPACITY, max(32, int(draw.lognormvariate(7.2, spread)))) for _ in range(count)]


def waited(lengths: list[int], costs: list[int], ranks: int, *, rows: bool) -> float:
    """Sum of the greatest costs of rows of microbatches, over the least that is possible."""
    schedule = Schedule(rows=rows, overhead=0.0)
    (plan,) = pack(lengths, ranks, CAPACITY, costs=costs, schedule=schedule)
    sums = [[sum(costs[i] for i in members) for members in rank] for rank in plan.bins]
    return sum(map(max, zip(*sums, strict=True))) / bound(lengths, costs, ranks)


def bound(lengths: list[int], costs: list[int], ranks: int) -> float:
    """No plan waits less: for the mean load; or for the dearest sample and, in other rows, what its own cannot hold,
    even if that is filled with the tokens that cost most."""
    top = max(range(len(costs)), key=costs.__getitem__)
    room, held = float((ranks - 1) * CAPACITY), 0.0
    for i in sorted(set(range(len(costs))) - {top}, key=lambda i: -costs[i] / lengths[i]):
        part = min(1.0, room / lengths[i])
        held, room = held + part * costs[i], room - part * lengths[i]
    held = min(held, float((ranks - 1) * costs[top]))
    return max(sum(costs) / ranks, costs[top] + (sum(costs) - costs[top] - held) / ranks)


def pipelined(lengths: list[int], stages: int, terms: tuple[float, float]) -> tuple[float, float, int, float]:
    """Simulated time of the plan and of the fewest microbatches, over that of equal ones at their best number; that of
    the plan's; and the longest sample's share of the cost."""
    costs = sample_costs(lengths, *terms)
    pipeline = Pipeline(stages, terms[0] * MICROBATCH_TOKENS)
    least = -(-sum(lengths) // CAPACITY)
    overhead, total = pipeline.overhead, sum(costs)
    equal = min(3 * (total / m + overhead) * (m + stages - 1) for m in range(least, 4 * len(lengths)))

    def planned(schedule: Schedule) -> list[int]:
        (plan,) = pack(lengths, 1, CAPACITY, costs=costs, schedule=schedule)
        return [sum(costs[i] for i in members) for members in plan.bins[0]]

    ours = planned(Schedule(stages=stages, overhead=pipeline.overhead))
    fewest = planned(Schedule())
    return pipeline.time([ours]) / equal, pipeline.time([fewest]) / equal, len(ours), max(costs) / sum(costs)


def main() -> None:
    slowest = 0.0
    print("| model | spread | samples a rank |", " | ".join(f"{ranks} ranks" for ranks in RANKS), "|")
    print("| --- " * (3 + len(RANKS)) + "|")
    for model, terms in MODELS.items():
        for spread in SPREADS:
            for per_rank in PER_RANK:
                cells = []
                for ranks in RANKS:
                    found = []
                    for seed in range(3):
                        lengths = drawn(per_rank * ranks, spread, seed)
                        costs = sample_costs(lengths, *terms)
                        began = time.process_time()
                        ours = waited(lengths, costs, ranks, rows=True)
                        slowest = max(slowest, time.process_time() - began)
                        found.append((ours, waited(lengths, costs, ranks, rows=False)))
                    cells.append(f"{max(f[0] for f in found):.3f} ({max(f[1] for f in found):.3f})")
                print(f"| {model} | {spread} | {per_rank} |", " | ".join(cells), "|", flush=True)
    print(f"slowest plan: {1000 * slowest:.0f} ms\n")
    print("| spread | samples a rank | longest sample's share |", " | ".join(f"pp {stages}" for stages in STAGES), "|")
    print("| --- " * (3 + len(STAGES)) + "|")
    for spread in (0.0, 0.4, *SPREADS):
        for per_rank in (*PER_RANK, 256):
            rows = [pipelined(drawn(per_rank, spread, 0), stages, MODELS["7B"]) for stages in STAGES]
            cells = [f"{ours:.3f} ({fewest:.3f}), {count}" for ours, fewest, count, _ in rows]
            print(f"| {spread} | {per_rank} | {rows[0][3]:.1%} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
