"""docs/metrics.md describes what a run writes: all of it, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core.histograms import NAMES, read_histograms
from rlhpc.observe.training_samples import read_file
from tests.docs.pages import DOCS, table_names
from tests.helpers.runs import records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def test_every_metric_of_a_run_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a warm-up, reference model, critic, several updates a step, every term of a loss, one's own reward."""
    monkeypatch.chdir(DOCS / "examples")
    config = write_config(
        tmp_path,
        sft__steps=1,
        train__steps=1,
        train__minibatches=2,
        algorithm={
            "name": "ppo",
            "kl": {"target": 0.1, "placement": "loss", "estimator": "k3"},
            "dual_clip": 3.0,
            "rollout_correction": {"method": "truncate"},
        },
        rewards=[{"function": "my_reward:score", "arguments": {"last_digit": 0.2}}],
    )
    code, output = run(config)
    assert code == 0, output
    metrics, of_ranks, samples, histograms, training = table_names(DOCS / "metrics.md")
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
    assert {name for record in records(tmp_path / "run") for name in record} == set(metrics) - elsewhere
    page = (DOCS / "run_folder.md").read_text()
    assert not [
        file.name for file in (tmp_path / "run").iterdir() if f"`{file.name}" not in page and file.name != "attempts"
    ]
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert {name for line in lines for name in json.loads(line)} == set(samples)
    (step,) = read_histograms(tmp_path / "run" / "histograms.jsonl")
    assert set(step.histograms) == set(histograms) == set(NAMES)
    assert all(sum(found.counts) == found.values > 0 for found in step.histograms.values())
    (sample, *_) = read_file(tmp_path / "run" / "training_samples" / "step-00000001.parquet")
    assert (sample["step"], sample["logprob_diff_mean"] < 0.01) == (1, True)
    columns = {name for name in (*sample, "reward/NAME") if name != "parts"}
    assert columns == {*training, *samples} - {"set", "parts"}
