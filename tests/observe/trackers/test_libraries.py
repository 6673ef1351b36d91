"""MLflow and Weights & Biases, the real libraries without network: steps are read back equal, each once."""

from __future__ import annotations

import math
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core.attempts import Verdict, begin, end
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.side_processes import TrackerProcess
from rlhpc.observe.trackers.__main__ import main
from rlhpc.observe.trackers.delivery import Delivery
from rlhpc.observe.trackers.libraries import deliveries
from rlhpc.observe.trackers.steps import TrackedRun
from tests.helpers.runs import write_config
from tests.helpers.waiting import until
from tests.observe.trackers import test_tensorboard as event_files
from tests.observe.trackers.steps import append, new_run, record, replace, steps
from tests.observe.trackers.wandb_files import rows

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


def delivery(folder: RunFolder, kind: str, **changes: Any) -> Delivery:
    observe = {"tensorboard": False, "trackers": [{"kind": kind}]}
    (found,) = deliveries(folder, load_config(write_config(folder.path.parent, observe=observe, **changes)))
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
    for row in rows(folder):
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
    assert without_own(shown(folder, kind)) == expected(records, kind, sft)


def without_own(found: Values) -> Values:
    """Metrics without those that the tracker adds."""
    return {name: values for name, values in found.items() if not name.startswith("_")}


def deliver(tracker: Delivery, folder: RunFolder, records: list[dict], at_once: int) -> None:
    for first in range(0, len(records), at_once):
        append(folder, records[first : first + at_once])
        tracker.deliver()
    tracker.deliver(last=True)
    assert not tracker.failure


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
    tracker.deliver(last=True)
    check(folder, kind, [*steps(0, 6), record("rl", 7, 2000.0), record("rl", 8, 2000.0)], sft=0)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_values_are_kept_as_well_as_the_tracker_can(folder: RunFolder, kind: str):
    odd = record("rl", 1, inf=float("inf"), nan=float("nan"), text="x", **{"odd @ name!": 2})
    deliver(delivery(folder, kind), folder, [odd], 1)
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
        tracker.deliver(last=True)
        assert mlflow_run(folder)[1].info.status == status


def test_a_run_that_is_opened_again_goes_on_from_rows_that_survive_a_kill(folder: RunFolder):
    """W&B loses what was logged just before a kill. Rows of the last seconds are logged again."""
    tracker = delivery(folder, "wandb")
    append(folder, steps(3, 2))
    tracker.deliver()
    assert TrackedRun.of(folder, "", "wandb").newest() is None
    tracker.deliver(last=True)
    assert TrackedRun.of(folder, "", "wandb").newest() == (1, 2)


@pytest.mark.long
def test_a_locked_database_loses_no_step_and_delays_nothing(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    """Locked by another process of the user's for longer than MLflow waits, through the end of the run."""
    database = folder.trackers.database("mlflow")
    tracker = {"kind": "mlflow", "uri": f"sqlite:///{database}?timeout=0.3"}
    save_config(folder, load_config(write_config(folder.path.parent, observe={"trackers": [tracker]})))
    process = TrackerProcess(folder, load_config(folder.config))
    append(folder, steps(3, 5))
    until(lambda: _has_steps(database))
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("begin exclusive")
    append(folder, [record("rl", step) for step in range(6, 30)])
    until(lambda: "tracker mlflow failed" in capfd.readouterr().err)
    began = time.monotonic()
    process.end(2.0)
    assert time.monotonic() - began < 10
    assert main([str(folder.path), "mlflow"]) == 2
    assert re.search(r"rlhpc: tracker mlflow failed: .*database is locked.*; remove the cause", capfd.readouterr().err)
    other.execute("rollback")
    other.close()
    event_files.check(folder, steps(3, 29))  # TensorBoard's steps were not kept back
    assert main([str(folder.path), "mlflow"]) == 0
    check(folder, "mlflow", steps(3, 29))


def _has_steps(database: Path) -> bool:
    with sqlite3.connect(database) as connection:
        return ("rl/step",) in connection.execute("select key from latest_metrics").fetchall()
