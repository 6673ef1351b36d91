"""Models beside engines: the trainers' numbers of each sample, from one engine's ranks alone, group by group."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.config.data import DataFile
from rlhpc.core.rank import RankInfo
from rlhpc.data.groups import Group
from rlhpc.data.prompts import PromptFiles, PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import read_model
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import FinishedGroup, GroupCounts
from rlhpc.trainer.advantages import token_values
from rlhpc.trainer.engine_models import EngineModels
from rlhpc.trainer.engine_rank import models_of_engine
from rlhpc.trainer.parts import Data
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import GROUP_SIZE, GROUPS, make_config, make_run, make_samples
from tests.helpers.tiny_models import make_model
from tests.rollout.tool_task import make_tokenizer
from tests.trainer.test_evaluate import save_classifier

pytestmark = pytest.mark.ranks

TEMPERATURE = 0.7
Found = dict[int, tuple[list[np.ndarray], list[float], float]]  # of a group: log-probs, rewards, the greedy one's


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3moe", marks=pytest.mark.long)])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("policy"), request.param)
    make_tokenizer().save_pretrained(folder)
    row = {"data_source": "sums", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("other"), "qwen2")
    make_tokenizer().save_pretrained(folder)
    made = tmp_path_factory.mktemp("reward")
    save_classifier(folder, made)
    return made


@pytest.fixture(scope="module")
def expected(policy: Path, reward: Path) -> Found:
    return run_ranks(_by_trainers, 1, policy, reward)[0]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_engine_scores_as_trainers_do_without_other_engines(
    tp: int, policy: Path, reward: Path, expected: Found
) -> None:
    """The first of two engines scores all groups at once, the second one a single one, to the same bits."""
    found = run_ranks(_by_engines, 2 * tp, policy, reward, tp)
    for rank, of_rank in enumerate(found):
        assert sorted(of_rank) == (list(range(GROUPS)) if rank < tp else [2])
        for number, (log_probs, rewards, greedy) in of_rank.items():
            assert rewards == pytest.approx(expected[number][1], abs=1e-5)
            assert greedy == pytest.approx(expected[number][2], abs=1e-5)
            for ours, theirs in zip(log_probs, expected[number][0], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
    (log_probs, rewards, greedy), alone = found[0][2], found[tp][2]
    assert (rewards, greedy) == alone[1:]
    assert [values.tobytes() for values in log_probs] == [values.tobytes() for values in alone[0]]


def test_a_score_that_fails_drops_a_sample_or_counts_as_zero() -> None:
    """As on trainers: out of its group, with the failure counted; 0 as an answer to a held-out prompt."""
    samples = make_samples(0)[:4]
    model = _Fails({1, 4})
    models = EngineModels(None, model, None, 1.0, None)  # type: ignore[arg-type]
    group = Group(7, 0, 0, tuple(samples), (True,) * 4, (False, False, True, False))
    counts = GroupCounts(2, 1, {"raised": 1})
    greedy = make_samples(1)[0]
    (found,) = models.score([FinishedGroup(7, group, keeps=True, greedy=greedy, counts=counts)])
    assert found.group.dropped == (False, True, True, False), "the second fails, the third was out before"
    assert [sample.reward - old.reward for sample, old in zip(found.group.samples, samples, strict=True)] == [
        pytest.approx(more) for more in (10, 0, 0, 10)
    ]
    assert found.greedy is not None
    assert found.greedy.reward == pytest.approx(greedy.reward + 10)
    assert found.counts == GroupCounts(2, 1, {"raised": 1, "result": 1})
    refused = FinishedGroup(8, group, keeps=False)
    assert models.score([refused]) == [refused]
    answers = [Scored(0, 0, samples[0]), Scored(0, 1, samples[1]), Scored(1, 0, samples[2])]
    scored = models.score_held_out(answers)
    assert [one.sample.reward for one in scored] == [samples[0].reward + 10, 0.0, samples[2].reward + 10]
    assert model.calls == [4, 2, 1], "a group by itself"


class _Fails:
    """Adds 10 to rewards, and drops the samples in these places of a call."""

    def __init__(self, places: set[int]) -> None:
        self._places, self.calls = places, list[int]()
        self.role = self.model = self

    def offload(self) -> None: ...

    def score(self, samples: list[Any], prompts: Any, *, stays: bool) -> tuple[list[Any], Counter[str]]:
        assert stays
        self.calls.append(len(samples))
        found = [
            None if place in self._places else replace(sample, reward=sample.reward + 10)
            for place, sample in enumerate(samples)
        ]
        return found, Counter({"result": found.count(None)})


def _config(policy: Path, reward: Path, on: str, tp: int = 1) -> Any:
    case = {
        "placement": "separate",
        "rollout": {"temperature": TEMPERATURE, "tp": tp, "ranks": 2 * tp},
        "reference": {"on": on, "memory": {"offload": True}},
        "algorithm": {"kl": {"coefficient": 0.1}},
        "rewards": [{"model": str(reward), "weight": 0.5, "on": on, "own_tokenizer": False}],
    }
    return make_config(policy, case, {})


def _greedy(samples: list[Any]) -> Any:
    """A response that stands for the greedy one."""
    return replace(samples[0], tokens=samples[0].tokens[::-1].copy(), prompt_len=1, response_mask=None)


def _by_trainers(policy: Path, reward: Path) -> Found:
    config, samples = _config(policy, reward, "trainers"), make_samples(0)
    run = make_run(config)
    values = token_values(run.models, run.batching, samples, TEMPERATURE)["reference_log_probs"]
    model = RewardModel(run.models.reward, RewardReader.of(config, None), None)
    scored, _ = model.score(samples, None)
    greedy, _ = model.score([_greedy(samples[at : at + GROUP_SIZE]) for at in range(0, len(samples), GROUP_SIZE)], None)
    return {
        number: (
            values[number * GROUP_SIZE : (number + 1) * GROUP_SIZE],
            [sample.reward for sample in scored[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]],
            greedy[number].reward,
        )
        for number in range(GROUPS)
    }


def _by_engines(policy: Path, reward: Path, tp: int) -> Found:
    config, info, samples = _config(policy, reward, "engines", tp), RankInfo.from_environ(), make_samples(0)
    reader = RewardReader.of(config, None, alone=True)
    data = Data(_prompts(policy, config), None, None)
    models = models_of_engine(config, info, read_model(policy), data, None, reader)  # type: ignore[arg-type]
    assert models is not None
    groups = []
    for number in range(GROUPS):
        own = tuple(samples[number * GROUP_SIZE : (number + 1) * GROUP_SIZE])
        done = (True,) * GROUP_SIZE
        group = Group(number, 0, 0, own, done, (False,) * GROUP_SIZE)
        groups.append(FinishedGroup(number, group, keeps=True, greedy=_greedy(list(own))))
    found = models.score(groups if info.rank < tp else groups[2:3])
    return {
        one.number: (
            [_masked(sample) for sample in one.group.samples],
            [sample.reward for sample in one.group.samples],
            one.greedy.reward,
        )
        for one in found
        if one.greedy is not None
    }


def _masked(sample: Any) -> np.ndarray:
    assert sample.reference_log_probs is not None
    mask = np.ones(sample.response_len, bool) if sample.response_mask is None else sample.response_mask
    found: np.ndarray = sample.reference_log_probs
    assert not found[~mask].any()
    return found


def _prompts(policy: Path, config: Any) -> Any:
    file = policy / "train.jsonl"
    tokenizer = Tokenizer.load(policy, 64, config.data)
    return PromptSet.load(PromptFiles([DataFile(path=file)], "data.train", filtered=True), config.data, tokenizer)
