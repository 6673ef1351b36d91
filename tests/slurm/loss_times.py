"""How soon the loss of an engine is noted on a real Slurm, and how soon it is back: python -m tests.slurm.loss_times

Seconds by this machine's clock, of one job with an engine on each of two nodes of its own: one is killed, then stopped,
then cut off for a while. ``generates`` is the time until it has started a group again, of the first start until the
first step has its groups. At last the trainer is killed, for which the engines wait.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import records
from tests.helpers.waiting import until
from tests.slurm.cluster import Cluster
from tests.slurm.elastic import TIMEOUT, ElasticRun, elastic, is_another
from tests.slurm.settings import Settings
from tests.trainer.test_lost_engines import newest_step

OUTAGE = TIMEOUT + 3.0


def measured(job: ElasticRun, losses: int, happen: Callable[[], object], repair: Callable[[], object] = str) -> str:
    """A row: seconds from the fault until it is noted, from then until the start and until the engine generates."""
    hit = time.monotonic()
    happen()
    until(lambda: job.engines[1].failures >= losses, "the loss", seconds=120)
    noted = time.monotonic()
    repair()
    until(lambda: job.engines[1].generation >= losses, "the start", seconds=120)
    started = time.monotonic()
    until(lambda: _generates(job.run, losses), "its return", seconds=120)
    back = time.monotonic()
    return f"{noted - hit:.1f} | {started - noted:.1f} | {back - started:.1f} |"


def _generates(run: RunFolder, life: int) -> bool:
    lives = read_record(run).lives.get(1, [])
    return len(lives) > life and any(act.kind == "admit" for act in lives[life])


def trainers_killed(job: ElasticRun) -> str:
    """Seconds from the kill of the trainer to its next start, from there to its first step, and of waiting for
    responses."""
    before = [_waited(record) for record in _steps(job.run)]
    hit = time.time()
    trainer = job.kill(0)
    until(lambda: is_another(job.run, trainer), "its next start", seconds=120)
    started = read_starts(attempts.folders(job.run)[-1].exits)[0].time
    until(lambda: any(record["time"] > started for record in _steps(job.run)), "its first step", seconds=300)
    first = next(record for record in _steps(job.run) if record["time"] > started)
    usual = statistics.median(before)
    return f"{started - hit:.1f} | {first['time'] - started:.1f} | {_waited(first):.1f} | {usual:.1f} |"


def _steps(run: RunFolder) -> list[Record]:
    return [record for record in records(run.path) if record["phase"] == "rl" and record["step"]]


def _waited(record: Record) -> float:
    return record["trainers/idle_fraction"] * record["perf/step_seconds"]


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-loss-times-"))
    with Cluster.up(Settings(nodes=3)) as cluster:
        job = ElasticRun(cluster, folder / "one", 3, **elastic(2, TIMEOUT))
        job.reach(2)
        attempt = attempts.read_attempt(job.run.attempt(1))
        assert attempt is not None
        first = next(record["time"] for record in records(job.run.path) if record["phase"] == "rl") - attempt.started
        print("| engine | noted | started again | generates |\n| --- | --- | --- | --- |")
        print(f"| first start | | | {first:.1f} |")
        print(f"| killed | {measured(job, 1, lambda: job.kill(2))}", flush=True)
        print(
            f"| stopped (timeout {TIMEOUT}) | {measured(job, 2, lambda: job.kill(2, 'STOP'))}",
            flush=True,
        )

        def cut_off() -> None:
            cluster.unplug("node3")

        row = measured(job, 3, cut_off, lambda: (time.sleep(OUTAGE - TIMEOUT), cluster.plug("node3")))
        print(f"| cut off for {OUTAGE:.0f} s (timeout {TIMEOUT}) | {row}")
        job.reach(newest_step(job.run) + 2)
        print("\n| trainer | started again | its first step | waited in it | in other steps |")
        print("| --- | --- | --- | --- | --- |")
        print(f"| killed | {trainers_killed(job)}")


if __name__ == "__main__":
    main()
