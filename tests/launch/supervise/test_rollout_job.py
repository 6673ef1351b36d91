"""Which attempt a rollout job serves, and when it has nothing more to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise import rollout_jobs
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.node_environment import EnvironmentPlace, NotPlaced
from rlhpc.launch.supervise.rollout_jobs import RolloutJob, share_store
from tests.helpers.runs import ROOT

ELEMENT = BatchJob("14", "12_1", 0, (("node3",),))
PLACE = EnvironmentPlace(Path("env.tar"), "tar", 1, "/tmp/job", "/tmp/job/env")


@dataclass(frozen=True)
class Start:
    """What the job asks of a StepStart."""

    environment: Any = None


@pytest.fixture
def job(tmp_path: Path) -> RolloutJob:
    run = RunFolder(tmp_path / "run").create()
    write_json(run.job, {"job_id": "11", "rollout_job": "12"})
    termination: Any = SimpleNamespace(requested=False)
    deadline: Any = SimpleNamespace(seconds_left=lambda: float("inf"))
    return RolloutJob(run, ELEMENT, 1, termination, deadline)


def begin(run: RunFolder) -> AttemptFolder:
    return attempts.begin(run, job_id="11", restart_count=0, nodes=("node1",), world_size=3, saved_step=-1)


def test_it_is_the_run_s_as_an_element_of_the_array_that_the_record_names(job: RolloutJob) -> None:
    job.termination.requested = True  # it waits for no record
    assert job._is_of_run()
    write_json(job.run_folder.job, {"job_id": "15", "rollout_job": "16"})  # the run was resumed with others
    assert not job._is_of_run()
    assert job.run() == 1


def test_it_serves_the_newest_attempt_until_that_has_a_verdict(job: RolloutJob) -> None:
    assert job._present_attempt() is None
    first = begin(job.run_folder)
    assert job._present_attempt() == first
    attempts.end(first, Verdict(time.time(), "network", "", "retry"))
    assert job._present_attempt() is None
    second = begin(job.run_folder)
    assert job._present_attempt() == second
    job._served.add(second.number)  # its engines have ended with the trainers
    assert job._present_attempt() is None


def test_it_ends_when_slurm_says_that_the_trainers_job_has(job: RolloutJob, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [UserError("does not answer"), SimpleNamespace(live=True), SimpleNamespace(live=False)]

    def read(job_id: str, cluster: str | None) -> Any:
        assert job_id == "11"
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    monkeypatch.setattr(rollout_jobs, "read_job", read)
    monkeypatch.setattr(rollout_jobs, "_ASK_SECONDS", 0.0)
    assert [job._run_is_over() for _ in range(3)] == [False, False, True]
    answers.append(None)  # Slurm has forgotten it
    assert job._run_is_over()
    monkeypatch.setattr(rollout_jobs, "_ASK_SECONDS", 60.0)
    assert not job._run_is_over()  # not asked so soon
    assert answers == []


def test_an_attempt_without_a_store_is_waited_for(job: RolloutJob) -> None:
    assert job._connect(begin(job.run_folder)) is None


def removals(
    job: RolloutJob, server: StoreServer, monkeypatch: pytest.MonkeyPatch, environment: Callable[..., Any]
) -> list[Any]:
    """What is removed from which nodes, in a job with an attempt to serve."""
    removed: list[Any] = []
    attempt = begin(job.run_folder)
    share_store(attempt, StoreAddress("127.0.0.1", server.port, server.secret))
    save_config(job.run_folder, load_config(ROOT / "configs" / "demo.yaml"), attempt.config)
    monkeypatch.setattr(rollout_jobs, "remove_from_nodes", lambda place, nodes: removed.append((place, nodes)))
    monkeypatch.setattr(rollout_jobs, "environment_on_nodes", environment)
    return removed


def test_what_is_on_nodes_is_removed_if_one_of_them_has_no_room(
    job: RolloutJob, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(*_: Any) -> Any:
        error = NotPlaced({"node3": "no room"})
        error.place = PLACE
        raise error

    removed = removals(job, server, monkeypatch, environment)
    with pytest.raises(UserError, match="no room"):
        job.run()
    assert removed == [(PLACE, ("node3",))]


@pytest.mark.parametrize("terminated", [False, True])
def test_an_environment_on_its_nodes_is_removed_at_its_end(
    job: RolloutJob, server: StoreServer, monkeypatch: pytest.MonkeyPatch, terminated: bool
) -> None:
    """Unless Slurm ends the job: its nodes may be another's at any moment."""
    removed = removals(job, server, monkeypatch, lambda *_: nullcontext(PLACE))
    monkeypatch.setattr(RolloutJob, "_start", lambda *_: Start())

    def watch(job: RolloutJob, start: Start, store: Any) -> None:
        assert start.environment == PLACE
        assert removed == []
        job._served.add(1)
        job.termination.requested = terminated
        monkeypatch.setattr(rollout_jobs, "read_job", lambda *_: None)

    monkeypatch.setattr(RolloutJob, "_watch", watch)
    assert job.run() == terminated
    assert removed == ([] if terminated else [(PLACE, ("node3",))])
