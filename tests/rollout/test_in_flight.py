"""Requests in flight on the real engine: new weights under them, preemption, a checkpoint, a step on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.api import Prompt, Sample
from rlhpc.core import env
from rlhpc.rollout.collect import Collector, Draft
from rlhpc.rollout.requests import Sampling, Task, blank_draft
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.engines import CONTEXT, VOCAB
from tests.rollout.test_generate import log_probs_of, own_routed_experts, reference
from tests.rollout.test_token_seeds import BUDGET, build, prompt

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

SAMPLING = Sampling(max_tokens=40, temperature=1.0, top_p=1.0)
SWITCHES = (24, 48)  # engine steps
Place = tuple[int, int]


def tasks(first: int) -> list[Task]:
    """Two responses to each of six prompts, whose indices begin with ``first``."""
    prompts = [Prompt(i, prompt(i, length), "", "", {}) for i, length in enumerate((300, 3, 270, 96, 140, 1))]
    return [
        Task(p.prompt_id, i, p, blank_draft(p, 0), (5, 0, p.prompt_id, i)) for i in (first, first + 1) for p in prompts
    ]


@dataclass
class Trace:
    """Responses; of each the versions that computed its inputs' keys and values; the engine's statistics."""

    samples: dict[Place, Sample] = field(default_factory=dict)
    inputs: dict[Place, list[int]] = field(default_factory=dict)
    last: dict[Place, int] = field(default_factory=dict)  # of the last inputs
    statistics: dict[str, float] = field(default_factory=dict)
    on_device: int = 0  # switches while a step was on the device

    def record(self, engine: VllmEngine, collector: Collector, version: int) -> None:
        """After an engine step."""
        requests, running = engines.vllm_engine(engine).engine_core.engine_core.scheduler.requests, set()
        for key, state in engine._in_flight.states().items():
            task, inputs = collector.tasks[key], requests[state.request_id].num_computed_tokens
            running.add((task.group, task.index))
            known = self.inputs.setdefault((task.group, task.index), [])
            if inputs < len(known):  # preempted
                known.clear()
            known += [version] * (inputs - len(known))
        for place in self.inputs.keys() - running:
            self.last.setdefault(place, version)


def write(engine: VllmEngine, path: Path) -> None:
    engines.fill(engine.open_weights(in_flight=True), path, EngineLayout(dist.get_world_size()))
    engine.close_weights()


def generate(engine: VllmEngine, folders: Sequence[Path], mode: str) -> Trace:
    """Twelve responses begun with each of three versions of the weights, to the same prompts."""
    engines.sync(engine, folders[0])
    engine.statistics()
    collector, trace, version, steps = Collector(engine, SAMPLING, engines.GoodRewards(), 0), Trace(), 0, 0
    collector.begin(tasks(0))
    while collector.in_flight:
        if steps in SWITCHES:
            if mode == "finish":
                collector.advance()
            version += 1
            trace.on_device += bool(engines.vllm_engine(engine).engine_core.engine_core.batch_queue)
            collector.switch(version)
            if mode == "recompute":
                engine.preempt()
            write(engine, folders[version])
            collector.begin(tasks(2 * version))
        collector.step()
        trace.record(engine, collector, version)
        steps += 1
    for scored in collector.harvest():
        place = scored.group, scored.index
        trace.samples[place] = scored.sample
        if mode == "keep":
            known = trace.inputs[place]
            known += [trace.last[place]] * (len(scored.sample.tokens) - 1 - len(known))
    trace.statistics = engine.statistics()
    return trace


def keep_a_step_on_the_device(engine: VllmEngine) -> None:
    """Returns the results of a step with the next one, as on a GPU."""
    core = engines.vllm_engine(engine).engine_core.engine_core
    core.batch_queue, core.batch_queue_size, core.step_fn = deque(maxlen=2), 2, core.step_with_batch_queue


def leave_and_continue(engine: VllmEngine, path: Path) -> tuple[list[Draft], list[Sample]]:
    """Drafts of all responses in flight after some steps, and those responses at their end. In between, others are
    answered alone."""
    engines.sync(engine, path)
    collector = Collector(engine, SAMPLING, engines.GoodRewards(), 0)
    collector.begin([*tasks(0), *tasks(2)])
    collector.advance(30)
    collector.harvest()
    collector.switch(1)
    engine.preempt()
    drafts = collector.drafts()
    collector.set_aside()
    collector.begin([replace(task, group=task.group - 6, sampling=Sampling(5, 0.0, 1.0)) for task in tasks(0)])
    collector.advance()
    others = collector.harvest()
    assert {(scored.group < 0, scored.sample.response_len) for scored in others} == {(True, 5)}
    collector.take_up()
    assert_same_drafts(collector.drafts(), drafts)
    collector.advance()
    return drafts, [scored.sample for scored in collector.harvest()]


def restore(engine: VllmEngine, path: Path, drafts: Sequence[Draft]) -> list[Sample]:
    """Those responses, continued by an engine that has done nothing else."""
    engines.sync(engine, path)
    collector = Collector(engine, SAMPLING, engines.GoodRewards(), 1)
    collector.restore(drafts)
    collector.advance()
    return [scored.sample for scored in collector.harvest()]


def both(path: Path) -> tuple[list[Draft], list[Sample], list[Sample]]:
    engine, fresh = (build(path, BUDGET, max_num_seqs=16) for _ in range(2))
    drafts, samples = leave_and_continue(engine, path)
    return drafts, samples, restore(fresh, path, drafts)


def generate_all(models: dict[str, list[Path]]) -> dict[str, Any]:
    path = models["qwen2"][0]
    experts = engines.build(models["qwen3moe"][0], routed_experts=True)
    found: dict[str, Any] = {"experts": generate(experts, models["qwen3moe"], "recompute")}
    experts.shutdown()
    found["checkpoint"] = both(path)
    engine, small = build(path, BUDGET), build(path, BUDGET, kv_cache_gib=0.0015)
    for name in ("recompute", "again", "finish", "keep"):
        found[name] = generate(engine, models["qwen2"], name.replace("again", "recompute"))
    found["keep in a small cache"] = generate(small, models["qwen2"], "keep")
    keep_a_step_on_the_device(engine)
    found["on the device"] = generate(engine, models["qwen2"], "recompute")
    return found


@pytest.fixture(scope="module")
def three(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Three sets of weights of each family."""
    found = {}
    for kind in ("qwen2", "qwen3moe"):
        third = tmp_path_factory.mktemp("third") / kind
        make_model(third, kind, 2, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
        found[kind] = [models / kind / "a", models / kind / "b", third]
    return found


@pytest.fixture(scope="module")
def traces(three: dict[str, list[Path]]) -> dict[str, Trace]:
    return run_ranks(generate_all, 1, three)[0]


def generate_on_two_ranks(folders: list[Path]) -> Trace:
    return generate(build(folders[0], BUDGET, tp=2), folders, "recompute")


@pytest.mark.long
def test_ranks_of_an_engine_switch_alike(three):
    one, other = run_ranks(generate_on_two_ranks, 2, three["qwen2"])
    assert one.samples.keys() == other.samples.keys()
    for place, sample in one.samples.items():
        assert_same_bits(sample, other.samples[place])
    assert_log_probs(one, three["qwen2"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def versions_of(sample: Sample) -> np.ndarray:
    if sample.token_versions is not None:
        return sample.token_versions
    return np.full(sample.response_len, sample.policy_version)


def assert_log_probs(trace: Trace, folders: Sequence[Path]) -> int:
    """Each token's log-prob is that of its version's weights; number of responses of several versions."""
    several = set()
    for version, folder in enumerate(folders):
        for place, sample in trace.samples.items():
            versions = versions_of(sample)
            if version in versions:
                tokens, length = sample.tokens.tolist(), sample.prompt_len
                expected = log_probs_of(folder, tokens[:length], tokens[length:], 1.0)
                np.testing.assert_allclose(
                    sample.log_probs[versions == version], expected[versions == version], atol=3e-5
                )
                several |= {place} if len(set(versions)) > 1 else set()
    return len(several)


@pytest.mark.parametrize("mode", ["recompute", "finish", "experts", "on the device"])
def test_a_token_s_log_prob_is_that_of_its_version(traces, three, mode):
    """Also of requests that were queued, whose prompt was half computed, or that have a prompt of an older request."""
    several = assert_log_probs(traces[mode], three["qwen3moe" if mode == "experts" else "qwen2"])
    assert (several > 8) == (mode != "finish")
    assert traces[mode].on_device == (2 if mode == "on the device" else 0)


def log_probs_in_segments(models: Sequence[Any], sample: Sample, inputs: Sequence[int]) -> np.ndarray:
    """HuggingFace's log-probs where each input's keys and values are of the weights of its version."""
    from transformers import DynamicCache

    tokens, cache, logits = torch.from_numpy(sample.tokens).long()[None], DynamicCache(), []
    cuts = [i for i in range(len(inputs)) if i == 0 or inputs[i] != inputs[i - 1]]
    with torch.no_grad():
        for start, stop in zip(cuts, [*cuts[1:], len(inputs)], strict=True):
            output = models[inputs[start]](tokens[:, start:stop], past_key_values=cache)
            logits.append(output.logits[0])
    log_probs = torch.cat(logits).log_softmax(-1)
    return log_probs.gather(1, tokens[0, 1:, None])[sample.prompt_len - 1 :, 0].numpy()


@pytest.mark.parametrize("mode", ["keep", "keep in a small cache"])
def test_with_a_kept_cache_log_probs_are_those_of_segments(traces, three, mode):
    """Later requests to the same prompts use no older prefixes; one preempted for lack of memory is recomputed."""
    models, trace, worst, mixed = [reference(path) for path in three["qwen2"]], traces[mode], 0.0, 0
    for place, sample in trace.samples.items():
        inputs = trace.inputs[place]
        expected = log_probs_in_segments(models, sample, inputs)
        worst = max(worst, np.abs(sample.log_probs - expected).max())
        # An input's keys and values are computed when the token after it is sampled, unless it was preempted.
        mixed += inputs[sample.prompt_len - 1 :] == versions_of(sample).tolist() and len(set(inputs)) > 1
        assert inputs[0] >= place[1] // 2
    assert worst < 3e-5
    assert mixed > 6
    assert (trace.statistics["engine/preemptions_sum"] > 0) == (mode != "keep")


def test_routed_experts_of_older_tokens_are_those_of_their_version(traces, three):
    for version, folder in enumerate(three["qwen3moe"]):
        for sample in list(traces["experts"].samples.values())[::3]:
            versions = versions_of(sample)
            where = np.concatenate([np.full(sample.prompt_len - 1, versions[0]), versions]) == version
            if where.any():
                expected = own_routed_experts(folder, sample.tokens.tolist())[:-1]
                assert np.array_equal(np.sort(sample.routed_experts, axis=-1)[where], expected[where])


def test_the_same_calls_give_the_same_bits(traces):
    one, other = traces["recompute"], traces["again"]
    assert one.samples.keys() == other.samples.keys()
    for place in one.samples:
        assert_same_bits(one.samples[place], other.samples[place])


def assert_same_bits(one: Sample, other: Sample) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.log_probs.tobytes() == other.log_probs.tobytes()
    assert versions_of(one).tolist() == versions_of(other).tolist()


def test_preemptions_for_new_weights_are_not_counted_as_lack_of_memory(traces):
    assert traces["recompute"].statistics["engine/preemptions_sum"] == 0


def assert_same_drafts(ones: Sequence[Draft], others: Sequence[Draft]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one.calls, one.task.group, one.task.index) == (other.calls, other.task.group, other.task.index)
        assert_same_bits(one.task.draft, other.task.draft)


def assert_continued(drafts: Sequence[Draft], whole: Sequence[Sample], restored: Sequence[Sample]) -> None:
    """Some had tokens, some were queued or had a part of their prompt computed."""
    begun = [draft.task.draft.response_len > 0 for draft in drafts]
    assert begun.count(True) > 6
    assert begun.count(False) > 3
    assert len(drafts) == len(whole) == len(restored)
    for one, other in zip(whole, restored, strict=True):
        assert_same_bits(one, other)
    assert any(sample.token_versions is not None for sample in whole)


def test_a_fresh_engine_continues_a_checkpoint_bit_for_bit(traces):
    assert_continued(*traces["checkpoint"])


def both_in_bfloat16(path: Path) -> tuple[list[Draft], list[Sample], list[Sample]]:
    assert torch.get_num_threads() == 2
    with mock.patch.object(engines, "DTYPE", "bfloat16"):
        return both(path)


@pytest.mark.long
def test_a_fresh_engine_continues_a_checkpoint_of_a_larger_model_bit_for_bit(tmp_path):
    """Whose kernels choose their blocks by the number of rows, in bfloat16 and with two threads."""
    sizes = {"hidden_size": 1024, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 8}
    changes = {**sizes, "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    path = make_model(tmp_path / "model", "qwen2", **changes)
    assert_continued(*run_ranks(both_in_bfloat16, 1, path, environ={env.OMP_NUM_THREADS: "2"})[0])
