"""Steps full of groups with non-zero advantage, with tools between turns, and options by data source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Prompt, Sample
from rlhpc.config.rollout import DynamicSamplingSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.histograms import read_histograms
from rlhpc.data.groups import make_filter
from rlhpc.trainer.evaluate import Answered, Evaluator
from rlhpc.trainer.sampling_plan import Outcome, check_shortage
from rlhpc.trainer.step import sample_metrics
from tests.docs.pages import DOCS, table_names
from tests.helpers.runs import complete, records, write_config
from tests.rollout.tool_task import make_task, tool_sections


def has_sum(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the tool was called that adds."""
    return float("420" in solution_str)


def fragile(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    raise ValueError("always")


def nothing(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return 0.0


def sample(reward: float, **parts: float) -> Sample:
    return Sample(0, 0, np.zeros(2, np.int32), 1, np.zeros(1, np.float32), reward, 0, False, reward_parts=parts)


def test_metrics_of_length_count_what_the_policy_sampled():
    """In training and validation, masked or not."""
    mask = np.array([True, False, False, True])
    calls = replace(
        sample(1.0), tokens=np.zeros(5, np.int32), log_probs=mask * np.float32(-1), response_mask=mask, tool_tokens=2
    )
    found = sample_metrics([calls, sample(1.0), replace(calls, response_mask=mask & False, truncated=True)])
    lengths = {"response/length_mean": 5 / 3, "response/length_max": 2, "rollout/completion_tokens": 5, "tokens": 12}
    assert {name: found[name] for name in lengths} == lengths
    config = RunConfig.model_validate({"name": "any", "model": {"path": "any"}, "train": {"steps": 1}})
    answered = [Answered("", Prompt(0, (0,), "", "", {}), one) for one in (calls, sample(1.0))]
    assert Evaluator(config, *[None] * 6)._metrics(answered)["response_length"] == 1.5


def test_groups_of_one_score_have_no_advantage():
    keeps = make_filter(DynamicSamplingSection())
    assert keeps([sample(0.0), sample(1.0), sample(0.0)])
    assert not keeps([sample(1.0), sample(1.0)])
    assert not keeps([sample(1.0)])


def test_a_part_of_the_reward_may_choose():
    keeps = make_filter(DynamicSamplingSection(metric="correct"))
    assert not keeps([sample(0.3, correct=1.0), sample(0.9, correct=1.0)])
    assert keeps([sample(0.9, correct=0.0), sample(0.9, correct=1.0)])
    with pytest.raises(UserError, match=r"no part 'correct'.*one of form"):
        keeps([sample(0.9, form=1.0)])


def test_a_further_number_of_a_function_that_failed_counts_as_0():
    """As the function's own does with reward_workers.on_failure: zero."""
    keeps = make_filter(DynamicSamplingSection(metric="acc"))
    assert keeps([sample(0.0), sample(0.5, acc=1.0)])
    assert not keeps([sample(0.0), sample(0.5, acc=0.0)])
    with pytest.raises(UserError, match="no part 'acc'"):
        keeps([sample(0.5), sample(0.5, acc=1.0)])
    keeps = make_filter(DynamicSamplingSection(metric="code/acc"))
    assert keeps([sample(0.1, form=1.0, code=0.0), sample(1.0, **{"form": 0.0, "code": 1.0, "code/acc": 1.0})])
    for wrong in ({"form": 0.0}, {"code": 1.0}, {"code": 0.0, "code/passed": 0.0}):
        with pytest.raises(UserError, match="no part 'code/acc'"):
            keeps([sample(0.1, **wrong)])


def longest(samples: list[Sample], least: float) -> bool:
    return max(s.reward for s in samples) > least


def test_a_filter_of_one_s_own():
    section = {"filter": "tests.trainer.test_sampling:longest", "arguments": {"least": 0.5}}
    keeps = make_filter(DynamicSamplingSection(**section))
    assert keeps([sample(0.6), sample(0.6)])
    assert not keeps([sample(0.4)])


def fails(samples: list[Sample]) -> bool:
    raise LookupError("no such\npart")


def test_a_filter_that_raises_is_the_user_s_error():
    keeps = make_filter(DynamicSamplingSection(filter="tests.trainer.test_sampling:fails"))
    with pytest.raises(
        UserError, match=r"^train.dynamic_sampling.filter: tests.*:fails raised LookupError: no such part;"
    ):
        keeps([sample(0.4)])


def test_a_shortage_may_end_the_run():
    short = Outcome(taken=(1,), kept=(), unfinished=(), dropped=(), batches=10, short=7)
    check_shortage(DynamicSamplingSection(), short, 8)
    with pytest.raises(UserError, match="7 of a step's 8 groups are missing after 10 batches"):
        check_shortage(DynamicSamplingSection(shortage="error"), short, 8)


@pytest.mark.ranks
@pytest.mark.vllm
def test_full_steps_of_groups_with_advantages_and_tools(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    config = write_config(
        tmp_path,
        prepare=None,
        sft=None,
        model={"path": str(task / "model"), "dtype": "float32"},
        data={"train": [str(task / "train.jsonl")], "max_prompt_tokens": 32},
        rewards=[
            {"name": "called", "function": "tests.trainer.test_sampling:has_sum"},
            {"name": "broken", "function": "tests.trainer.test_sampling:fragile"},
        ],
        reward_workers={"on_failure": "zero"},
        resources__ranks_per_node=2,
        actor__parallel={"tp": 2},
        rollout={
            "tp": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": 60,
            "kv_cache_gib": 0.0625,
            "tools": tool_sections(),
            "max_turns": 3,
        },
        train={
            "steps": 3,
            "prompts_per_step": 8,
            "minibatches": 2,
            "dynamic_sampling": {"metric": "called"},
            "replay": {"capacity": 6, "fraction": 0.25},
        },
        algorithm__kl__coefficient=0.0,
    )
    complete(config)
    steps = records(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["advantage/zero_fraction"] == 0, "a group of one score in the batch"
        assert step["sampling/missing_groups"] == 0
        assert step["logprob_diff_mean"] < 1e-4, "tokens that were given are compared, or in other places"
        assert step["tools/calls"] > step["tools/failures"] > 0
        assert step["tools/turns_mean"] > 1
        assert step["tools/answer_tokens_mean"] > 0
        assert step["reward/failures/raised"] >= 2 * 8, "each response's"
        assert step["reward/broken"] == 0
    assert steps[0]["sampling/batches"] > 1
    assert steps[0]["sampling/dropped_groups"] > 0
    assert [step["replay/used_groups"] for step in steps] == [0, 2, 2]
    speeds = [step["perf/tokens_per_second_per_gpu_rollout"] * step["perf/rollout_seconds"] * 2 for step in steps]
    sampled = [step["rollout/completion_tokens"] for step in steps]
    assert speeds[0] == pytest.approx(sampled[0])
    assert speeds[1] < sampled[1], "responses of former steps were not sampled in this one"
    first, second, _ = (step.histograms for step in read_histograms(tmp_path / "run" / "histograms.jsonl"))
    assert first["logprob_diff"].values == first["advantage"].values, "every token that is trained on"
    assert second["logprob_diff"].values < second["advantage"].values, "fresh ones"
    named = [name for table in table_names(DOCS / "metrics.md") for name in table]
    ours = ("sampling/", "replay/", "tools/")
    assert {name for step in steps for name in step if name.startswith(ours)} == {
        n for n in named if n.startswith(ours)
    }


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_step_without_anything_to_learn_counts(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        sft=None,
        data__validation=[],
        rewards__0__function="tests.trainer.test_sampling:nothing",
        train__steps=2,
        train__dynamic_sampling={"max_batches": 2},
    )
    complete(config)
    for number, step in enumerate(records(tmp_path / "run"), 1):
        assert step["step"] == number
        assert (step["sampling/batches"], step["sampling/dropped_groups"]) == (2, 32)
        assert step["sampling/missing_groups"] == 16
        assert "loss" not in step
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*/state.json")).read_text())["state"]
    assert (state["step"], state["prompt_cursor"]) == (2, 64)


def test_a_source_that_no_prompt_has_is_refused_with_the_nearest() -> None:
    from rlhpc.trainer.parts import check_sources

    sets = [SimpleNamespace(prompts=SimpleNamespace(rows=[SimpleNamespace(data_source="maths")]))]
    for source in ("maths", "math"):
        rollout = {"sampling_by_source": {source: {"top_k": 5}}}
        config = RunConfig(**{"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, "rollout": rollout})
        if source == "maths":
            check_sources(config, sets)  # type: ignore[arg-type]
            continue
        with pytest.raises(UserError, match=r"sampling_by_source.math: no prompt has .*; did you mean 'maths'"):
            check_sources(config, sets)  # type: ignore[arg-type]
