"""A rollout job is preempted again and again while the trainers go on: python -m tests.slurm.preemptions [--times 10]

One of two engines, each in a job on a node of its own. Prints for each preemption the seconds until the engine
generates again, and steps with both engines and with one: seconds, and the trainers' idle share beside that of the
plan's formula, which takes the work of both sides from the steps with both.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.plan.estimates.separate import SeparateStep
from tests.helpers.runs import records
from tests.helpers.waiting import until
from tests.slurm.cluster import Cluster
from tests.slurm.elastic import TIMEOUT, ElasticRun, check_once, in_jobs
from tests.slurm.settings import Settings
from tests.trainer.test_lost_engines import newest_step, process_of

HELD_SECONDS = 15


def preempted(jobs: ElasticRun, job: str, life: int) -> tuple[float, float, int]:
    """Seconds until the job has its node again and until its engine generates, and the steps of that time."""
    began, step = time.monotonic(), newest_step(jobs.run)
    jobs.preempt(job, HELD_SECONDS)
    until(lambda: jobs.queue()[job][0] == "PENDING", "the preemption", seconds=120)
    until(lambda: jobs.queue()[job][0] == "RUNNING", "its node", seconds=300)
    running = time.monotonic()
    until(lambda: jobs.lives(1) > life, "its return", seconds=300)
    return running - began, time.monotonic() - running, newest_step(jobs.run) - step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    times = parser.parse_args().times
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-preemptions-"))
    with Cluster.up(Settings(nodes=3)) as cluster:
        jobs = ElasticRun(cluster, folder, **{**in_jobs(2, 1, TIMEOUT), "train__steps": 100_000})
        jobs.reach(2)
        until(lambda: jobs.lives(0) == jobs.lives(1) == 1, "both engines", seconds=300)
        trainer = process_of(jobs.run, 0)
        print("| preemption | has its node again | generates after that | steps meanwhile |\n| --- | --- | --- | --- |")
        for number in range(1, times + 1):
            jobs.reach(newest_step(jobs.run) + 8)
            node, generates, steps = preempted(jobs, f"{jobs.rollout}_1", number)
            print(f"| {number} | {node:.1f} s | {generates:.1f} s | {steps} |", flush=True)
        jobs.reach(newest_step(jobs.run) + 8)
        assert process_of(jobs.run, 0) == trainer
        assert len(attempts.folders(jobs.run)) == 1
        check_once(jobs.run)
        jobs.rlhpc("cancel", str(jobs.run.path))
    _print_steps(jobs.run)


def _print_steps(run: RunFolder) -> None:
    """Steps by the number of engines that were there at both of their ends."""
    taken = [record for record in records(run.path) if record["phase"] == "rl" and record["step"] > 2]
    by: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for before, record in itertools.pairwise(taken):
        engines = record["rollout/engines"]
        if engines == before["rollout/engines"] and not record["rollout/lost_engines"]:
            seconds = record["perf/step_seconds"]
            by[int(engines)].append((seconds, seconds * record["trainers/idle_fraction"]))
    times = {engines: mean(step for step, _ in found) for engines, found in by.items()}
    idle = {engines: mean(waited for _, waited in found) / times[engines] for engines, found in by.items()}
    both = SeparateStep(times[2] if idle[2] > 0.02 else 0.0, times[2] * (1 - idle[2]), 0.0, 0.0, 1)
    expected = replace(both, engines=2 * both.engines)
    print("| engines | steps | seconds | trainers idle | by the formula |\n| --- | --- | --- | --- | --- |")
    said = f"{expected.seconds:.2f} s, {expected.idle_trainers:.0%}"
    for engines, formula in ((2, ""), (1, said)):
        print(f"| {engines} | {len(by[engines])} | {times[engines]:.2f} | {idle[engines]:.0%} | {formula} |")


if __name__ == "__main__":
    main()
