"""MLflow and Weights & Biases, the real libraries without network: steps are read back equal, each once."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Verdict, begin, end
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.side_processes import TrackerProcess
from rlhpc.observe.trackers.delivery import Delivery, held
from rlhpc.observe.trackers.sync import deliveries, sync_tracker, wandb_command
from rlhpc.observe.trackers.wandb_runs import files_of
from rlhpc.observe.trackers.wandb_runs import histories as rows_of
from tests.helpers.commands import invoke
from tests.helpers.runs import write_config
from tests.helpers.waiting import until
from tests.observe.trackers import test_event_files as event_files
from tests.observe.trackers.steps import append, new_run, record, replace, steps

pytestmark = pytest.mark.workers  # W&B starts a process
KINDS = ("mlflow", "wandb")
METRICS = ("loss", "perf/step_seconds", "validation/pass@1")
Values = dict[str, list[tuple[int, float]]]  # (step on the tracker's axis, value) of each metric


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take a second of CPU time."""
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    code = f"from mlflow import MlflowClient as C; C(*['sqlite:///{file}'] * 2).search_experiments()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    folder = new_run(tmp_path)
    folder.trackers.path.mkdir()
    if "wandb" not in request.node.name:
        shutil.copyfile(request.getfixturevalue("tables"), folder.trackers.database("mlflow"))
    return folder


def configured(folder: RunFolder, kind: str, **changes: Any) -> RunConfig:
    observe = {"tensorboard": False, "trackers": [{"kind": kind}]}
    config = load_config(write_config(folder.path.parent, observe=observe, **changes))
    save_config(folder, config)
    return config


def delivery(folder: RunFolder, kind: str, **changes: Any) -> Delivery:
    (found,) = deliveries(folder, configured(folder, kind, **changes), [kind])
    return found


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient


def mlflow_run(folder: RunFolder) -> tuple[Any, Any]:
    """Client and the only run."""
    uri = f"sqlite:///{folder.trackers.database('mlflow')}"
    found = client()(tracking_uri=uri, registry_uri=uri)
    (run,) = found.search_runs([found.get_experiment_by_name("rlhpc").experiment_id])
    return found, run


def shown(folder: RunFolder, kind: str) -> Values:
    """What the tracker has, by our names."""
    if kind == "mlflow":
        found, run = mlflow_run(folder)
        names = {name.replace("pass_at_1", "pass@1"): name for name in run.data.metrics}
        histories = {ours: found.get_metric_history(run.info.run_id, name) for ours, name in names.items()}
        return {name: sorted((one.step, one.value) for one in history) for name, history in histories.items()}
    found: Values = {}
    for path in files_of(folder.trackers.files("wandb")):
        file = next(path.glob("*.wandb"), None)
        if file is None:  # not yet
            continue
        for row in rows_of(file):
            for name, value in row.items():
                found.setdefault(name, []).append((row["_step"], value))
    return found


def expected(records: list[dict], kind: str, sft: int = 3) -> Values:
    found: Values = {}
    for one in records:
        place = one["step"] + (sft if one["phase"] == "rl" else 0)
        place += 1 if kind == "wandb" and one["phase"] == "rl" else 0
        for name in (*METRICS, "step"):
            found.setdefault(f"{one['phase']}/{name}", []).append((place, one[name]))
    return found


def check(folder: RunFolder, kind: str, records: list[dict], sft: int = 3) -> None:
    wanted = expected(records, kind, sft)
    if kind == "wandb":  # its service may write on for a moment
        with contextlib.suppress(AssertionError):
            until(lambda: without_own(shown(folder, kind)) == wanted, seconds=20)
    assert without_own(shown(folder, kind)) == wanted


def without_own(found: Values) -> Values:
    """Metrics without those that the tracker adds."""
    return {name: values for name, values in found.items() if not name.startswith("_")}


def deliver(tracker: Delivery, folder: RunFolder, records: list[dict], at_once: int) -> None:
    for first in range(0, len(records), at_once):
        append(folder, records[first : first + at_once])
        tracker.deliver()
    tracker.finish()
    assert tracker.trouble is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_steps_are_read_back_equal(folder: RunFolder, kind: str):
    written = steps(3, 1000)
    deliver(delivery(folder, kind), folder, written, 200)
    check(folder, kind, written)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_its_tracker_run_and_a_step_taken_again_is_there_once(folder: RunFolder, kind: str):
    written = steps(3, 6)
    deliver(delivery(folder, kind), folder, written, 4)
    replace(folder, steps(3, 4))
    again = [record("rl", step, 2000.0) for step in (5, 6, 7)]
    deliver(delivery(folder, kind), folder, again, 2)
    check(folder, kind, [*written, again[-1]])  # what a tracker has stays as it is


@pytest.mark.parametrize("kind", KINDS)
def test_steps_taken_again_while_it_looks_are_there_once(folder: RunFolder, kind: str):
    tracker = delivery(folder, kind)
    append(folder, steps(0, 6))
    tracker.deliver()
    replace(folder, [*steps(0, 4), *(record("rl", step, 2000.0) for step in range(5, 9))])
    tracker.finish()
    check(folder, kind, [*steps(0, 6), record("rl", 7, 2000.0), record("rl", 8, 2000.0)], sft=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_nothing_is_missing(folder: RunFolder, kind: str, capfd: pytest.CaptureFixture[str]):
    if kind == "mlflow":  # its first start is part of the test
        folder.trackers.database("mlflow").unlink()
    config = configured(folder, kind)
    process = TrackerProcess(folder, config)
    written = steps(3, 30)
    assert process.process is not None
    for count, one in enumerate(written):
        append(folder, [one])
        if count == 4:
            until(lambda: has_steps(folder, kind))
    os.killpg(process.process.pid, signal.SIGKILL)
    until(lambda: process.process.poll() is not None)
    process.end()
    more = [record("rl", step) for step in range(31, 41)]
    append(folder, more)
    (again,) = deliveries(folder, config, [kind])
    again.finish()
    check(folder, kind, [*written, *more])


def has_steps(folder: RunFolder, kind: str) -> bool:
    if kind == "mlflow":
        return folder.trackers.database("mlflow").exists() and "sft/loss" in _latest(folder)
    return any("sft/loss" in name for name in shown(folder, kind))


def _latest(folder: RunFolder) -> list[str]:
    with sqlite3.connect(folder.trackers.database("mlflow")) as connection:
        try:
            return [row[0] for row in connection.execute("select key from latest_metrics")]
        except sqlite3.OperationalError:
            return []


@pytest.mark.parametrize("kind", KINDS)
def test_odd_values_are_kept_as_well_as_the_tracker_can(folder: RunFolder, kind: str):
    odd = record("rl", 1, inf=float("inf"), nan=float("nan"), text="x", **{"odd @ name!": 2})
    deliver(delivery(folder, kind), folder, [odd], 1)
    until(lambda: "rl/nan" in shown(folder, kind))
    found = shown(folder, kind)
    assert math.isnan(found["rl/nan"][0][1])
    assert found["rl/inf"][0][1] == (sys.float_info.max if kind == "mlflow" else math.inf)
    assert found["rl/odd _at_ name_" if kind == "mlflow" else "rl/odd @ name!"] == [(1 if kind == "mlflow" else 2, 2)]
    assert "rl/text" not in found


def test_mlflow_has_the_status_of_the_run(folder: RunFolder):
    append(folder, steps(3, 2))
    endings = {"FINISHED": ("finished", "none"), "FAILED": ("crash", "stop"), "RUNNING": ("requeued", "requeue")}
    for status, (cause, action) in endings.items():
        tracker = delivery(folder, "mlflow")
        tracker.deliver()
        assert mlflow_run(folder)[1].info.status == "RUNNING"
        attempt = begin(folder, job_id="", restart_count=0, nodes=("n",), world_size=1, saved_step=-1)
        end(attempt, Verdict(1.0, cause, "", action))  # type: ignore[arg-type]
        tracker.finish()
        assert mlflow_run(folder)[1].info.status == status


@pytest.mark.long
def test_a_locked_database_loses_no_step_and_delays_nothing(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    """Locked by another process of the user's for longer than MLflow waits, through the end of the run."""
    database = folder.trackers.database("mlflow")
    tracker = {"kind": "mlflow", "uri": f"sqlite:///{database}?timeout=0.3"}
    config = load_config(write_config(folder.path.parent, observe={"trackers": [tracker]}))
    save_config(folder, config)
    process = TrackerProcess(folder, config)
    append(folder, steps(3, 5))
    until(lambda: database.exists() and "rl/step" in _latest(folder))
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("begin exclusive")
    slowest = 0.0
    for step in range(6, 30):
        began = time.perf_counter()
        append(folder, [record("rl", step)])
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(0.02)
    until(lambda: "failed and is tried again" in capfd.readouterr().err)
    began = time.monotonic()
    process.end(2.0)
    assert time.monotonic() - began < 10
    assert slowest < 1
    until(lambda: is_free(folder))  # the killed process has ended
    with pytest.raises(UserError, match=r"tracker mlflow: .*database is locked.*; call `rlhpc sync` again"):
        sync_tracker(folder, config, "mlflow")
    other.execute("rollback")
    other.close()
    board = [step for step, _, _ in event_files.shown(folder, "rl/loss")]
    assert board == [3 + step for step in range(30)]  # TensorBoard's steps were not kept back
    synced(folder, "--tracker", "mlflow")
    check(folder, "mlflow", steps(3, 29))
    assert "mlflow: 0 steps sent" in synced(folder, "--tracker", "mlflow")


def is_free(folder: RunFolder) -> bool:
    with held(folder) as free:
        return free


def synced(folder: RunFolder, *options: str) -> str:
    """Output of `rlhpc sync`."""
    result = invoke("sync", str(folder.path), *options)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_sync_sends_what_trackers_lack_and_shows_the_command_for_wandb(folder: RunFolder):
    config = configured(folder, "wandb")
    append(folder, steps(3, 5))
    output = synced(folder)
    (run,) = files_of(folder.trackers.files("wandb"))
    assert output == f"wandb: 9 steps sent\nupload with: wandb sync {run}\n"
    check(folder, "wandb", steps(3, 5))
    next(run.glob("*.wandb")).with_suffix(".wandb.synced").touch()
    assert wandb_command(folder, config, "wandb", upload=False) is None


def test_sync_names_what_is_wrong(folder: RunFolder):
    configured(folder, "wandb")
    append(folder, steps(3, 5))
    with pytest.raises(UserError, match=r"--tracker: no tracker 'wandp'; did you mean 'wandb'\?"):
        synced(folder, "--tracker", "wandp")
    with held(folder), pytest.raises(UserError, match="tracker wandb: the run feeds its trackers itself; wait for"):
        synced(folder)
    save_config(folder, load_config(folder.config, ["observe.trackers=[]"]))
    with pytest.raises(UserError, match=r"the run has no trackers; set observe.trackers"):
        synced(folder)


def test_an_upload_that_fails_is_one_clear_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    configured(folder, "wandb")
    append(folder, steps(3, 5))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(folder.path))
    with pytest.raises(UserError, match=r"`wandb sync` failed, see above; set WANDB_API_KEY or"):
        synced(folder, "--upload")
