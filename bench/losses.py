"""Cost of lost engines for a large job, by simulation in the order of arrival.

    python -m bench.losses              # 1,024 GPUs: 64 nodes train, 64 generate; 16 of these are lost a day

A lost node's engine comes back after half an hour. The target: throughput falls by at most the share of the engines'
time that is lost, and 2%.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace

from rlhpc.rollout.schedule.generation_load import GenerationLoad
from rlhpc.rollout.schedule.simulator import Loss, arrival

DAY = 86_400.0
MOST = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64, help="nodes that generate, one engine each")
    parser.add_argument("--a-day", type=float, default=16.0, help="engines that are lost a day")
    parser.add_argument("--minutes", type=float, default=30.0, help="until a lost one is back")
    parser.add_argument("--days", type=float, default=0.5)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    load = GenerationLoad(
        options.engines, 512, 16, 128, 25e-3, 0.1e-3, 1.0, mean_tokens=4000, most_tokens=24_000, seed=1
    )
    load = replace(load, train_seconds=load.full_seconds, sync_seconds=2.0, switch_seconds=0.5)
    seconds, away = options.days * DAY, options.minutes * 60
    count = round(options.a_day * options.days)
    share = count * away / (seconds * options.engines)
    rng = random.Random(0)
    losses = [Loss(rng.randrange(options.engines), rng.uniform(0.05, 0.95) * seconds, away) for _ in range(count)]
    print(
        "| staleness | steps | losses | step s | step s with losses | throughput lost | engines' time lost | at most |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    missed = False
    for most in options.staleness:
        steps = int(seconds / arrival(load, most, steps=24, warm=6).step_seconds)
        found = [arrival(load, most, losses=these, steps=steps, warm=6) for these in ([], losses)]
        assert max(one.max_staleness for one in found) <= most
        without, with_losses = (one.step_seconds for one in found)
        lost = 1 - without / with_losses
        missed |= lost > share + MOST
        cells = f"{without:.1f} | {with_losses:.1f} | {lost:.2%} | {share:.2%} | {share + MOST:.2%}"
        print(f"| {most} | {steps} | {count} | {cells} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
