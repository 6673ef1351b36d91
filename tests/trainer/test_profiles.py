"""Profiles of a running job, asked for from outside."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import Selection
from rlhpc.observe.profiles.recorder import Recorder
from rlhpc.observe.profiles.table import read_trace
from tests.helpers import runs
from tests.helpers.distributed import run_ranks
from tests.helpers.profiles import Profiled
from tests.helpers.waiting import until

_SMALL: dict[str, Any] = {
    "resources__ranks_per_node": 2,
    "sft__steps": 1,
    "train__steps": 4,
    "train__prompts_per_step": 4,
    "data__validation": [],
}


def command(*arguments: str) -> tuple[int, str, str]:
    """`rlhpc profile`: exit code, output, errors."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli.main", "profile", *arguments],
        cwd=runs.ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def numbers(run: Path) -> list[dict[str, Any]]:
    """Numbers of all steps that depend on what was trained, not on speed or memory."""
    names = (
        "step",
        "loss",
        "grad_norm",
        "policy_loss",
        "entropy",
        "logprob_diff",
        "reward/",
        "response/",
        "advantage/",
    )
    return [{name: value for name, value in record.items() if name.startswith(names)} for record in runs.records(run)]


def weights(run: Path) -> dict[str, str]:
    """Digests of the tensors in the last checkpoint."""
    folder = max((run / "checkpoints").glob("step-*")) / "actor"
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*.distcp")
    }


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_running_job_is_profiled_in_the_steps_and_ranks_asked_for(tmp_path):
    section = {"steps": [2], "ranks": [0], "phases": ["update"], "tools": ["torch"]}
    process = runs.start(runs.write_config(tmp_path / "a", profile=section, **_SMALL))
    run = RunFolder(tmp_path / "a/run")
    until(run.attempt(1).record.exists)
    code, out, err = command(str(run.path), "+3", "--ranks", "1", "--wait")
    finished, text = runs.finish(process)
    assert (finished, code) == (0, 0), text + out + err
    files = {str(file.relative_to(run.profiles)) for file in run.profiles.glob("step-*/*")}
    assert files == {
        "step-00000002/rank-00000.update.trace.json.gz",
        "step-00000002/rank-00000.json",
        "step-00000003/rank-00001.trace.json.gz",
        "step-00000003/rank-00001.json",
    }
    trace = run.profile(3) / "rank-00001.trace.json.gz"
    names = trace_names(trace)
    assert gathers(run.profile(2) / "rank-00000.update.trace.json.gz") == 1, "of the updated weights"
    assert gathers(trace) == 3, "and two in the weight sync"
    phases = {"weight_sync", "rollout", "log_probs", "prepare", "update"}
    assert {f"rlhpc:{phase}" for phase in phases} | {"rlhpc:actor.layers.0"} <= names
    assert {"gloo:all_reduce"} <= names
    assert any(name.startswith("aten::") for name in names)
    assert "rlhpc:rollout" not in trace_names(run.profile(2) / "rank-00000.update.trace.json.gz")
    assert "step 3 will be profiled" in out
    assert "of it exposed" in out
    assert runs.run(runs.write_config(tmp_path / "b", **_SMALL))[0] == 0
    assert numbers(tmp_path / "a/run") == numbers(tmp_path / "b/run")
    assert {"loss", "reward/mean", "response/length_mean"} <= numbers(tmp_path / "a/run")[-1].keys()
    assert weights(tmp_path / "a/run") == weights(tmp_path / "b/run") != {}


@pytest.mark.ranks
def test_a_collective_in_flight_ends_within_the_profile(tmp_path):
    """PyTorch's profiler crashes if it ends before."""
    run_ranks(_profile_a_slow_sum, 2, tmp_path)
    (event,) = (
        event
        for event in read_trace(RunFolder(tmp_path).profile(1) / "rank-00000.trace.json.gz")
        if event["name"] == "gloo:all_reduce"
    )
    assert event["dur"] > 0.5e6


def _profile_a_slow_sum(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    rank, works = dist.get_rank(), []
    profiled = Profiled({}, lambda: [work.wait() for work in works])
    recorder = Recorder(RunFolder(folder).attempt(1), rank, 2**30, profiled)
    recorder.passed(1)
    recorder.begin(Selection(1, 1))
    if rank:
        time.sleep(1)
    works.append(dist.all_reduce(torch.ones(4), async_op=True))
    recorder.end()
    recorder.write(2**30)


def trace_names(file: Path) -> set[str]:
    return {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def gathers(file: Path) -> int:
    """Number of all-gathers that ended."""
    return sum(event["name"] == "gloo:all_gather" and event.get("dur", 0) > 0 for event in read_trace(file))
