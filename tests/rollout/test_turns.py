"""Responses of several turns on the real engine: aborted, resumed, answered by tools, with the model's log-probs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhpc.api import Prompt, Sample
from rlhpc.config.data import DataSection
from rlhpc.config.rollout import RolloutSection, ToolSection
from rlhpc.data.tokenizer import Tokenizer, split_turns
from rlhpc.models import read_model
from rlhpc.rewards.calls import Failure
from rlhpc.rollout.collect import Collector, Scored
from rlhpc.rollout.requests import Sampling, Task, blank_draft, last_turn, turns
from rlhpc.rollout.tool_calls import ToolCall, parse_calls
from rlhpc.rollout.tools import ToolUse
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.tool_task import ASSISTANT, CONTEXT, TOOL, make_task, tool_sections

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

LENGTH = 100
COUNT = 32
TURNS = 3


def rollouts(folder: Path) -> dict[str, list[Sample]]:
    """The same responses: at once, with tools waited for every few steps, and taken back twice on their way."""
    path = folder / "model"
    tokenizer = Tokenizer.load(path, read_model(path).vocab_size, DataSection())
    engine = engines.ready(path, end_tokens=tokenizer.end_tokens)
    section = RolloutSection(tools=[ToolSection(**tool) for tool in tool_sections()], max_turns=TURNS)
    tools = ToolUse(section, tokenizer, leads=True)
    prompt = Prompt(0, tokenizer.encode_prompts(["12+30="])[0], "sums", "42", {})

    tasks = [Task(i // 4, i % 4, prompt, blank_draft(prompt, 1), (0, 0, 0, i)) for i in range(COUNT)]

    def collector(version: int = 1) -> Collector:
        return Collector(engine, Sampling(LENGTH, 1.0, 1.0), engines.GoodRewards(), version, tools)

    def finish(steps: int | None = None) -> list[Scored]:
        running = collector()
        running.begin(tasks)
        while running.in_flight:
            running.advance(steps)
        return running.harvest()

    def interrupted() -> list[Scored]:
        left, done = tasks, []
        of = {(task.group, task.index): task for task in tasks}
        for version, steps in enumerate((7, 9, None), start=1):
            running = collector(version)
            running.begin(left)
            running.advance(steps)
            done += running.harvest()
            left = [replace(of[s.group, s.index], draft=s.sample) for s in (running.stop() if steps else [])]
            assert engine.unfinished == 0
        return sorted(done, key=lambda scored: (scored.group, scored.index))

    found = {"at once": finish(), "in steps": finish(steps=5), "interrupted": interrupted()}
    tools.close()
    engine.sleep()  # nothing holds the cache any more
    engines.sync(engine, path)
    engine.shutdown()
    return {name: [scored.sample for scored in samples] for name, samples in found.items()}


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def found(task_folder: Path) -> dict[str, list[Sample]]:
    return run_ranks(rollouts, 1, task_folder)[0]


def log_probs_of(folder: Path, samples: Sequence[Sample]) -> list[np.ndarray]:
    """HuggingFace's, of every response token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    found = []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens).long()
            table = model(tokens[None]).logits[0, sample.prompt_len - 1 : -1].log_softmax(-1)
            found.append(table.gather(1, tokens[sample.prompt_len :, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize("way", ["at once", "interrupted"])
def test_log_probs_are_the_model_s_where_it_chose(found, task_folder, way):
    samples = found[way]
    assert len(samples) == COUNT
    assert sum(sample.response_mask is not None for sample in samples) > 8, "tools were called"
    for sample, expected in zip(samples, log_probs_of(task_folder, samples), strict=True):
        response_mask = np.ones(sample.response_len, bool) if sample.response_mask is None else sample.response_mask
        np.testing.assert_allclose(sample.log_probs[response_mask], expected[response_mask], atol=1e-4)
        assert not sample.log_probs[~response_mask].any()
        assert sample.response_len <= LENGTH
        assert len(sample.tokens) <= CONTEXT


def test_given_tokens_are_the_template_s(found, task_folder):
    tokenizer = Tokenizer.load(task_folder / "model", read_model(task_folder / "model").vocab_size, DataSection())
    answered = []
    for sample in found["at once"]:
        if sample.response_mask is None:
            continue
        given = sample.tokens[sample.prompt_len :][~sample.response_mask].tolist()
        text = tokenizer.decode(given, special=True)
        answered += [part.removesuffix(ASSISTANT) for part in text.split(TOOL)[1:]]
        assert text.endswith(ASSISTANT)
    assert any("420" in text or "42" in text for text in answered)
    assert any(text.startswith("error:") for text in answered), answered


@pytest.mark.parametrize("way", ["at once", "interrupted"])
def test_a_response_ends_by_itself_or_is_truncated(found, task_folder, way):
    """By its length, or in its last turn before calls that are not run. Tokens of tools are not its length."""
    tokenizer = Tokenizer.load(task_folder / "model", read_model(task_folder / "model").vocab_size, DataSection())
    ends = Counter()
    for sample in found[way]:
        given = 0 if sample.response_mask is None else int((~sample.response_mask).sum())
        assert (sample.tool_tokens, sample.sampled_len) == (given, sample.response_len - given)
        calls = bool(parse_calls(tokenizer.decode(last_turn(sample).tolist(), special=True)))
        if int(sample.tokens[-1]) in tokenizer.end_tokens and (turns(sample) == TURNS or not calls):
            assert sample.truncated == calls
            ends[turns(sample) == TURNS, calls] += 1
        else:
            assert sample.truncated
    assert ends[True, True], ends
    assert ends[False, False], ends


@pytest.mark.parametrize("way", ["at once", "in steps", "interrupted"])
def test_a_tool_with_state_is_each_conversation_s_own(found, task_folder, way):
    """It counts from 1, also if the response was aborted and resumed."""
    tokenizer = Tokenizer.load(task_folder / "model", read_model(task_folder / "model").vocab_size, DataSection())
    counts: list[list[str]] = []
    for sample in found[way]:
        counts.append([])
        calls: list[ToolCall | Failure] = []
        for of_policy, part in split_turns(sample):
            if of_policy:
                calls = parse_calls(tokenizer.decode(part, special=True))
                continue
            answers = zip(calls, tokenizer.tool_answers(part.tolist()), strict=True)
            counts[-1] += [text for call, text in answers if isinstance(call, ToolCall) and call.name == "count"]
    assert sum(map(len, counts)) > 8
    assert max(map(len, counts)) > 1
    for found_counts in counts:
        assert found_counts == [str(n + 1) for n in range(len(found_counts))]


@pytest.mark.parametrize("way", ["in steps", "interrupted"])
def test_neither_waiting_for_tools_nor_interruptions_change_a_response(found, way):
    for one, other in zip(found["at once"], found[way], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.array_equal(one.response_mask, other.response_mask)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert (one.truncated, one.policy_version) == (other.truncated, other.policy_version)
    assert max(sample.response_len for sample in found[way]) > 7 + 9, "some are interrupted twice"
