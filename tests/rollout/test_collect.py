"""Which prompts an engine answers, with which seeds, and what becomes of its completions.

The engine here is one that samples from a list of words without a model: what is tested is who requests what, and
what is made of it. tests/rollout/test_turns.py has the real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlhpc.api import Completion, Prompt, Request, RewardResult, SamplingOptions
from rlhpc.rollout.collect import Collector, Reply
from rlhpc.rollout.requests import (
    Sampling,
    Task,
    blank_draft,
    first_samples,
    last_turn,
    mixed_bits,
    request_of,
    request_seed,
    share_of,
    turns,
    with_sampled,
    with_tool_tokens,
)

SAMPLING = Sampling(max_tokens=8, temperature=0.9, top_p=0.95)
END = 1


def prompt(number: int) -> Prompt:
    return Prompt(number, (10 + number, 20 + number), "source", f"answer {number}", {})


def task(number: int, index: int = 0) -> Task:
    return Task(number, index, prompt(number), blank_draft(prompt(number), 6), (5, 2, number, index))


class Words:
    """An engine that samples a token a step, by the request's seed and the token's position; one in five is END."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[Request, list[int]]] = {}
        self.requests: list[Request] = []

    def submit(self, key: int, request: Request) -> None:
        assert key not in self.open
        self.requests.append(request)
        self.open[key] = (request, [])

    def step(self) -> list[tuple[int, Completion]]:
        done = []
        for key, (request, tokens) in list(self.open.items()):
            bits = mixed_bits(request.seed, len(request.prompt) + len(tokens))
            ends = bits % 5 == 0
            tokens.append(END if ends else 30 + (bits >> 8) % 7)
            if ends or len(tokens) == request.max_tokens:
                done.append((key, completion(tokens, truncated=not ends)))
                del self.open[key]
        return done

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        return {key: completion(self.open.pop(key)[1], truncated=False) for key in keys}


class Counting:
    """Reward workers whose reward is the number of tokens that the policy sampled."""

    def __init__(self) -> None:
        self.waiting: dict[int, RewardResult] = {}

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        failures = ("raised",) if prompt.prompt_id == 13 else ()
        size = float(len(completion.tokens) - completion.tool_tokens)
        self.waiting[key] = RewardResult(size, {"length": 1.0}, dropped=bool(failures), failures=failures)

    def results(self) -> dict[int, RewardResult]:
        found, self.waiting = self.waiting, {}
        return dict(reversed(found.items()))


class Calls:
    """A dialogue that answers turns whose first token is even with ``answer``, after ``delay`` looks."""

    def __init__(self, answer: tuple[int, ...] = (END, 98, 99), delay: int = 0) -> None:
        self.answer, self.delay, self.waiting, self.turns = answer, delay, Counter(), []
        self.ended: list[tuple[int, int]] = []

    def begin(self, key: int, task: Task) -> bool:
        turn = last_turn(task.draft)
        self.turns.append(tuple(turn))
        if turn[0] % 2 or turns(task.draft) == 4:
            return False
        self.waiting[key] = self.delay
        return True

    def unanswered(self, task: Task) -> bool:
        return turns(task.draft) == 4 and last_turn(task.draft)[0] % 2 == 0

    def ready(self) -> dict[int, Reply]:
        self.waiting = Counter({key: looks - 1 for key, looks in self.waiting.items()})
        return self._take([key for key, looks in self.waiting.items() if looks < 0])

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        keys = sorted(self.waiting, key=self.waiting.__getitem__)
        return self._take(keys if all_of_them else keys[:1])

    def end(self, task: Task) -> None:
        self.ended.append((task.group, task.index))

    def _take(self, keys: Sequence[int]) -> dict[int, Reply]:
        for key in keys:
            del self.waiting[key]
        return dict.fromkeys(keys, Reply(self.answer, calls=2, failures=1))


def completion(tokens: Sequence[int], truncated: bool) -> Completion:
    return Completion(np.array(tokens, np.int32), np.array([-t / 64 for t in tokens], np.float32), truncated)


def collect(tasks: Sequence[Task], dialogue: Calls | None = None, steps: int | None = None) -> list[tuple]:
    collector = Collector(Words(), SAMPLING, Counting(), 6, dialogue)
    collector.begin(tasks)
    while collector.in_flight:
        collector.advance(steps)
    assert collector.ended_groups == len({task.group for task in tasks})
    return [summary(scored) for scored in collector.harvest()]


def summary(scored) -> tuple:
    sample = scored.sample
    response_mask = None if sample.response_mask is None else sample.response_mask.tolist()
    return (
        scored.group,
        scored.index,
        sample.tokens.tolist(),
        response_mask,
        sample.reward,
        sample.truncated,
        scored.dropped,
    )


@pytest.mark.parametrize(("items", "parts"), [(64, 1), (64, 8), (10, 4), (3, 4), (7, 7), (0, 2)])
def test_shares_cover_the_step_in_order_and_evenly(items, parts):
    shares = [share_of(items, parts, index) for index in range(parts)]
    assert [place for share in shares for place in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_seeds_are_fixed_and_spread():
    assert request_seed((0, 0, 0, 0)) == 5809880761037817570
    seeds = {request_seed((s, t, p, i)) for s in range(3) for t in range(5) for p in range(20) for i in range(8)}
    assert len({seed % 2**32 for seed in seeds}) == 3 * 5 * 20 * 8  # CPU generators keep only 32 bits
    assert all(0 <= seed < 2**63 for seed in seeds)
    tokens = {mixed_bits(seed, position) % 2**32 for seed in list(seeds)[:40] for position in range(50)}
    assert len(tokens) == 40 * 50


def test_a_prompt_sampled_twice_in_a_step_gets_new_samples():
    seen: Counter[int] = Counter()
    assert first_samples([4, 9, 4], 3, seen) == [0, 0, 3]
    assert first_samples([9, 4], 3, seen) == [3, 6]


def test_samples_hold_prompt_response_and_verdict():
    collector = Collector(Words(), SAMPLING, Counting(), 6)
    collector.begin([task(9)])
    collector.advance()
    (scored,) = collector.harvest()
    sample = scored.sample
    assert sample.tokens[:2].tolist() == [19, 29]
    assert sample.tokens.dtype == np.int32
    assert (sample.prompt_id, sample.prompt_len, sample.policy_version) == (9, 2, 6)
    assert sample.log_probs.tolist() == [-t / 64 for t in sample.tokens[2:]]
    assert (sample.reward, sample.reward_parts) == (float(sample.response_len), {"length": 1.0})
    assert sample.response_mask is None


def test_a_verdict_may_leave_a_response_out():
    assert [dropped for *_, dropped in collect([task(12), task(13)])] == [False, True]


def test_failures_and_tool_calls_are_counted_with_the_response_they_belong_to():
    """Also across an interruption, and after responses whose failures nobody counted."""
    reward_workers, dialogue = Counting(), Calls(answer=(98,))

    def begun(tasks: Sequence[Task]) -> Collector:
        collector = Collector(Words(), SAMPLING, reward_workers, 6, dialogue)
        collector.begin(tasks)
        return collector

    tasks = [task(n, i) for n in range(10, 210) for i in range(3)]
    begun(tasks).advance()
    reward_workers.results()
    collector = begun(tasks)
    collector.advance(2)
    collector.advance(2)
    ended, stopped = collector.harvest(), collector.stop()
    later = begun([replace(task(s.group, s.index), draft=s.sample) for s in stopped])
    later.advance()
    resumed = later.harvest()
    assert all(any(scored.tool_calls for scored in found) for found in (ended, stopped, resumed))
    assert max(scored.tool_calls for scored in resumed) > 2
    assert not any(scored.failures for scored in stopped)
    before = {(scored.group, scored.index): scored.tool_calls for scored in stopped}
    for scored in (*ended, *resumed):
        assert scored.failures == (("raised",) if scored.group == 13 else ())
        assert scored.tool_calls == 2 * scored.failed_tool_calls
        replies = (scored.tool_calls + before.get((scored.group, scored.index), 0)) / 2
        assert replies == turns(scored.sample) - 1 or (scored.sample.truncated and replies == turns(scored.sample))


def test_other_ranks_of_an_engine_ask_the_same_and_have_no_samples():
    def requests(reward_workers: Counting | None) -> tuple[list[int], list[Request], int, int]:
        engine, keys = Words(), []
        submit = engine.submit
        engine.submit = lambda key, request: (keys.append(key), submit(key, request))[1]
        collector = Collector(engine, SAMPLING, reward_workers, 6, Calls())
        collector.begin([task(n, i) for n in range(6) for i in range(3)])
        collector.advance()
        return keys, engine.requests, collector.ended_groups, len(collector.harvest())

    keys, asked, ended, samples = requests(Counting())
    assert (ended, samples) == (6, 18)
    assert len(asked) > 18
    assert requests(None) == (keys, asked, 6, 0)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("steps", [None, 1, 4])
def test_turns_do_not_depend_on_when_tools_answer(steps, delay):
    tasks = [task(n, i) for n in range(6) for i in range(3)]
    dialogue = Calls(delay=delay)
    found = collect(tasks, dialogue, steps)
    assert found == collect(tasks, Calls())
    several = [response_mask for _, _, _, response_mask, *_ in found if response_mask is not None]
    assert several
    for _, _, tokens, response_mask, *_ in found:
        response = tokens[2:]
        assert len(response) <= SAMPLING.max_tokens
        if response_mask is None:
            continue
        given = [token for token, sampled in zip(response, response_mask, strict=True) if not sampled]
        assert given == [98, 99] * (len(given) // 2), "the end that the policy drew is not given once more"
    assert {len(turn) > 0 for turn in dialogue.turns} == {True}
    assert sorted(dialogue.ended) == [(task.group, task.index) for task in tasks]
    assert not any({98, 99} & set(turn) for turn in dialogue.turns), "a turn is what was sampled since the answer"


def test_tokens_of_tools_are_not_the_policy_s_length():
    tasks = [task(n, i) for n in range(6) for i in range(3)]
    collector = Collector(Words(), SAMPLING, Counting(), 6, Calls())
    collector.begin(tasks)
    collector.advance(4)
    collector.advance()
    samples = [scored.sample for scored in collector.harvest()]
    assert any(sample.tool_tokens for sample in samples)
    for sample in samples:
        given = 0 if sample.response_mask is None else int((~sample.response_mask).sum())
        assert (sample.tool_tokens, sample.sampled_len) == (given, sample.response_len - given)
        assert sample.reward == sample.sampled_len, "the reward sees the policy's length"
        masked = replace(sample, response_mask=np.zeros(sample.response_len, bool))
        assert (masked.sampled_len, masked.trained_len) == (sample.sampled_len, 0)


def test_a_response_whose_last_calls_are_not_run_is_truncated():
    sampling = Sampling(max_tokens=200, temperature=1.0, top_p=1.0)
    collector = Collector(Words(), sampling, Counting(), 6, Calls(answer=(98,)))
    collector.begin([task(n, i) for n in range(40) for i in range(3)])
    collector.advance()
    stopped = set()
    for sample in (scored.sample for scored in collector.harvest()):
        calls = last_turn(sample)[0] % 2 == 0
        assert sample.response_len < sampling.max_tokens
        assert sample.truncated == (calls and turns(sample) == 4)
        stopped.add((turns(sample) == 4, sample.truncated))
    assert stopped == {(False, False), (True, False), (True, True)}


def test_no_room_for_an_answer_ends_a_response():
    found = collect([task(n) for n in range(8)], Calls(answer=(98,) * 7))
    assert any(truncated for *_, truncated, _ in found)
    assert all(98 not in tokens for _, _, tokens, *_ in found)


def test_a_resumed_response_is_that_of_a_run_without_interruptions():
    tasks = [task(n, i) for n in range(8) for i in range(2)]
    engine = Words()
    collector = Collector(engine, SAMPLING, Counting(), 6)
    collector.begin(tasks)
    collector.advance(2)
    ended, unfinished = collector.harvest(), collector.stop()
    assert ended
    assert unfinished
    assert not engine.open
    draft = unfinished[0].sample
    assert draft.response_len == 2
    later = Collector(Words(), SAMPLING, Counting(), 9)
    later.begin([replace(task(s.group, s.index), draft=s.sample) for s in unfinished])
    later.advance()
    resumed = later.harvest()
    assert sorted(map(summary, (*ended, *resumed))) == collect(tasks)
    longer = resumed[0].sample
    assert longer.log_probs[:2].tolist() == draft.log_probs.tolist()
    assert longer.policy_version == 6, "of the weights that drew its oldest token"


def test_a_turn_that_depends_on_itself_begins_again():
    """With the same tokens, after the last answer of tools; what came before stays."""
    tasks = [task(n, i) for n in range(8) for i in range(2)]
    sampling = replace(SAMPLING, options=SamplingOptions(stop=("x",), min_tokens=5))
    first, engine = Collector(Words(), sampling, Counting(), 6, Calls()), Words()
    first.begin(tasks)
    first.advance(3)
    ended, unfinished = first.harvest(), first.stop()
    later = Collector(engine, sampling, Counting(), 9, Calls())
    later.begin([replace(task(s.group, s.index), draft=s.sample) for s in unfinished])
    both = zip(engine.requests, unfinished, strict=True)
    begun = {len(request.prompt) - scored.sample.prompt_len for request, scored in both}
    assert begun == {0, *begun}
    assert len(begun) > 1, "some are in their first turn, some in a later one"
    for request, scored in zip(engine.requests, unfinished, strict=True):
        sample, kept = scored.sample, len(request.prompt) - scored.sample.prompt_len
        assert kept == (0 if sample.response_mask is None else np.flatnonzero(~sample.response_mask)[-1] + 1)
        assert request.options.min_tokens == max(0, 5 - kept)
    while later.in_flight:
        later.advance(1)
    found = later.harvest()
    assert sorted(map(summary, (*ended, *found))) == collect(tasks, Calls())
    assert {scored.sample.policy_version for scored in found if scored.sample.response_mask is None} == {9}


def test_sources_have_their_own_sampling():
    other = replace(SAMPLING, max_tokens=3, options=SamplingOptions(top_k=5))
    sampling, engine = replace(SAMPLING, by_source={"source": other}), Words()
    foreign = replace(task(1), prompt=replace(prompt(1), data_source="another"))
    Collector(engine, sampling, None, 6).begin([task(0), foreign])
    assert [(request.max_tokens, request.options.top_k) for request in engine.requests] == [(3, 5), (8, None)]


def test_a_blank_draft_is_of_the_weights_that_draw_it():
    assert with_sampled(blank_draft(prompt(1), 3), completion([5], False), 7).policy_version == 7


def test_routed_experts_of_earlier_tokens_stay():
    def routed_experts(length: int, value: int) -> np.ndarray:
        return np.full((length, 1, 2), value, np.uint8)

    def sampled(tokens: Sequence[int], length: int, value: int) -> Completion:
        return replace(completion(tokens, False), routed_experts=routed_experts(length, value))

    assert with_sampled(blank_draft(prompt(1), 3), completion([5], False), 3).routed_experts is None
    first = with_sampled(blank_draft(prompt(1), 3), sampled([5, 6], 3, 1), 3)
    replied = with_tool_tokens(first, [7, 8])
    last = with_sampled(replied, sampled([9], 6, 2), 4)
    assert last.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_turns_are_counted_by_what_is_given():
    draft = with_sampled(blank_draft(prompt(1), 3), completion([5, END], False), 3)
    assert turns(draft) == 1
    twice = with_sampled(with_tool_tokens(draft, [7, 8]), completion([6], False), 3)
    assert turns(twice) == 2
    assert twice.response_mask.tolist() == [True, True, False, False, True]
    assert twice.log_probs[2:4].tolist() == [0, 0]
    assert turns(with_tool_tokens(twice, [7])) == 3


def test_requests_carry_the_sampling():
    assert request_of(task(4), SAMPLING) == Request((14, 24), request_seed((5, 2, 4, 0)), 8, 0.9, 0.95)
    draft = with_tool_tokens(with_sampled(blank_draft(prompt(4), 3), completion([5, END], False), 3), [7])
    assert request_of(replace(task(4), draft=draft), SAMPLING).later_turn
