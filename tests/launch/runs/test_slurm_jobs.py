"""The jobs of a run whose engines are in jobs of their own, by what they ask of Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.launch.runs.submit import after, rollout_spec, trainers_spec
from rlhpc.launch.slurm.executor import script
from tests.helpers.golden import check_text
from tests.launch.slurm.test_job_spec import FOLDER, PYTHON, WORKDIR, config_of

RUN = """name: small
model: {path: x}
train: {steps: 1}
placement: separate
resources: {ranks_per_node: 8}
rollout: {nodes: 4}
asynchrony: {schedule: arrival}
recovery: {lost_engines: rejoin}
slurm:
  nodes: 6
  time: 2:00:00
  partition: h100
  account: team
  sbatch_options: {dependency: "afterok:7", licenses: "a:1"}
  rollout_jobs: {count: 4, partition: free, gpu_type: a100, time: 30}
"""


def options(folder: Path, make: Any, *overrides: str) -> dict[str, Any]:
    return dict(make(config_of(RUN, folder, *overrides), WORKDIR, PYTHON, "conda", FOLDER).options)


def test_the_script_of_rollout_jobs_is_as_it_was(tmp_path, accept_golden):
    spec = after("77", rollout_spec(config_of(RUN, tmp_path), WORKDIR, PYTHON, "conda", FOLDER))
    check_text("rollout-jobs.sbatch", script(spec, FOLDER, 4), accept_golden)


def test_the_trainers_job_has_the_nodes_that_rollout_jobs_have_not(tmp_path):
    found = options(tmp_path, trainers_spec)
    assert (found["nodes"], found["partition"], found["time"], found["gpus-per-node"]) == (2, "h100", "2:00:00", 8)
    assert "no-kill" not in found  # it has no engines that it could lose
    whole = options(tmp_path, trainers_spec, "slurm.rollout_jobs=null")
    assert (whole["nodes"], whole["no-kill"], whole["requeue"]) == (6, True, True)
    assert "no-kill" not in options(tmp_path, trainers_spec, "slurm.rollout_jobs=null", "recovery.lost_engines=restart")
    some = options(tmp_path, trainers_spec, "slurm.rollout_jobs.count=3", "slurm.rollout_jobs.nodes=1")
    assert (some["nodes"], some["no-kill"]) == (3, True)


def test_a_rollout_job_has_its_own_keys_and_else_the_run_s(tmp_path):
    found = options(tmp_path, rollout_spec)
    known = {name: found[name] for name in ("nodes", "partition", "account", "time", "gpus-per-node", "licenses")}
    assert known == {
        **{"nodes": 1, "partition": "free", "account": "team", "time": 30},
        **{"gpus-per-node": "a100:8", "licenses": "a:1"},
    }
    assert "dependency" not in found
    assert found["job-name"] == "small-rollout"
