"""Engines that a rollout job starts: as ones that join, with what former starts of the job have left put aside."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.roles import engine_parts, parts_of, rollout_job_engines
from rlhpc.launch.supervise.engine_losses import EngineLife, EnginesRecord, read_engines
from rlhpc.launch.supervise.job_ranks import JobRanks, TrainersBoard
from rlhpc.sharding.placement import placement_of
from tests.helpers.runs import ROOT

KEYS = (
    *("resources.ranks_per_node=2", "slurm.nodes=5", "placement=separate", "rollout.nodes=3", "rollout.tp=2"),
    *("recovery.lost_engines=rejoin", "asynchrony.schedule=arrival"),
    *("slurm.rollout_jobs.count=2", "slurm.rollout_jobs.nodes=1"),
)


@dataclass
class Part:
    """Ranks whose end the test decides on."""

    ranks: range
    generation: int
    node: str = "node9"
    gone: str = ""
    ended: dict[int, ExitRecord] = field(default_factory=dict)

    def poll(self) -> dict[int, ExitRecord]:
        return self.ended

    def end(self) -> None:
        pass


@dataclass
class Start:
    config: RunConfig
    attempt: AttemptFolder
    world_size: int = 10
    parts: list[Part] = field(default_factory=list)

    def start(self, ranks: range, generation: int = 0) -> Part:
        self.parts.append(Part(ranks, generation))
        return self.parts[-1]


@pytest.fixture
def how(tmp_path: Path) -> Start:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.exits.mkdir(parents=True)
    return Start(load_config(ROOT / "configs" / "demo.yaml", KEYS), attempt)


def job(how: Start, number: int) -> JobRanks:
    placement = placement_of(how.config, how.world_size)
    engines = rollout_job_engines(how.config, placement, number)
    parts = dict(zip(engines, engine_parts(placement, engines), strict=True))
    record = how.attempt.rollout_job_losses(number)
    return JobRanks.start_engines(how, parts, record, TrainersBoard(lambda key: None), lambda line: None)


def test_ranks_are_divided_between_the_jobs(how: Start) -> None:
    """Of ten ranks on five nodes the first four train, two are an engine in their job, and each other job has one."""
    assert parts_of(how.config, 10) == [range(4), range(4, 6)]
    assert [list(job(how, number).ranks) for number in (0, 1)] == [[6, 7], [8, 9]]
    placement = placement_of(how.config, 10)
    assert (placement.num_beginning, placement.beginning_ranks, placement.joining_ranks) == (1, range(6), range(6, 10))


def test_every_start_of_a_job_is_another_generation(how: Start) -> None:
    for times in (1, 2, 3):
        (how.attempt.exits / "rank-00008.exit.json").write_text("{}")
        job(how, 1)
        assert [part.generation for part in how.parts] == [*range(1, times + 1)]
        assert (how.attempt.exits / "rank-00008.exit.json").exists() is False
    assert [*how.attempt.former_exits(2).iterdir()] == [how.attempt.former_exits(2) / "rank-00008.exit.json"]


def test_one_that_is_lost_is_started_again_there_and_counted(how: Start) -> None:
    ranks = job(how, 0)
    how.parts[0].ended = {6: ExitRecord(6, "node9", 0, time.time(), "signal", "", "died by signal 9")}
    until = time.monotonic() + 30
    while ranks.engines[0].state.phase != "waiting" and time.monotonic() < until:
        assert ranks.poll() == {}
        time.sleep(0.05)
    assert ranks.losses == 1
    ranks.engines[0].state = EngineLife(1, "waiting", due=0.0)
    while len(how.parts) < 2 and time.monotonic() < until:
        ranks.poll()
    assert (how.parts[1].ranks, how.parts[1].generation) == (range(6, 8), 2)


def test_the_record_of_an_attempt_has_the_engines_of_all_jobs(how: Start) -> None:
    EnginesRecord((EngineLife(since=1.0),), losses=2).write(how.attempt.engine_losses)
    job(how, 1)
    known = read_engines(how.attempt)
    assert known is not None
    assert [engine.phase for engine in known.engines] == ["running", "absent", "running"]
    assert (known.losses, known.engines[2].generation) == (2, 1)
