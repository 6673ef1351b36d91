"""Trainers that wait for rollout jobs which will never come are noticed; a busy or silent Slurm is no reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.launch.slurm.queue import JobStatus
from rlhpc.launch.supervise import rollout_jobs
from rlhpc.launch.supervise.rollout_jobs import RolloutJobsWatch
from tests.helpers.runs import ROOT
from tests.launch.supervise.test_rollout_engines import KEYS

ALL = (*KEYS, "slurm.nodes=4", "rollout.nodes=2")  # no engine in the trainers' job


class Queue:
    """What Slurm answers: the states of two rollout jobs, or nothing."""

    def __init__(self) -> None:
        self.states: tuple[str, ...] | None = ("RUNNING", "PENDING")

    def __call__(self, ids: list[str], cluster: str) -> dict[str, object]:
        assert ids == ["12"]
        if self.states is None:
            raise UserError("does not answer")
        found = [JobStatus(f"12_{n}", *state.partition(" ")[::2]) for n, state in enumerate(self.states)]
        return {job.job_id: job for job in found}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr(rollout_jobs, "read_jobs", found)
    monkeypatch.setattr(rollout_jobs, "_QUEUE_SECONDS", 0.0)
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run").create()
    write_json(folder.job, {"job_id": "11", "rollout_job": "12"})
    return folder


def watch(run: RunFolder, *keys: str) -> RolloutJobsWatch:
    return RolloutJobsWatch(run, load_config(ROOT / "configs" / "demo.yaml", keys))


def test_it_is_said_once_when_slurm_has_said_so_twice(run: RunFolder, queue: Queue) -> None:
    found = watch(run, *ALL)
    assert not found.look()
    queue.states = ("FAILED", "CANCELLED")
    assert not found.look()
    queue.states = None
    assert not found.look()
    queue.states = ("FAILED",)
    assert found.look() == "all rollout jobs have ended"
    assert not found.look()


def test_one_that_waits_in_the_queue_is_enough(run: RunFolder, queue: Queue) -> None:
    found = watch(run, *ALL)
    queue.states = ("FAILED", "PENDING")
    assert not any(found.look() for _ in range(5))


def test_jobs_that_can_never_start_are_none(run: RunFolder, queue: Queue) -> None:
    found = watch(run, *ALL)
    queue.states = ("FAILED", "PENDING QOSNotAllowed")
    assert not found.look()
    assert found.look() == (
        "rollout job 12_1 can never start, because it has a QoS that its account or partition does not allow "
        "(QOSNotAllowed); slurm.rollout_jobs.qos: name another"
    )
    found = watch(run, *ALL)
    queue.states = ("RUNNING", "PENDING QOSNotAllowed")
    assert not any(found.look() for _ in range(5))


def test_trainers_with_engines_of_their_own_go_on(run: RunFolder, queue: Queue) -> None:
    queue.states = ("FAILED", "FAILED")
    assert not any(watch(run, *KEYS).look() for _ in range(5))
    found = watch(run, *KEYS)
    assert not any(found.look() for _ in range(5))


def test_without_a_record_nothing_is_known(tmp_path: Path, queue: Queue) -> None:
    found = watch(RunFolder(tmp_path), *ALL)
    assert not any(found.look() for _ in range(5))
