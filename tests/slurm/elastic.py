"""Runs on a test cluster whose engines may be lost, some of them in rollout jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import read_run
from rlhpc.launch.supervise.engine_losses import EngineLife, read_engines
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import ROOT, records
from tests.helpers.waiting import until
from tests.slurm.chaos import config, submit
from tests.slurm.cluster import Cluster
from tests.trainer.test_lost_engines import newest_step

TIMEOUT = 15  # seconds without a response after which an engine is lost
PROMPTS = 32


def elastic(engines: int, timeout: int) -> dict[str, Any]:
    """Keys of a run in the order of arrival whose engines may be lost. ``timeout``: of one that does not respond."""
    return {
        "placement": "separate",
        "resources": {"ranks_per_node": 1},
        "rollout__ranks": engines,
        "asynchrony": {"max_staleness": 1, "schedule": "arrival"},
        "recovery": {
            "lost_engines": "rejoin",
            "engine_timeout_seconds": timeout,
            "wait_seconds": 3,
            "hang_timeout_seconds": 120,
        },
        "sft__steps": 2,
        "rewards": [{"function": "tests.rewards.functions:unhurried_number"}],
        "reward_workers": {"per_engine": 1},
    }


def in_jobs(jobs: int, others: int, timeout: int, engines: int = 0) -> dict[str, Any]:
    """The same keys with an engine in each rollout job, which the trainers' partition preempts.

    The trainers' job has ``others`` nodes, of which ``engines`` generate.
    """
    slurm = {
        **{"nodes": others + jobs, "gpus_per_node": 0, "cpus_per_rank": 1, "time": 20, "partition": "urgent"},
        **{"exclusive": True, "rollout_jobs": {"count": jobs, "nodes": 1, "partition": "main"}},
    }
    known = {key: value for key, value in elastic(jobs, timeout).items() if key != "rollout__ranks"}
    return {**known, "rollout__nodes": jobs + engines, "slurm": slurm}


class ElasticRun:
    """A submitted run, with or without rollout jobs."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: int = 0, **keys: Any) -> None:
        self.cluster, self.run = cluster, RunFolder(folder / "run")
        known = {"train__steps": 2000, "checkpoint__every": 20, "validation__every": 1000}
        self.job = submit(cluster, config(folder, nodes, **{**known, **keys}))
        record = read_run(self.run.path).job
        assert record is not None
        self.rollout = record.rollout_job

    def queue(self) -> dict[str, tuple[str, str]]:
        """State and nodes of each job that is in the queue."""
        lines = self.cluster.run("squeue -h -r -o '%i|%T|%N'").stdout.splitlines()
        return {job: (state, nodes) for job, state, nodes in (line.split("|") for line in lines)}

    @property
    def state(self) -> str:
        """State of the trainers' job, empty when it has ended."""
        return self.queue().get(str(self.job), ("", ""))[0]

    def reach(self, step: int) -> None:
        """Waits for a step."""
        until(lambda: newest_step(self.run) >= step or not self.state, f"step {step}")
        assert newest_step(self.run) >= step, self.output

    def preempt(self, job: str, seconds: int) -> None:
        """Takes a job's node for so long."""
        node = self.queue()[job][1]
        options = ("--partition=urgent", "--exclusive", f"--nodelist={node}")
        self.cluster.submit(*options, script=f"sleep {seconds}", cwd="/tmp")

    def kill(self, rank: int, signal: str = "KILL") -> int:
        """Sends a signal to a rank; returns its process id."""
        start = read_starts(attempts.folders(self.run)[-1].exits)[rank]
        self.cluster.run(["kill", f"-{signal}", str(start.process.pid)], node=start.node, check=True)
        return start.process.pid

    @property
    def output(self) -> str:
        folders = (self.run.submission, self.run.rollout_submission)
        return "".join(file.read_text() for folder in folders for file in sorted(folder.glob("*_log.out")))

    @property
    def engines(self) -> tuple[EngineLife, ...]:
        """Engines of the newest attempt."""
        known = read_engines(attempts.folders(self.run)[-1])
        return known.engines if known is not None else ()

    def lives(self, engine: int) -> int:
        """How often an engine has begun to generate."""
        return sum(bool(life) for life in read_record(self.run).lives.get(engine, []))

    def rlhpc(self, *words: str) -> str:
        command = [sys.executable, "-m", "rlhpc.cli.main", *words]
        environ = {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        return self.cluster.run(command, env=environ, check=True).stdout

    def end(self) -> None:
        """Cancels the run and waits for the end of all its jobs."""
        self.rlhpc("cancel", str(self.run.path))
        until(lambda: not self.queue(), "the end of all jobs")


def steps(run: RunFolder) -> list[int]:
    return [record["step"] for record in records(run.path) if record["phase"] == "rl" and record["step"]]


def check_once(run: RunFolder) -> None:
    """Every step and every group once, and in one attempt."""
    taken = steps(run)
    assert taken == list(range(1, len(taken) + 1))
    batches = read_record(run).batches
    groups = [group for step in sorted(batches) for group in batches[step].kept]
    assert len(groups) == len(set(groups)) == PROMPTS * len(batches)
    assert len(attempts.folders(run)) == 1


def is_another(run: RunFolder, trainer: int) -> bool:
    """True if the first rank is another process."""
    start = read_starts(run.attempt(1).exits).get(0)
    return start is not None and start.process.pid != trainer
