"""Real engines in processes of their own beside a stand-in for the trainers, which sends the weights of two models in
turn: every prompt once, within the bound, and bit for bit after a restart.

The model is wide enough that a token's log-prob depends on the rows beside it: an engine step of another composition
than before the restart shows.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.api import Completion, Prompt, RewardResult
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import PromptFiles, PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import read_model
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, open_channel
from rlhpc.parallel.groups import engine_group, job_store
from rlhpc.rollout.generator.messages import StartPoint
from rlhpc.rollout.generator.parts import EnginePlace, GeneratorParts
from rlhpc.rollout.schedule.terms import terms_of
from rlhpc.rollout.tool_kinds import tool_schemas
from rlhpc.rollout.tools import ToolUse
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.generator.worlds import Outcome, Trainers, make_config, plain, versions_of
from tests.rollout.tool_task import make_task, make_tokenizer, tool_sections

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

SAVED = 2
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
COSTS = {"step_seconds": 1.0, "sequence_seconds": 0.1, "train_seconds": 6.0, "tool_seconds": 4.0}
CHANGES = {
    "asynchrony": {"max_staleness": 1, "costs": COSTS},
    "rollout": {
        "ranks": 2,
        "samples_per_prompt": 3,
        "max_response_tokens": 40,
        "max_num_seqs": 8,
        "kv_cache_gib": 0.0625,
        "tools": tool_sections(),
        "max_turns": 3,
    },
    "train": {"steps": 4, "prompts_per_step": 5, "dynamic_sampling": {}},
    "data": {"train": ["train.jsonl"], "max_prompt_tokens": 64},
}


TURNS = {
    "rollout__dealing": "turns",
    "rollout__max_num_seqs": 2,
    "rollout__max_response_tokens": 60,
    "rollout__temperature": 2.0,
    "rollout__tools": [],
}


class TokenSums:
    """Rewards 0 or 1 by the response's tokens."""

    def __init__(self) -> None:
        self._found: dict[int, RewardResult] = {}

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        self._found[key] = RewardResult(float(int(completion.tokens.sum()) % 3 == 0))

    def ready(self) -> dict[int, RewardResult]:
        found, self._found = self._found, {}
        return found

    results = ready


class TwoModels:
    """Weights of two folders in turn, which arrive at once."""

    def __init__(self, folder: Path, tp: int) -> None:
        self._folder, self._tp = folder, tp

    def ready(self, version: int) -> bool:
        return True

    def wait(self, version: int) -> None: ...

    def write(self, engine: Any, version: int) -> None:
        path = self._folder / ("model", "other")[version % 2]
        engines.fill(engine.open_weights(in_flight=True), path, EngineLayout(self._tp))
        engine.close_weights()


def attempts(folder: Path, tp: int, in_flight: str, turns: bool = False) -> list[Outcome] | None:
    """A whole run that saves at version SAVED, and one that resumes there, in each rank of both roles. ``turns``:
    responses take turns."""
    info, changes = RankInfo.from_environ(), {"rollout__tp": tp, "asynchrony__in_flight": in_flight}
    config = make_config(**CHANGES, **changes, **(TURNS if turns else {}))
    leaders = range(1, info.job_size, tp)
    terms, found = terms_of(config, len(leaders)), list[Outcome]()
    parts = engine_parts(config, folder, tp) if info.role == "engines" else None
    start = StartPoint(0, 0)
    for attempt in ("whole", "resumed"):
        inbox, board = Inbox(), Board(job_store(), attempt)
        channels = {
            leader: open_channel(job_store(), f"{attempt} {leader}", (0, leader), info.job_rank, inbox)
            for leader in leaders
            if info.job_rank in (0, leader)
        }
        if parts is not None:
            from rlhpc.rollout.generator.loop import Generator
            from rlhpc.rollout.generator.parts import Links

            leads = parts.place.leads
            links = Links(TwoModels(folder, tp), board if leads else None, channels.get(info.job_rank))
            Generator(parts, links).run()
        else:
            trainers = Trainers(
                terms,
                board,
                lambda inbox=inbox: [message for _, message in inbox.take()],  # type: ignore[misc]
                start,
                lambda version, attempt=attempt: decisions(folder, attempt, version),  # type: ignore[misc]
            )
            trainers.run()
            while len(trainers.outcome.validated.get(SAVED + 1, [])) < 4:
                time.sleep(0.01)
                trainers.read()
            start = StartPoint(SAVED, max(trainers.outcome.batches[SAVED - 1]) + 1, str(folder))
            found.append(trainers.outcome)
        for channel in channels.values():
            channel.close()
    if parts is not None:
        parts.tools.close()  # type: ignore[union-attr]
        parts.engine.shutdown()
    return found or None


def decisions(folder: Path, attempt: str, version: int) -> dict[str, Any]:
    saves = version == SAVED and attempt == "whole"
    return {"checkpoint": str(folder) if saves else "", "validates": version == SAVED + 1}


def engine_parts(config: Any, folder: Path, tp: int) -> Any:
    """An engine in its role's world, with its tools."""
    info, path = RankInfo.from_environ(), folder / "model"
    shape = read_model(path)
    tokenizer = Tokenizer.load(path, shape.vocab_size, config.data)
    leads, group = info.rank % tp == 0, engine_group(info.world_size, info.rank, tp)
    files = PromptFiles([config.data.train[0].model_copy(update={"path": folder / "train.jsonl"})], "data.train")
    prompts = PromptSet.load(files, config.data, tokenizer, tools=tool_schemas(config.rollout.tools))
    served = ServedModel(path, shape, "float32", 128, tokenizer.end_tokens)
    engine = VllmEngine(served, config.rollout, routed_experts=shape.experts is not None)
    return GeneratorParts(
        config,
        EnginePlace(info.rank // tp, info.world_size // tp, leads, group),
        engine,
        TokenSums() if leads else None,  # type: ignore[arg-type]
        ToolUse(config.rollout, tokenizer, leads=leads, group=group),
        prompts,
        PromptSet(prompts.prompts, 0, (range(2),), ("",)),
        needs_greedy=True,
    )


def make_inputs(folder: Path, family: str) -> None:
    make_task(folder)
    shape = {"vocab_size": len(make_tokenizer()), "num_hidden_layers": 1, **WIDE}
    for seed, name in enumerate(("model", "other")):
        make_model(folder / name, family, seed, **shape)
    make_tokenizer().save_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("family", "tp", "in_flight"),
    [
        ("qwen2", 1, "recompute"),
        pytest.param("qwen2", 2, "recompute", marks=pytest.mark.long),
        pytest.param("qwen3moe", 1, "recompute", marks=pytest.mark.long),
        pytest.param("qwen2", 1, "keep", marks=pytest.mark.long),
        pytest.param("qwen2", 1, "finish", marks=pytest.mark.long),
    ],
)
def test_a_run_that_resumes_equals_one_that_does_not_bit_for_bit(
    family: str, tp: int, in_flight: str, tmp_path: Path
) -> None:
    make_inputs(tmp_path, family)
    whole, resumed = run_ranks(attempts, 3, tmp_path, tp, in_flight, roles=(1, 2))[0]
    assert sorted(whole.written) == [(SAVED, engine) for engine in range(2 // tp)]
    assert set(whole.times.values()) == set(resumed.times.values()) == {1}
    assert resumed.batches == whole.batches[SAVED:]
    for number in (number for batch in resumed.batches for number in batch):
        assert plain(resumed.groups[number]) == plain(whole.groups[number])
    samples = [sample for group in whole.groups.values() for sample in group.group.samples]
    assert any(len(set(versions_of(sample))) > 1 for sample in samples) == (in_flight != "finish")
    assert any(group.counts.tool_calls for group in whole.groups.values()), "tools are called"
    assert all(group.greedy is not None for group in whole.groups.values())
    routed = [sample.routed_experts.shape[0] for sample in samples if sample.routed_experts is not None]
    assert routed == [len(sample.tokens) - 1 for sample in samples] * (family == "qwen3moe")
    assert len(whole.validated[SAVED + 1]) == 4


@pytest.mark.long
def test_a_run_in_which_responses_take_turns_resumes_bit_for_bit(tmp_path: Path) -> None:
    make_inputs(tmp_path, "qwen2")
    whole, resumed = run_ranks(attempts, 3, tmp_path, 1, "recompute", True, roles=(1, 2))[0]
    assert resumed.batches == whole.batches[SAVED:]
    for number in (number for batch in resumed.batches for number in batch):
        assert plain(resumed.groups[number]) == plain(whole.groups[number])
    for outcome in (whole, resumed):
        assert sum(activity.statistics["rollout/turns_ended"] for activity in outcome.activity) > 0
