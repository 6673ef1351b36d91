"""Losses of engines at random moments, many times: every prompt once, within the bound, and equal to a replay.

python -m tests.rollout.generator.random_losses --runs 300
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.rollout.generator.losses import Losses
from tests.rollout.generator.test_losses import CASES, check, survive
from tests.rollout.generator.worlds import plain


def run_once(seed: int, folder: Path) -> tuple[int, int]:
    """One world and its replay; returns the number of losses and of returns."""
    rng = random.Random(seed)
    name, engines = rng.choice(list(CASES)), rng.choice([2, 3, 4, 6])
    lost = rng.sample(range(engines), rng.randint(1, engines))
    back = tuple(engine for engine in lost if rng.random() < 0.7)
    if len(back) < len(lost) == engines:
        back = tuple(lost)
    losses = Losses({engine: rng.randint(1, 60) for engine in lost}, back, rng.choice([0, 1, 2]), seed)
    first = survive(name, folder / "first", losses, engines)
    check(name, first)
    replay = {"asynchrony__replay": str(folder / "first")}
    again = survive(name, folder / "again", Losses(seed=seed + 1), engines, config=replay)
    for ours, theirs in zip(again.batches, first.batches, strict=True):
        assert [plain(one) for one in ours.kept] == [plain(one) for one in theirs.kept], f"seed {seed}, {name}"
    return len(first.lost), len(first.joined)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, failed, lost, joined = time.monotonic(), 0, 0, 0
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = run_once(seed, Path(folder))
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(f"seed {seed}: {str(error).splitlines()[0] if str(error) else error!r}", flush=True)
                continue
        lost, joined = lost + found[0], joined + found[1]
    passed, seconds = options.runs - failed, time.monotonic() - began
    print(
        f"{passed} of {options.runs} runs and their replays: {lost} engines lost, {joined} came back, {seconds:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
