"""Samples that are left out because a reward failed, and prompts that lack a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.api import RunState, Sample
from rlhpc.config.schema import RunConfig
from rlhpc.core.histograms import read_histograms
from rlhpc.data.arithmetic import VOCABULARY
from rlhpc.data.arithmetic import make as make_inputs
from rlhpc.data.groups import Group, training_samples
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser, Counts, Sampled
from rlhpc.trainer.sampling_plan import Outcome
from tests.data.test_groups import make_group
from tests.helpers.runs import complete, records, write_config

pytestmark = pytest.mark.heavy  # the trainer's modules take seconds to be imported


def chosen_of(
    lost: Sequence[int],
    greedy: Sequence[bool] = (),
    least: int = 2,
    replayed: int = 1,
    step: int = 0,
    train: dict[str, Any] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Places of the groups of what a step learns of three groups of two samples, the first ``replayed`` of which are
    of former steps, and the groups left to the next step and in the buffer. ``lost`` are samples that a reward model
    did not score, ``greedy`` says which prompts have a baseline."""
    groups = [finished(number) for number in range(3)]
    samples: list[Sample | None] = [*training_samples(groups, mask_truncated=False)]
    for place in lost:
        samples[place] = None
    baselines = [groups[place].samples[0] if known else None for place, known in enumerate(greedy)]
    outcome = Outcome((0, 1, 2), (), (), (), batches=1, short=0)
    train = {"steps": 1, "replay": {"capacity": 8}, **(train or {})}
    config = RunConfig.model_validate({"name": "x", "model": {"path": "m"}, "train": train})
    unused: Any = None
    carryover = Carryover.of(config.train)
    chooser = Chooser(config, unused, carryover, None, least, needs_greedy=bool(greedy))
    sampled = Sampled(groups, replayed, samples, baselines, outcome, Counts())
    found = chooser.choose(RunState(step=step), sampled)
    learnt = [sample.group_id for sample in found.samples]
    assert found.metrics["replay/used_groups"] == replayed
    assert carryover.replay is not None
    return learnt, *([group.number for group in kept] for kept in (carryover.ready, carryover.replay.groups))


def finished(number: int) -> Group:
    group = make_group(number)
    samples = tuple(replace(group.samples[0], prompt_id=number) for _ in range(2))
    return replace(group, samples=samples, scored=(True, True), dropped=(False, False))


def test_what_a_reward_model_did_not_score_is_left_out():
    assert chosen_of(lost=[]) == ([0, 0, 1, 1, 2, 2], [], [1, 2])
    assert chosen_of(lost=[0, 4, 5]) == ([0, 1, 1], [], [1])


def test_replayed_groups_are_among_the_new_ones_if_there_are_several_minibatches():
    several = {"minibatches": 3}
    firsts = [chosen_of(lost=[], step=step, train=several)[0] for step in range(30)]
    assert {tuple(learnt[::2]) for learnt in firsts} == {
        (a, b, 3 - a - b) for a in range(3) for b in range(3) if a != b
    }
    assert all(learnt[::2] == learnt[1::2] for learnt in firsts)
    assert firsts == [chosen_of(lost=[], step=step, train=several)[0] for step in range(30)]
    for order in ({"minibatches": 1}, {**several, "shuffle": False}):
        assert chosen_of(lost=[], step=1, train=order)[0] == [0, 0, 1, 1, 2, 2]
    assert chosen_of(lost=[], replayed=0, step=1, train=several)[0] == [0, 0, 1, 1, 2, 2]


def test_a_prompt_without_a_baseline_is_left_out():
    assert chosen_of(lost=[], greedy=[True, False, True]) == ([0, 0, 2, 2], [], [2])


def test_too_little_is_left_to_the_next_step_but_for_what_would_be_too_little_again():
    assert chosen_of(lost=[1, 2], least=5) == ([], [2], [])
    assert chosen_of(lost=[], greedy=[True, False, True], least=5) == ([], [2], [])


def picky(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1, where it gives anything."""
    if sum(map(ord, solution_str)) % 2:
        raise ValueError("odd")
    return 1.0


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.long
def test_remax_does_not_take_a_reward_that_failed_for_a_baseline(tmp_path: Path) -> None:
    """All rewards that there are being equal, nobody is better than the baseline."""
    config = write_config(
        tmp_path,
        sft=None,
        algorithm={"name": "remax", "kl": {"coefficient": 0.0}},
        data__validation=[],
        train__steps=1,
        rewards=[{"function": "tests.trainer.test_left_out:picky"}],
        reward_workers={"on_failure": "drop"},
    )
    complete(config)
    (step,) = records(tmp_path / "run")
    assert step["reward/mean"] == 1
    assert step["advantage/zero_fraction"] == 1
    assert step["reward/failures/raised"] > 16


def make(folder: str) -> None:
    """The demo's inputs, and a reward model that makes no number of responses with a 7; called by a run's prepare."""
    import transformers

    make_inputs(folder)
    config = transformers.AutoConfig.from_pretrained(Path(folder) / "model", num_labels=1)
    model = transformers.Qwen2ForSequenceClassification(config).float()
    model.score.weight.data.normal_()
    model.model.embed_tokens.weight.data[VOCABULARY.index("7")] = torch.nan
    model.save_pretrained(Path(folder) / "reward")
    transformers.AutoTokenizer.from_pretrained(Path(folder) / "model").save_pretrained(Path(folder) / "reward")


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.long
def test_a_step_learns_from_what_the_reward_model_scores(tmp_path: Path) -> None:
    """On two ranks, which are data-parallel there, with fewer greedy responses than samples."""
    inputs = str(tmp_path / "inputs")
    config = write_config(
        tmp_path,
        prepare={"function": "tests.trainer.test_left_out:make", "arguments": {"folder": inputs}},
        resources__ranks_per_node=2,
        sft=None,
        algorithm={"name": "remax", "kl": {"coefficient": 0.0}},
        data__validation=[],
        train__steps=2,
        rewards=[{"model": f"{inputs}/reward", "own_tokenizer": False}],
        reward_workers={"on_failure": "drop"},
    )
    output = complete(config)
    assert output.count("returned nan for prompt") <= 1, "reported once"
    for step in records(tmp_path / "run"):
        assert math.isfinite(step["reward/model"])
        assert step["grad_norm"] > 0
        assert 0 < step["reward/failures/result"] < 5 * 16
        read, sampled = (
            step[f"perf/tokens_per_second_per_gpu_{name}"] * step[f"perf/{name}_seconds"] * 2
            for name in ("reward_model", "rollout")
        )
        assert read > step["perf/tokens_per_second"] * step["perf/step_seconds"], "greedy responses are scored too"
        assert sampled > step["rollout/completion_tokens"]
        assert step["perf/tflops_per_gpu_reward_model"] > 0
    for found in read_histograms(tmp_path / "run" / "histograms.jsonl"):
        counts = {name: histogram.values for name, histogram in found.histograms.items()}
        assert counts["logprob_diff"] == counts["advantage"] > counts["reward"] > 0, "of both ranks' tokens"
