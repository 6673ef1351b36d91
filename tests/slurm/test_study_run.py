"""``rlhpc study run`` and ``compare`` on a real Slurm: jobs of trials start the next ones, and count once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config import yaml12
from rlhpc.core import attempts
from rlhpc.core.records import read_records
from rlhpc.launch.runs.run_registry import read_run
from rlhpc.launch.studies.study_folder import StudyFolder
from tests.helpers.runs import ROOT, write_config
from tests.helpers.waiting import until
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]

RATE = "actor.optimizer.learning_rate"


class Search:
    """A study on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, *, pruner: Any = None, steps: int = 2, **budget: Any) -> None:
        self.cluster, self.folder = cluster, folder
        slurm = {"nodes": 1, "gpus_per_node": 0, "time": 10}
        base = write_config(
            folder / "base", name="base", sft=None, train__steps=steps, validation__every=1, slurm=slurm
        )
        study = {
            **{"name": "rates", "base": str(base), "folder": str(folder / "study"), "budget": budget},
            **{"space": {RATE: {"low": 1e-4, "high": 1e-2, "log": True}, "train.minibatches": {"choices": [1, 3]}}},
        }
        if pruner is not None:
            study["pruner"] = pruner
        self.file = folder / "study.yaml"
        self.file.write_text(yaml12.dump(study))
        self.study = StudyFolder(folder / "study")

    def rlhpc(self, *words: str) -> str:
        command = [sys.executable, "-m", "rlhpc.cli.main", "study", *words]
        environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "200"}
        done = self.cluster.run(command, env=environ)
        return done.stdout + done.stderr

    @property
    def trials(self) -> list[dict[str, Any]]:
        return json.loads(self.rlhpc("status", str(self.study.path), "--json"))["trials"]

    @property
    def started(self) -> list[int]:
        """Numbers of the trials that have a job."""
        return [row["number"] for row in self.trials if read_run(self.study.trial(row["number"]).path).job is not None]

    def job(self, number: int) -> str:
        """The newest job of a trial."""
        found = read_run(self.study.trial(number).path).job
        assert found is not None
        return found.job_id

    @property
    def queue(self) -> list[str]:
        return self.cluster.run("squeue -h -r -o %T").stdout.split()


@pytest.mark.long  # of trials without jobs of their own: tests/launch/studies/test_advance.py
def test_trials_start_each_other_and_count_once_in_spite_of_faults(cluster: Cluster, tmp_path: Path) -> None:
    """One is requeued, one is killed with its job, and the controller goes and comes back. Three minibatches do not
    divide the prompts: such settings are refused before they cost a job."""
    search = Search(cluster, tmp_path, trials=3, at_once=2)
    said = search.rlhpc("run", str(search.file))
    assert "2 running" in said, said
    until(lambda: "RUNNING" in search.queue, "a trial", seconds=60)
    first = min(row["number"] for row in search.trials if row["state"] == "running")
    requeued = search.job(first)
    cluster.run(f"scontrol requeue {requeued}", check=True)
    cluster.stop_controller()
    cluster.start_controller()
    until(lambda: len(search.started) == 3, "the third trial", seconds=300)
    last = search.started[-1]
    until(lambda: attempts.folders(search.study.trial(last)), "its ranks", seconds=60)
    killed = search.job(last)
    cluster.run(f"scancel --signal=KILL --full {killed}", check=True)
    until(lambda: not search.queue, "the end of all jobs", seconds=500)
    said = search.rlhpc("advance", str(search.study.path))  # in case that nobody was left to do it
    until(lambda: not search.queue, "the end of the last job", seconds=300)
    rows = [row for row in search.trials if row["state"] != "infeasible"]
    assert [row["state"] for row in rows] == ["complete"] * 3, said
    assert all(row["values"]["train.minibatches"] == 1 for row in rows)
    assert "Restarts=1" in cluster.run(f"scontrol show job {requeued}").stdout
    assert search.job(last) != killed
    for row in rows:
        steps = [record["step"] for record in read_records(search.study.trial(row["number"]).metrics) if record["step"]]
        assert steps == [1, 2]
    best = search.rlhpc("best", str(search.study.path))
    assert yaml12.parse(best, "best")["name"] == "rates-best"


@pytest.mark.long  # of trials without jobs of their own: tests/launch/studies/test_pruner.py
def test_a_trial_that_the_pruner_rejects_starts_the_next_one_and_cancels_its_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No reward is above 2; each would train for 500 steps."""
    pruner = {"name": "ThresholdPruner", "arguments": {"lower": 2.0}}
    search = Search(cluster, tmp_path, pruner=pruner, steps=500, trials=2, at_once=1)
    search.rlhpc("run", str(search.file))
    until(lambda: not search.queue, "the end of all jobs", seconds=500)
    rows = [row for row in search.trials if row["state"] != "infeasible"]
    assert [row["state"] for row in rows] == ["pruned"] * 2
    for row in rows:
        assert row["value"] < 2.0
        assert len(read_records(search.study.trial(row["number"]).metrics)) < 500
        assert "CANCELLED" in cluster.run(f"scontrol show job {search.job(row['number'])}").stdout


@pytest.mark.long  # the test of the submission itself: tests/slurm/test_submit.py
def test_missing_runs_are_submitted_once_and_then_compared(cluster: Cluster, tmp_path: Path) -> None:
    files = []
    for name, rate in (("low", 0.001), ("high", 0.01)):
        more = {"sft": None, "train__steps": 1, "validation__every": 1, "actor__optimizer__learning_rate": rate}
        slurm = {"nodes": 1, "gpus_per_node": 0, "time": 10}
        files.append(str(write_config(tmp_path / name, name=name, slurm=slurm, **more)))

    def study(*words: str) -> str:
        command = [sys.executable, "-m", "rlhpc.cli.main", "study", "compare", *files, *words]
        environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200"}
        done = cluster.run(command, env=environ)
        return done.stdout + done.stderr

    submitted = study("--seeds=1")
    names = [line.split()[1] for line in submitted.splitlines() if line.startswith("submitted")]
    assert names == ["low-seed-0", "high-seed-0"], submitted
    until(lambda: not cluster.run("squeue -h").stdout.strip(), "both runs", seconds=400)
    compared = study("--seeds=1")  # nothing is missing now
    assert "pair      high - low: not decided (1 pair(s) of seeds; at least 3 are needed)" in compared
    assert "submitted" not in compared
