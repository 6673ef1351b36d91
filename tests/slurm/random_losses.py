"""Runs on a real Slurm that lose engines, trainers or the first node at random moments, none helped by a person.

python -m tests.slurm.random_losses [--runs 10] [--seed 0] [--losses kill_engine,unplug_engine] [--rollout-jobs]

With --rollout-jobs each engine is in a job of its own, which may be preempted.

Each run must finish, train on every prompt once, take every step once, hold the staleness bound, and end with the
weights of a replay of its record, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import records
from tests.slurm.chaos import config, submit, weights
from tests.slurm.cluster import Cluster
from tests.slurm.elastic import elastic, in_jobs
from tests.slurm.faults import Target, later
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

NODES, TRAINERS, STEPS, PROMPTS, TIMEOUT = 4, 2, 24, 16, 12


CHANGES: dict[str, Any] = {
    **elastic(NODES - TRAINERS, TIMEOUT),
    "train__steps": STEPS,
    "train__prompts_per_step": PROMPTS,
    "checkpoint__every": 4,
    "validation__every": 8,
}
_MOST_LOSSES = 2  # of a run


JOBS: dict[str, Any] = {
    **{key: value for key, value in CHANGES.items() if key != "rollout__ranks"},
    **in_jobs(NODES - TRAINERS, TRAINERS, TIMEOUT),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one run; ``wrong`` is empty when all is as it should be."""

    losses: tuple[str, ...]
    starts: int
    seconds: float
    wrong: str = ""


def _signal(target: Target, ranks: Sequence[int], name: str) -> str:
    starts = read_starts(attempts.folders(target.run)[-1].exits)
    rank = target.chance.choice([rank for rank in ranks if rank in starts] or [0])
    if rank not in starts:
        return "nobody"
    with contextlib.suppress(FileNotFoundError):  # its node is down
        target.cluster.run(["kill", f"-{name}", str(starts[rank].process.pid)], node=starts[rank].node)
    return f"rank {rank}"


def _engine_node(target: Target) -> str:
    starts = read_starts(attempts.folders(target.run)[-1].exits)
    return target.chance.choice([starts[rank].node for rank in ENGINES if rank in starts] or ["node4"])


ENGINES, TRAINING = range(TRAINERS, NODES), range(TRAINERS)


def unplug_engine(target: Target) -> str:
    """For less time than Slurm needs to give the node up, or for longer."""
    node, seconds = _engine_node(target), target.chance.choice([20, 60])
    target.cluster.unplug(node)
    target.repairs.append(later(seconds, lambda: target.cluster.plug(node)))
    return f"{node} for {seconds} s"


def _crash(target: Target, node: str) -> str:
    target.cluster.crash(node)
    target.repairs.append(later(45, lambda: target.cluster.boot(node, wait=False)))
    return node


def preempt(target: Target) -> str:
    """Takes the node of an engine for a while."""
    node, seconds = _engine_node(target), target.chance.choice([5, 30])
    options = ("--partition=urgent", "--exclusive", f"--nodelist={node}")
    target.cluster.submit(*options, script=f"sleep {seconds}", cwd="/tmp")
    return f"{node} for {seconds} s"


LOSSES: dict[str, Callable[[Target], str]] = {
    "kill_engine": lambda target: _signal(target, ENGINES, "KILL"),
    "stop_engine": lambda target: _signal(target, ENGINES, "STOP"),
    "crash_engine": lambda target: _crash(target, _engine_node(target)),
    "unplug_engine": unplug_engine,
    "kill_trainer": lambda target: _signal(target, TRAINING, "KILL"),
    "crash_first": lambda target: _crash(target, "node1"),
}


def run_once(
    folder: Path, losses: Sequence[str], chance: random.Random, changes: Mapping[str, Any] = MappingProxyType(CHANGES)
) -> Outcome:
    """A run that is hit by ``losses``, and its replay."""
    began, run = time.monotonic(), RunFolder(folder / "run")
    with Cluster.up(Settings(nodes=NODES)) as cluster:
        job_id, hits, repairs = submit(cluster, config(folder, NODES, **changes)), [], list[threading.Timer]()
        for name, moment in zip(losses, sorted(chance.sample(range(STEPS - 4), len(losses))), strict=True):
            wait(lambda moment=moment: len(records(run.path)) > moment, f"{moment} records", timeout=600)
            time.sleep(chance.uniform(0.0, 1.0))
            where = {**LOSSES, "preempt": preempt}[name](Target(cluster, job_id, run, chance, repairs=repairs))
            hits.append(f"{name} {where} after {len(records(run.path))} records")
        wrong = _finished(cluster, job_id) or _wrong(run)
        for repair in repairs:  # else they may hit the replay
            repair.cancel()
        cluster.heal()
        if not wrong:
            again = folder / "again"
            replayed = {**CHANGES, "asynchrony": {**CHANGES["asynchrony"], "replay": str(run.path)}}
            wait(lambda: not cluster.run("squeue -h").stdout.strip(), "an empty queue")
            wrong = _finished(cluster, submit(cluster, config(again, NODES, **replayed)))
            wrong = wrong or ("" if weights(again / "run") == weights(run.path) else "a replay has other weights")
    return Outcome(tuple(hits), len(attempts.folders(run)), time.monotonic() - began, wrong)


def _finished(cluster: Cluster, job_id: int) -> str:
    try:
        cluster.wait_state(job_id, "COMPLETED", timeout=900)
    except AssertionError as error:
        return f"did not finish: {str(error).splitlines()[0]}"
    return ""


def _wrong(run: RunFolder) -> str:
    """What the run's own records say against it."""
    taken = [record for record in records(run.path) if record["phase"] == "rl" and record["step"]]
    if [record["step"] for record in taken] != list(range(1, STEPS + 1)):
        return f"steps {[record['step'] for record in taken]}"
    batches = read_record(run).batches
    groups = [group for step in sorted(batches) for group in batches[step].kept]
    if len(groups) != len(set(groups)) or sorted(groups) != list(range(PROMPTS * STEPS)):
        return f"{len(groups)} groups, {len(set(groups))} different ones, up to {max(groups)}"
    stale = max(record["sampling/staleness_max"] for record in taken)
    return f"a group was {stale} steps old" if stale > 1 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", default="")
    parser.add_argument("--rollout-jobs", action="store_true")
    options = parser.parse_args()
    folder, good = Path(tempfile.mkdtemp(prefix="rlhpc-losses-")), 0
    changes = JOBS if options.rollout_jobs else CHANGES
    known = options.losses.split(",") if options.losses else [*LOSSES, *(["preempt"] if options.rollout_jobs else [])]
    for number in range(options.runs):
        chance = random.Random(f"{options.seed} {number}")
        losses = [known[number % len(known)], *chance.choices(known, k=chance.randrange(_MOST_LOSSES))]
        outcome = run_once(folder / f"run-{number}", losses, chance, changes)
        good += not outcome.wrong
        said = f"FAILED: {outcome.wrong}" if outcome.wrong else "ok"
        print(
            f"{number + 1:3} {'; '.join(outcome.losses)}: {outcome.starts} starts, {outcome.seconds:.0f} s: {said}",
            flush=True,
        )
    print(f"{good} of {options.runs} runs finished by themselves with the weights of a replay ({folder})")
    sys.exit(0 if good == options.runs else 1)


if __name__ == "__main__":
    main()
