"""``python -m tests.float64 [COUNT]``: see the package."""

from __future__ import annotations

import argparse
import sys
import time

from tests.float64.compare import KINDS, LIMIT, Difference, compared, total_counts
from tests.float64.drive import run_seeds
from tests.helpers.distributed import run_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.float64")
    parser.add_argument("count", nargs="?", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    began = time.monotonic()
    seeds = list(range(options.first, options.first + options.count))
    by_rank = run_ranks(run_seeds, 2, seeds)
    found = [compared(records) for records in zip(*by_rank, strict=True)]
    exact = [compared(records, float) for records in zip(*by_rank, strict=True)]
    print(summary(found, exact))
    print(f"\n{len(seeds)} seeds in {time.monotonic() - began:.0f} s")
    bad = [(each, kind) for each in found for kind in KINDS if not each.largest[kind] < LIMIT]
    for each, kind in bad:
        print(f"seed {each.seed} ({each.algorithm}): {kind}: {each.where[kind]}", file=sys.stderr)
    return bool(bad)


def summary(found: list[Difference], exact: list[Difference]) -> str:
    """Markdown."""
    rows = [
        "| algorithm | seeds | updates | metrics | gradients | weights | all in float64 |",
        "| --- |" + " --- |" * 6,
    ]
    for name in dict.fromkeys(each.algorithm for each in found):
        own = [each for each in found if each.algorithm == name]
        most = " | ".join(f"{max(each.largest[kind] for each in own):.1e}" for kind in KINDS)
        plain = max(max(each.largest.values()) for each in exact if each.algorithm == name)
        rows.append(f"| {name} | {len(own)} | {sum(each.counts['updates'] for each in own)} | {most} | {plain:.1e} |")
    counts = total_counts(found)
    return "\n".join([*rows, "", ", ".join(f"{name}: {count:,}" for name, count in counts.items())])


if __name__ == "__main__":
    sys.exit(main())
