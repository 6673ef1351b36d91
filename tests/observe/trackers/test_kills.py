"""The process of the trackers killed at random moments, with the real libraries: what they have in the end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.side_processes import TrackerProcess
from rlhpc.observe.trackers.__main__ import main
from tests.helpers.runs import write_config
from tests.helpers.waiting import until
from tests.observe.trackers import test_tensorboard as event_files
from tests.observe.trackers.steps import append, new_run, record, replace, steps
from tests.observe.trackers.test_libraries import mlflow_run
from tests.observe.trackers.wandb_files import rows

pytestmark = pytest.mark.workers
GAP = 0.1  # seconds of a step: MLflow takes up to 35 ms


class Run:
    """Writes steps as rank 0 does, 50 metrics each, and resumes from a few steps back when asked."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._ended, self._lock = folder, threading.Event(), threading.Lock()
        self.written: list[dict] = steps(3, -1)
        self.attempt, self.resumed = 1000.0, 0
        append(folder, self.written)
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        while not self._ended.wait(GAP):
            with self._lock:
                step = self.written[-1]["step"] + 1 if self.written[-1]["phase"] == "rl" else 0
                one = record("rl", step, self.attempt, **{f"m{n}": step + n / 100 for n in range(47)})
                self.written.append(one)
                append(self._folder, [one])

    def resume(self, steps_back: int) -> None:
        with self._lock:
            self.attempt += 1000.0
            self.resumed += 1
            del self.written[max(3, len(self.written) - steps_back) :]
            replace(self._folder, self.written)

    def end(self) -> list[dict]:
        self._ended.set()
        self._thread.join()
        return self.written


def kill_and_check(folder: RunFolder, kills: int, latest: float, seed: int) -> None:
    """``latest``: seconds of the latest kill, from W&B's start on, or every other time from the process's."""
    observe = {"trackers": [{"kind": "mlflow"}, {"kind": "wandb"}]}
    config = load_config(write_config(folder.path.parent, observe=observe))
    save_config(folder, config)
    moment = random.Random(seed)
    run = Run(folder)
    for number in range(kills):
        process = TrackerProcess(folder, config)
        if number % 2 == 0:
            await_start(folder)
        time.sleep(moment.uniform(0.0, latest))
        assert process.process is not None
        os.killpg(process.process.pid, signal.SIGKILL)
        process.process.wait()
        if number % 3 == 2:
            run.resume(moment.randint(1, 60))
    process = TrackerProcess(folder, config)
    await_start(folder)
    reached = len(run.written)
    run.resume(40)
    until(lambda: len(run.written) > reached)
    written = run.end()
    process.end(60.0)
    assert main([str(folder.path)]) == 0  # if the machine is too slow for the time that the end of a run has
    event_files.check(folder, written)  # with the values of the last attempt
    check_mlflow(folder, written)
    logged = [
        (phase, int(row[f"{phase}/step"])) for row in rows(folder) for phase in ("sft", "rl") if f"{phase}/step" in row
    ]
    assert {*logged} == {(one["phase"], one["step"]) for one in written}
    print(f"{len(written)} steps, {run.resumed} resumed; W&B has {len(logged) - len({*logged})} rows twice")


def await_start(folder: RunFolder) -> None:
    """Waits for a further start of W&B."""
    names = folder.trackers.files("wandb")
    known = {*names.glob("wandb/offline-run-*")}
    until(lambda: {*names.glob("wandb/offline-run-*")} - known)


def check_mlflow(folder: RunFolder, written: list[dict]) -> None:
    client, run = mlflow_run(folder)
    for name in ("rl/step", "rl/loss", "rl/m46", "sft/loss"):
        places = [one.step for one in client.get_metric_history(run.info.run_id, name)]
        wanted = [one["step"] + 3 * (one["phase"] == "rl") for one in written if name.startswith(one["phase"])]
        assert sorted(places) == wanted, name


def test_a_kill_at_a_random_moment_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    kill_and_check(new_run(tmp_path), 1, 3.0, 1)


@pytest.mark.long
def test_ten_kills_and_resumes_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    kill_and_check(new_run(tmp_path), 10, 16.0, 7)
