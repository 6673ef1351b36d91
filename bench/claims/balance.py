"""Work of ranks: samples dealt by cost over samples dealt in the order of their prompts."""

from __future__ import annotations

from bench.claims.common import done
from rlhpc.data.packing import pack, sample_costs
from tests.helpers.balance_table import CAPACITY, MODELS, drawn

RANKS, PER_RANK = (8, 64), 32


def main() -> None:
    cells = []
    for ranks in RANKS:
        lengths = drawn(PER_RANK * ranks, 0.7, seed=0)
        costs = sample_costs(lengths, *MODELS["7B"])
        (plan,) = pack(lengths, ranks, CAPACITY, costs=costs)
        dealt = [sum(costs[i] for members in rank for i in members) for rank in plan.bins]
        in_order = [sum(costs[rank * PER_RANK : (rank + 1) * PER_RANK]) for rank in range(ranks)]
        mean = sum(costs) / ranks
        cells.append(f"{max(in_order) / mean:.2f} to **{max(dealt) / mean:.3f}** on {ranks} ranks")
    done(
        "longest rank over the mean, balanced by cost",
        "balanced, no figure",
        "; ".join(cells),
        f"costs of a 7B model, {PER_RANK} samples a rank of log-normal length, spread 0.7",
    )


if __name__ == "__main__":
    main()
