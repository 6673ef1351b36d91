"""What one run writes: every metric of the page, no secret, and the same bits as a run that is profiled."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import NAMES, read_histograms
from rlhpc.observe.profiles import StepProfile
from rlhpc.observe.training_samples import read_file
from tests.docs.pages import DOCS, table_names
from tests.helpers import runs
from tests.helpers.commands import rlhpc
from tests.helpers.distributed import run_ranks
from tests.helpers.waiting import until
from tests.launch import leaking
from tests.launch.runs.test_secrets import IN_CONFIG, LEAKING, leaking_files, leaks

ENVIRONMENT = {**leaking.PLANTED, "HTTPS_PROXY": leaking.PROXY}


def observed_config(folder: Path, **changes: Any) -> Path:
    """A run with a warm-up, reference model, critic, several updates a step, every term of a loss, a user's own reward,
    and one that prints and raises the secrets that it has."""
    arguments = {name.rpartition(".")[2]: value for name, value in IN_CONFIG.items() if name.startswith("rewards")}
    return runs.write_config(
        folder,
        resources__ranks_per_node=2,
        sft__steps=1,
        train={"steps": 3, "prompts_per_step": 4, "minibatches": 2},
        validation__max_prompts=4,
        algorithm={
            "name": "ppo",
            "kl": {"target": 0.1, "placement": "loss", "estimator": "k3"},
            "dual_clip": 3.0,
            "rollout_correction": {"method": "truncate"},
        },
        rewards=[
            {"function": "docs.examples.my_reward:score", "name": "answer", "arguments": {"last_digit": 0.2}},
            {"function": f"{LEAKING}:score", "name": "judge", "arguments": arguments},
        ],
        reward_workers={"on_failure": "zero"},
        data__template_arguments={"hub_token": IN_CONFIG["prepare.arguments.hub_token"]},
        **changes,
    )


@dataclass(frozen=True)
class Observed:
    run: Path
    output: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observed")
    code, output = runs.finish(runs.start(observed_config(folder), environ=ENVIRONMENT))
    assert code == 0, output
    return Observed(folder / "run", output)


@pytest.mark.ranks
@pytest.mark.vllm
def test_every_metric_of_a_run_is_on_the_page(observed: Observed) -> None:
    *tables, of_ranks, samples, histograms, training = table_names(DOCS / "metrics.md")
    metrics = [name for table in tables for name in table]
    metrics += [f"{name}_{kind}" for name in of_ranks for kind in ("mean", "max", "max_rank")]
    # tests/backends/test_experts.py has the first of these, tests/trainer/test_sampling.py the others
    elsewhere = {name for name in metrics if name.startswith(("experts/", "sampling/", "replay/", "tools/"))}
    # tests/observe/test_engine_activity.py; tests/trainer/test_judges.py; tests/rollout/generator/test_losses.py
    lost = ("rollout/held_up_", "rollout/engines", "rollout/lost_", "validation/answered_")
    separate = ("trainers/", "engines/", "judges/", "rollout/queued_", *lost, "weight_sync/")
    elsewhere |= {name for name in metrics if name.startswith(separate)}
    elsewhere |= {name for name in metrics if name.startswith("memory/device_")}  # tests/observe/test_rank_numbers.py
    elsewhere |= {name for name in metrics if name.startswith("gpu/")}  # tests/observe/test_gpu_readings.py
    # tests/plan/estimates/test_step_flops.py and tests/trainer/test_throughput.py
    elsewhere |= {name for name in metrics if "mfu" in name or "hfu" in name or "reward_model" in name}
    elsewhere |= {name for name in metrics if name.startswith(("perf/tools_", "perf/deal_"))}
    # tests/rollout/test_speculation.py
    elsewhere |= {name for name in metrics if name.startswith(("engine/accepted_", "engine/guess"))}
    elsewhere |= {"engine/turn_cache_hit_rate_mean"}  # tests/rollout/test_token_seeds.py
    parts = {"reward/answer", "reward/judge", "reward/failures/raised"}  # in the page's prose
    names = {name for record in runs.records(observed.run) for name in record}
    assert names == {*metrics, *parts} - elsewhere
    page = (DOCS / "run_folder.md").read_text()
    assert not [file.name for file in observed.run.iterdir() if f"`{file.name}" not in page and file.name != "attempts"]
    lines = (observed.run / "samples.jsonl").read_text().splitlines()
    assert {name for line in lines for name in json.loads(line)} == set(samples)
    steps = read_histograms(observed.run / "histograms.jsonl")
    assert len(steps) == 3
    for step in steps:
        assert set(step.histograms) == set(histograms) == set(NAMES)
        assert all(sum(found.counts) == found.values > 0 for found in step.histograms.values())
    (sample, *_) = read_file(observed.run / "training_samples" / "step-00000001.parquet")
    assert (sample["step"], sample["logprob_diff_mean"] < 0.01) == (1, True)
    assert sample["parts"].keys() == {"answer", "judge"}
    columns = {"reward/NAME" if name == "parts" else name for name in sample}
    assert columns == {*training, *samples} - {"set", "parts"}


@pytest.mark.ranks
@pytest.mark.vllm
def test_no_file_of_a_real_run_has_a_secret(observed: Observed) -> None:
    """Training, vLLM, rewards that print and raise them, TensorBoard, samples, report and a checkpoint."""
    assert not leaks(observed.output)
    run = observed.run
    names = {path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()}
    assert names > {"tensorboard", "checkpoints", "report", "samples.jsonl", "metrics.jsonl", "secrets.json"}
    assert not leaking_files(run)
    log = next(run.rglob("rank-00000.log")).read_text()
    assert "counted as 0" in log
    assert "*** https://***@judge.example/v1 {" in log, "the output of reward workers"


def numbers(run: Path) -> list[dict[str, Any]]:
    """Numbers of all steps that depend on what was trained, not on speed or memory."""
    names = (
        "step",
        "loss",
        "critic/",
        "kl",
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
def test_a_running_job_is_profiled_in_the_steps_asked_for(observed: Observed, tmp_path: Path) -> None:
    process = runs.start(observed_config(tmp_path, profile={"steps": [3], "ranks": [1]}), environ=ENVIRONMENT)
    run = RunFolder(tmp_path / "run")
    until(run.config.exists)
    asked = rlhpc("profile", run.path)
    code, text = runs.finish(process)
    assert (code, asked.returncode) == (0, 0), text + asked.stdout + asked.stderr
    first, last = sorted(run.profiles.iterdir())
    assert (first.name < "step-00000003", last) == (True, run.profile(3))
    for folder in (first, last):
        assert sorted(file.name for file in folder.iterdir()) == ["rank-00001.trace.json.gz", "rank-00001.txt"]
    table = (last / "rank-00001.txt").read_text()
    phases = {f"rlhpc:{phase}" for phase in ("weight_sync", "rollout", "log_probs", "prepare", "update")}
    assert not [name for name in {*phases, "rlhpc:step 3", "gloo:all_reduce", "aten::mm"} if f" {name} " not in table]
    assert phases <= trace_names(last / "rank-00001.trace.json.gz")
    assert gathers(last / "rank-00001.trace.json.gz") == 6, "of two models' weights, updated twice, and a weight sync"
    assert numbers(run.path) == numbers(observed.run)
    assert {"loss", "critic/loss", "reward/mean", "response/length_mean"} <= numbers(run.path)[-1].keys()
    assert weights(run.path) == weights(observed.run) != {}


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
    profile = StepProfile(RunFolder(folder), rank, ("torch",), lambda: [work.wait() for work in works])
    profile.begin(1)
    if rank:
        time.sleep(1)
    works.append(dist.all_reduce(torch.ones(4), async_op=True))
    profile.end()
    profile.write()


def read_trace(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def trace_names(file: Path) -> set[str]:
    return {event["name"] for event in read_trace(file)}


def gathers(file: Path) -> int:
    """Number of all-gathers that ended."""
    return sum(event["name"] == "gloo:all_gather" and event.get("dur", 0) > 0 for event in read_trace(file))
