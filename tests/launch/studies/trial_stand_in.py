"""Trials whose run folders are written at once, with a number that a function of their settings gives."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import StudyFile
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.studies.advance import Advance
from rlhpc.launch.studies.study_folder import StudyFolder, base_of, create
from rlhpc.launch.studies.trial_runs import TrialState, state_of
from tests.helpers.runs import ROOT

RATE = "actor.optimizer.learning_rate"
SPACE = {RATE: {"low": 1e-5, "high": 1e-2, "log": True}, "train.minibatches": {"choices": [1, 2, 4]}}


def score(config: RunConfig) -> float:
    """Best at a learning rate of 1e-3 and four minibatches."""
    return config.train.minibatches / 10 - abs(math.log10(config.actor.optimizer.learning_rate) + 3)


@dataclass
class StandIn:
    """``outcome``: the number of a run, or the cause of its end; None: it goes on. ``refuse`` raises an error for
    settings that cannot work, ``before_start`` where a command ends. Starts are added to the file ``log``, one line
    each."""

    log: Path
    outcome: Callable[[RunConfig], float | str | None] = score
    refuse: Callable[[RunConfig], None] = lambda config: None
    before_start: Callable[[RunConfig], None] = lambda config: None
    resumed: tuple[str, ...] = ()
    cancelled: list[str] = field(default_factory=list)

    def check(self, config: RunConfig) -> None:
        self.refuse(config)

    def start(self, config: RunConfig, *, again: bool) -> None:
        self.before_start(config)
        with self.log.open("a") as file:
            file.write(f"{config.name}{' again' * again}\n")
        final = RunFolder(config.folder)
        run = final if final.path.exists() else RunFolder(final.path.with_suffix(".new"))
        shutil.rmtree(final.path.with_suffix(".new"), ignore_errors=True)
        run.create()
        save_config(run, config)
        attempt = attempts.begin(run, job_id="", restart_count=0, nodes=("n",), world_size=2, saved_step=-1)
        found = self.outcome(config)
        write_steps(run, [found - 0.1, found] if isinstance(found, float) else [0.0])
        if found is not None:
            cause, action = ("finished", "none") if isinstance(found, float) else (found, "stop")
            attempts.end(attempt, Verdict(time.time(), cause, f"it was {cause}", action))  # type: ignore[arg-type]
        if run != final:
            run.path.rename(final.path)  # a kill before it leaves a trial that has not begun

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        return [self._state(run) for run in runs]

    def _state(self, run: RunFolder) -> TrialState:
        folders = attempts.folders(run)
        if folders and attempts.read_verdict(folders[-1]) is None:
            return TrialState("running")
        return state_of(RunEntry(run, None), None)

    def cancel(self, run: RunFolder) -> None:
        self.cancelled.append(run.path.name)

    @property
    def starts(self) -> list[str]:
        """Names of the runs in the order of their starts."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def write_steps(run: RunFolder, values: Sequence[float]) -> None:
    """Writes a run's steps with these values of the metric."""
    steps = [{"phase": "rl", "step": step, "time": 0.0, "reward/mean": value} for step, value in enumerate(values, 1)]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))


def study_of(folder: Path, **fields: object) -> StudyFile:
    """A study of two keys of the demo by reward/mean."""
    known = {
        "name": "search",
        "base": str(ROOT / "configs" / "demo.yaml"),
        "folder": str(folder / "study"),
        "space": SPACE,
        "objective": {"metric": "reward/mean"},
        "budget": {"trials": 12, "at_once": 3},
        **fields,
    }
    return StudyFile.model_validate_json(json.dumps(known), strict=True)


def begin(folder: Path, **fields: object) -> tuple[StudyFolder, StandIn]:
    """A study that has begun, and what its trials are run by."""
    study = study_of(folder, **fields)
    return create(study, base_of(study), local=False), StandIn(folder / "starts.log")


def advance(folder: StudyFolder, trials: StandIn) -> int:
    """One advance; trials running."""
    with folder.locked():
        return Advance(folder, trials).run()


def finish(folder: StudyFolder, trials: StandIn) -> None:
    """Advances until nothing is running."""
    for _ in range(100):
        if not advance(folder, trials):
            return
    raise AssertionError("the study does not end")
