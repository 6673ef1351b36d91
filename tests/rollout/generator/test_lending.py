"""Requests that engines lend to engines on trainers' ranks: continued as if they had stayed, and returned in order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Prompt, Sample
from rlhpc.rollout.collect import Collector
from rlhpc.rollout.generator.lending import LentRequests, continued
from rlhpc.rollout.generator.messages import Lent, Returned, Validated
from rlhpc.rollout.requests import Sampling, Task, blank_draft
from rlhpc.rollout.schedule.actions import Lend
from rlhpc.rollout.schedule.terms import Terms, terms_of
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.engines import GoodRewards
from tests.rollout.generator.words import SlowRewards, WordEngine
from tests.rollout.generator.worlds import End, make_config, prompt_set, run_world, versions_of
from tests.rollout.test_generate import log_probs_of
from tests.rollout.test_in_flight import keep_a_step_on_the_device, write
from tests.rollout.test_token_seeds import BUDGET, build, prompt

SECOND = 10**9
LEND: dict[str, Any] = {"placement": "lend", "asynchrony__costs__lend_seconds": 12.0}
SAMPLING = Sampling(40, 0.9, 1.0)


def terms(**changes: Any) -> Terms:
    """Steps of one second, and a tenth for each sequence."""
    return terms_of(make_config(**{**LEND, **changes}), 1, 2)


def tasks(count: int) -> list[Task]:
    prompts = prompt_set(count).take(0, count, 0)[0]
    return [Task(i, 0, prompt, blank_draft(prompt, 7), (5, 0, i, 0)) for i, prompt in enumerate(prompts)]


def word_engine(*, delayed: bool = False) -> WordEngine:
    engine = WordEngine(slots=8, delayed=delayed)
    engine.awake, engine.version = ["weights", "cache"], 1
    return engine


def make_collector(engine: WordEngine) -> Collector:
    return Collector(engine, SAMPLING, SlowRewards(0), 7)  # type: ignore[arg-type]


def harvested(collector: Collector) -> dict[tuple[int, int], Sample]:
    collector.advance()
    return {(found.group, found.index): found.sample for found in collector.harvest()}


def lend(collector: Collector, action: Lend) -> tuple[int, list[Lent]]:
    """What each of two lenders gets."""
    ends = [End(100), End(101)]
    for end in ends:
        end.other = end
    count = LentRequests(terms(), 0, ends).lend(collector, action, 1, 7)  # type: ignore[arg-type]
    return count, [end.take()[0][1] for end in ends]


def test_lenders_get_the_last_requests_in_their_order() -> None:
    collector = make_collector(word_engine())
    collector.begin(tasks(12))
    count, lent = lend(collector, Lend(3, 5 * SECOND))
    assert count == 3
    assert [[task.group for task in each.tasks] for each in lent] == [[6, 7, 8], [9, 10, 11]]
    assert [(each.version, each.policy_version, each.nanoseconds) for each in lent] == [(1, 7, 5 * SECOND)] * 2
    assert collector.requests == 6


def test_an_engine_with_fewer_requests_than_its_schedule_knows_of_lends_fewer() -> None:
    collector = make_collector(word_engine())
    collector.begin(tasks(7))
    count, lent = lend(collector, Lend(4, 5 * SECOND))
    assert count == 2
    assert [[task.group for task in each.tasks] for each in lent] == [[3, 4], [5, 6]]
    count, lent = lend(make_collector(word_engine()), Lend(4, 5 * SECOND))
    assert (count, [each.tasks for each in lent]) == (0, [[], []])


@pytest.mark.parametrize("delayed", [False, True])
def test_requests_that_come_back_continue_as_if_they_had_stayed(delayed: bool) -> None:
    """Log-probs of these engines depend on the requests beside, tokens do not."""
    stayed = make_collector(word_engine(delayed=delayed))
    stayed.begin(tasks(12))
    expected = harvested(stayed)
    engine = word_engine(delayed=delayed)
    collector = make_collector(engine)
    collector.begin(tasks(12))
    for _ in range(3):
        collector.step()
    collector.switch(7)
    kept = collector.requests - 5
    lent = Lent(1, 7, 10 * SECOND, collector.lend(5))
    returned = continued(word_engine(delayed=delayed), SAMPLING, copy.deepcopy(lent), terms())  # type: ignore[arg-type]
    assert returned.ended
    assert returned.unfinished
    stepped = collector.take_back(returned.ended, returned.unfinished)
    assert stepped.requests == kept
    assert stepped.ended_groups == [task.group for task in returned.ended]
    assert [collector.tasks[key] for key in engine.order()[kept:]] == list(returned.unfinished)
    found = harvested(collector)
    assert found.keys() == expected.keys()
    for place, sample in found.items():
        assert sample.tokens.tolist() == expected[place].tokens.tolist()
        assert (sample.truncated, sample.reward) == (expected[place].truncated, expected[place].reward)


def test_a_lender_stops_after_the_first_step_that_reaches_its_time() -> None:
    asked = tasks(4)
    for seconds, steps in ((0.1, 1), (1.4, 1), (1.5, 2), (2.8, 2)):  # a step of four takes 1.4 seconds
        lent = Lent(1, 7, round(seconds * SECOND), asked)
        returned = continued(word_engine(), SAMPLING, lent, terms())  # type: ignore[arg-type]
        assert [task.group for task in returned.unfinished] == [0, 1, 2, 3]
        assert {task.draft.response_len for task in returned.unfinished} == {steps}


def test_every_lender_gets_one_message_with_each_version() -> None:
    outcome = run_world(make_config(**LEND), 2, lenders=3)
    assert sorted(lent.version for lent, _ in outcome.lent) == sorted([*range(6)] * 3)
    assert all((returned is None) == (not lent.tasks) for lent, returned in outcome.lent)
    given = [(lent, returned) for lent, returned in outcome.lent if returned is not None]
    assert any(returned.ended for _, returned in given)
    assert any(returned.unfinished for _, returned in given)
    for lent, returned in given:
        assert places(returned) == {(task.group, task.index) for task in lent.tasks}
    samples = {
        (number, index): sample
        for number, found in outcome.groups.items()
        for index, sample in enumerate(found.group.samples)
    }
    for _, returned in given:  # nothing is generated twice
        for task in (*returned.ended, *returned.unfinished):
            sample, length = samples[task.group, task.index], len(task.draft.tokens)
            assert sample.tokens[:length].tolist() == task.draft.tokens.tolist()
            assert versions_of(sample)[: task.draft.response_len] == versions_of(task.draft)


def test_lenders_do_not_wait_for_a_validation() -> None:
    """Except at the last version, with which nothing is lent."""
    outcome = run_world(make_config(**LEND), 1, lenders=2, decide=lambda version: {"validates": version in (0, 3, 6)})
    order = [(type(message).__name__, message.version) for message in outcome.log if type(message) in (Lent, Validated)]
    for version in (0, 3):
        assert order.index(("Validated", version)) == order.index(("Lent", version)) + 2
        assert order.index(("Validated", version)) < order.index(("Lent", version + 1))
    assert order[-1] == ("Validated", 6)


def places(returned: Returned) -> set[tuple[int, int]]:
    return {(task.group, task.index) for task in (*returned.ended, *returned.unfinished)}


# --- with the real engine


REAL = Sampling(40, 1.0, 1.0)
FAMILIES = ("qwen2", "qwen3moe")


def real_tasks() -> list[Task]:
    """Two responses to each of six prompts, of three lengths."""
    prompts = [Prompt(i, prompt(i, length), "", "", {}) for i, length in enumerate((300, 3, 270, 96, 140, 1))]
    limits = [Sampling(length, 1.0, 1.0) for length in (12, 30, 60)]
    return [
        Task(p.prompt_id, i, p, blank_draft(p, 0), (5, 0, p.prompt_id, i), sampling=limits[(p.prompt_id + i) % 3])
        for i in range(2)
        for p in prompts
    ]


def so_far(engine: Any) -> dict[int, int]:
    """Number of tokens of each request."""
    return {key: len(found.tokens) for key, found in engine.so_far(dict.fromkeys(engine.order(), 0)).items()}


def generate(engine: Any, lender: Any, folders: list[Path]) -> tuple[dict[tuple[int, int], Sample], Returned | None]:
    """Responses of two versions; with a lender, it continues half of them with the second."""
    engines.sync(engine, folders[0])
    collector = Collector(engine, REAL, GoodRewards(), 0)  # type: ignore[arg-type]
    collector.begin(real_tasks())
    for _ in range(24):
        collector.step()
    collector.switch(1)
    engine.preempt()
    write(engine, folders[1])
    returned = None
    if lender is not None:
        engines.sync(lender, folders[1])
        before = so_far(engine)
        lent = Lent(1, 1, 30 * SECOND, collector.lend(collector.requests // 2))
        after = so_far(engine)
        assert after == {key: before[key] for key in after}, "withdrawing makes no engine step"
        returned = continued(lender, REAL, copy.deepcopy(lent), terms(asynchrony__costs__sequence_seconds=0.0))
        assert lender.unfinished == 0
        lender.sleep()
        for _ in range(10):
            collector.step()
        collector.take_back(returned.ended, returned.unfinished)
    return harvested(collector), returned


def generate_all(models: dict[str, list[Path]]) -> dict[str, Any]:
    found = {}
    for family, folders in models.items():
        engine, lender = (
            engines.build(folders[0], routed_experts=True) if family == "qwen3moe" else build(folders[0], BUDGET)
            for _ in range(2)
        )
        found[family] = generate(engine, None, folders), generate(engine, lender, folders)
        if family == "qwen2":
            for each in (engine, lender):
                keep_a_step_on_the_device(each)
            found["on the device"] = generate(engine, None, folders), generate(engine, lender, folders)
        for each in (engine, lender):
            each.shutdown()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two sets of weights of each family."""
    folder = tmp_path_factory.mktemp("models")
    found = {family: [folder / f"{family} {seed}" for seed in range(2)] for family in FAMILIES}
    for family, paths in found.items():
        for seed, path in enumerate(paths):
            make_model(path, family, seed, vocab_size=engines.VOCAB, max_position_embeddings=engines.CONTEXT)
    return found


@pytest.fixture(scope="module")
def runs(models: dict[str, list[Path]]) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(generate_all, 1, models)[0]
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
@pytest.mark.parametrize("name", [*FAMILIES, "on the device"])
def test_real_engines_continue_each_other_s_requests_bit_for_bit(
    name: str, runs: dict[str, Any], models: dict[str, list[Path]]
) -> None:
    """At this size nothing depends on the requests beside. Also log-probs and routed experts, and by HuggingFace."""
    (stayed, _), (moved, returned) = runs[name]
    assert returned.ended
    assert returned.unfinished
    assert stayed.keys() == moved.keys()
    for place, sample in moved.items():
        assert sample.tokens.tolist() == stayed[place].tokens.tolist()
        assert versions_of(sample) == versions_of(stayed[place])
        assert sample.log_probs.tobytes() == stayed[place].log_probs.tobytes()
        if name == "qwen3moe":
            assert np.array_equal(sample.routed_experts, stayed[place].routed_experts)
    folders = models["qwen2" if name == "on the device" else name]
    for place in sorted(places(returned)):
        sample = moved[place]
        tokens, length, versions = sample.tokens.tolist(), sample.prompt_len, np.array(versions_of(sample))
        assert 1 in versions
        for version in set(versions.tolist()):
            expected = log_probs_of(folders[version], tokens[:length], tokens[length:], 1.0)
            np.testing.assert_allclose(sample.log_probs[versions == version], expected[versions == version], atol=3e-5)
