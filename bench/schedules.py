"""Step time and idle shares of separate and colocated placements, and what determinism costs, by simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from rlhpc.rollout.schedule.generation_load import GenerationLoad, Simulated, colocated, reduced, shortest_step
from rlhpc.rollout.schedule.simulator import arrival, separate, with_lending

SEEDS, STEPS, WARM = range(4), 24, 6
LOADS = {
    "4 engines, 4 waves": (4, 128),
    "4 engines, 1 wave": (4, 32),
    "1 engine, 2 waves": (1, 16),
    "1 engine, 8 waves": (1, 64),
}
STALENESS = (0, 1, 2, 4)


def make_load(engines: int, groups: int) -> GenerationLoad:
    """A load whose trainers take as long as engines with full slots."""
    load = GenerationLoad(engines, groups, 8, 64, 50e-3, 0.1e-3, 1.0, mean_tokens=80, most_tokens=480)
    return replace(load, train_seconds=load.full_seconds, switch_seconds=0.05)


def main() -> None:
    print("| load | staleness | colocated / separate | step / bound | idle engines | idle trainers | staleness, mean |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, sizes in LOADS.items():
        load = make_load(*sizes)
        # As many GPUs: twice the engines, and twice the ranks to train on.
        both = _step(
            lambda one: colocated(replace(one, engines=2 * one.engines, train_seconds=one.train_seconds / 2)), load
        )
        for most in STALENESS:
            found = _all(partial(_separate, most=most), load)
            step = mean(one.step_seconds for one in found)
            bound = mean(shortest_step(replace(load, seed=seed), most) for seed in SEEDS)
            shares = (mean(one.idle_engines for one in found), mean(one.idle_trainers for one in found))
            assert max(one.max_staleness for one in found) <= most
            print(
                f"| {title} | {most} | {both / step:.2f} | {step / bound:.2f} | {shares[0]:.2f} | {shares[1]:.2f} | "
                f"{mean(one.staleness for one in found):.2f} |",
                flush=True,
            )
    print("\n| load | staleness | calibrated | train_seconds 20% too short | 20% too long | finish |")
    print("| --- | --- | --- | --- | --- | --- |")
    for title, sizes in LOADS.items():
        load = make_load(*sizes)
        for most in STALENESS:
            _print_costs(title, load, most)
    print("\n| load | staleness | lend_seconds / step | idle trainers: separate | lend ", end="")
    print("| step, lend / separate | train_seconds 20% too short | 20% too long |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for title, sizes in LOADS.items():
        load = replace(make_load(*sizes), lenders=sizes[0], lend_overhead_seconds=0.05)
        for most in STALENESS:
            _print_lending(title, load, most)
    _print_time()


def _print_costs(title: str, load: GenerationLoad, most: int) -> None:
    free = _step(lambda one: arrival(one, most, steps=STEPS, warm=WARM), load)
    ratios = [_step(partial(_separate, most=most, wrong=wrong), load) / free for wrong in (1.0, 0.8, 1.2)]
    finish = _step(lambda one: separate(one, most, in_flight="finish", steps=STEPS, warm=WARM), load)
    print(f"| {title} | {most} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {finish / free:.2f} |", flush=True)


def _print_lending(title: str, load: GenerationLoad, most: int) -> None:
    """With the time that is the best for lengths of another seed, as that of a run would be."""
    lend = with_lending(replace(load, seed=len(SEEDS)), most, steps=STEPS, warm=WARM).lend_seconds
    alone = _all(partial(_separate, most=most), load)
    found = [_all(partial(_lending, most=most, lend=lend, wrong=wrong), load) for wrong in (1.0, 0.8, 1.2)]
    assert max(one.max_staleness for all_seeds in found for one in all_seeds) <= most
    idle = [mean(one.idle_trainers for one in both) for both in (alone, found[0])]
    steps = [mean(one.step_seconds for one in each) for each in (alone, *found)]
    ratios = " | ".join(f"{step / steps[0]:.2f}" for step in steps[1:])
    print(f"| {title} | {most} | {lend / steps[1]:.2f} | {idle[0]:.2f} | {idle[1]:.2f} | {ratios} |", flush=True)


def _print_time() -> None:
    print("\n| engines | responses of a step | CPU seconds | reduced: engines | CPU seconds | step / not reduced |")
    print("| --- | --- | --- | --- | --- | --- |")
    for engines, groups, samples in ((4, 128, 8), (16, 512, 16), (64, 512, 16)):
        load = replace(make_load(engines, groups), samples_per_group=samples, mean_tokens=2000, most_tokens=16000)
        load = replace(load, train_seconds=load.full_seconds)
        found, seconds = [], []
        for one in (load, reduced(load)):
            begin = time.process_time()
            found.append(separate(one, 1))
            seconds.append(time.process_time() - begin)
        ratio = found[1].step_seconds / found[0].step_seconds
        cells = (f"{seconds[0]:.2f}", reduced(load).engines, f"{seconds[1]:.2f}", f"{ratio:.2f}")
        print(f"| {engines} | {groups * samples} | {' | '.join(map(str, cells))} |", flush=True)


def _separate(load: GenerationLoad, most: int, wrong: float = 1.0) -> Simulated:
    return separate(load, most, costs=load.costs(wrong), steps=STEPS, warm=WARM)


def _lending(load: GenerationLoad, most: int, lend: float, wrong: float) -> Simulated:
    return separate(load, most, costs=load.costs(wrong, lend), steps=STEPS, warm=WARM)


def _all(simulate: Callable[[GenerationLoad], Simulated], load: GenerationLoad) -> Sequence[Simulated]:
    return [simulate(replace(load, seed=seed)) for seed in SEEDS]


def _step(simulate: Callable[[GenerationLoad], Simulated], load: GenerationLoad) -> float:
    return mean(found.step_seconds for found in _all(simulate, load))


if __name__ == "__main__":
    main()
