"""Trials as processes of this machine, which write a step at a time, ask the pruner as a trial's job does, and advance
the study at their end.

``python -m tests.launch.studies.trial_processes FOLDER`` advances the study in FOLDER, or with a trial's run folder is
its process; both may be killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.process import ProcessId
from rlhpc.core.records import read_records
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.studies.advance import Advance
from rlhpc.launch.studies.study_folder import StudyFolder, create
from rlhpc.launch.studies.trial_job import prune
from rlhpc.launch.studies.trial_runs import TrialState, state_of
from rlhpc.launch.studies.trials_table import StudyTable, read_table
from tests.helpers.runs import ROOT
from tests.launch.studies.trial_stand_in import score, study_of

STEPS = 8
_STEP_SECONDS, _GAIN = 0.6, 0.01
_RECORD, _RECORD_SECONDS = "process.json", 30.0


@dataclass(frozen=True)
class TrialProcesses:
    """Starts and states of trials. Each start is a line in the file ``log``: name and process."""

    log: Path
    resumed: ClassVar[tuple[str, ...]] = ()

    def check(self, config: RunConfig) -> None:
        """Accepts every configuration."""

    def start(self, config: RunConfig, *, again: bool) -> None:
        """Starts the trial's process, which waits for its record as a job does."""
        run = RunFolder(config.folder).create()
        save_config(run, config)
        process = subprocess.Popen([*COMMAND, str(run.path)], cwd=ROOT, stdout=subprocess.DEVNULL)
        with self.log.open("a") as file:
            file.write(f"{config.name} {process.pid}\n")
        if (found := ProcessId.of(process.pid)) is not None:
            write_json(run.path / _RECORD, asdict(found))

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        return [self._state(run) for run in runs]

    def _state(self, run: RunFolder) -> TrialState:
        process = recorded(run)
        lives = process is not None and process.is_alive()  # before the verdict is read
        state = state_of(RunEntry(run, None), None)
        return TrialState("running") if lives and state.phase != "finished" else state

    def cancel(self, run: RunFolder) -> None:
        raise AssertionError("no budget ends a trial here")

    @property
    def starts(self) -> list[list[str]]:
        """Name and process of each start."""
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []


COMMAND = [sys.executable, "-m", "tests.launch.studies.trial_processes"]


def recorded(run: RunFolder) -> ProcessId | None:
    """Newest process of a trial."""
    file = run.path / _RECORD
    return ProcessId(**read_json(file)) if file.exists() else None


def advance(folder: StudyFolder) -> int:
    """One advance; trials running."""
    with folder.locked():
        return Advance(folder, TrialProcesses(folder.path.parent / "starts.log")).run()


def train(run: RunFolder) -> None:
    """Process of a trial, which goes on from its last step if it was killed; ends itself if the pruner rejects it."""
    import optuna  # noqa: F401 - before the first step, as a real run begins later than the pruner can be asked

    folder, config, over = StudyFolder(run.path.parents[1]), load_config(run.config), threading.Event()

    def end() -> None:
        advance(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    deadline = time.monotonic() + _RECORD_SECONDS
    while recorded(run) != ProcessId.own():
        if time.monotonic() > deadline:  # the advance was killed before it wrote it
            return
        time.sleep(0.02)
    attempt = attempts.begin(run, job_id="", restart_count=0, nodes=("n",), world_size=1, saved_step=-1)
    threading.Thread(target=prune, args=(folder, run, end, over, 0.02), daemon=True).start()
    for step in range(len(read_records(run.metrics)) + 1, config.train.steps + 1):
        time.sleep(_STEP_SECONDS)
        record = {"phase": "rl", "step": step, "time": time.time(), "reward/mean": score(config) + _GAIN * step}
        with run.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
    attempts.end(attempt, Verdict(time.time(), "finished", "", "none"))
    over.set()
    advance(folder)


def alive(folder: StudyFolder, processes: TrialProcesses) -> list[int]:
    """Processes of trials that have begun to train."""
    runs = [folder.trial(int(name.rpartition("-")[2])) for name, _ in processes.starts]
    found = [recorded(run) for run in runs if run.metrics.exists()]
    return [process.pid for process in found if process is not None and process.is_alive()]


def check_kills(place: Path, kills: int) -> tuple[StudyTable, list[str]]:
    """Kills advances and trials' processes at random moments, and lets the last ones end the study. Returns its table
    and what was killed."""
    pruner = {"name": "SuccessiveHalvingPruner", "arguments": {"min_resource": 2, "reduction_factor": 2}}
    known = {"pruner": pruner, "retries": kills}
    study = study_of(place, **known, budget={"trials": 5000, "at_once": 3})
    base = load_config(study.base, [f"train.steps={STEPS}"])
    folder = create(study, base, local=False)
    processes, chance, killed = TrialProcesses(place / "starts.log"), random.Random(0), list[str]()
    began = time.monotonic()
    subprocess.run([*COMMAND, str(folder.path)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    longest = time.monotonic() - began
    while len(killed) < kills:
        command = subprocess.Popen([*COMMAND, str(folder.path)], cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.0, longest))
        if chance.random() < 0.5 and (pids := alive(folder, processes)):
            os.kill(chance.choice(pids), signal.SIGKILL)
            killed.append("trial")
        elif command.poll() is None:
            command.kill()
            killed.append("advance")
        assert command.wait() in (0, -signal.SIGKILL)
    count = len(read_table(folder).trials) + 5
    create(study_of(place, **known, budget={"trials": count, "at_once": 3}), base, local=False)
    while advance(folder):
        time.sleep(0.2)
    return check_once(folder, killed.count("trial")), killed


def check_once(folder: StudyFolder, killed: int) -> StudyTable:
    """Each trial is complete, or pruned before its last step, once, with each of its steps once."""
    found = read_table(folder)
    assert [row.state for row in found.trials if row.state not in ("complete", "pruned")] == []
    count = len(found.trials)
    runs = [folder.trial(row.number) for row in found.trials]
    started = {name for name, _ in TrialProcesses(folder.path.parent / "starts.log").starts}
    assert started == {f"search-{number}" for number in range(count)}
    assert sum(len(attempts.folders(run)) for run in runs) <= count + killed
    scores = [score(load_config(run.config)) for run in runs]
    for row, run in zip(found.trials, runs, strict=True):
        steps = [record["step"] for record in read_records(run.metrics)]
        assert steps == [*range(1, len(steps) + 1)]
        assert row.value is not None
        last = round((row.value - score(load_config(run.config))) / _GAIN)
        assert (last == STEPS) == (row.state == "complete"), (row, last)
    assert found.best == scores.index(max(scores))
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if path.parent.name == "trials":
        train(RunFolder(path))
    else:
        advance(StudyFolder(path))
