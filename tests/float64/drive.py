"""Runs the steps of a seed on this rank: the real step, sampler, updater and algorithms, with a table as the model.

``run_seeds`` is called on two ranks (``tests.helpers.distributed``).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.algo import find_algorithm
from rlhpc.api import Prompt, RunState
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import Prompts, PromptSet
from rlhpc.models import read_model
from rlhpc.rewards.reward_workers import start_reward_workers
from rlhpc.sharding.layout import make_layout
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser
from rlhpc.trainer.roles import EngineRank, Models, Role
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.run import Run
from rlhpc.trainer.sampling import Sampler
from rlhpc.trainer.step import rl_step, take_step
from rlhpc.trainer.update import Updater
from tests.float64.script import MOST_TOKENS, PROMPTS, VOCABULARY, config_of, decode, prompt_of, table_of

Tables = dict[str, np.ndarray]
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@dataclass
class StepRecord:
    """What a step did. ``trained``: (prompt, first token of the response) of each sample, in order; ``updates``: those
    of each model, see ``TableModel``; ``weights``: each model's after the step; ``version``: of the step's policy."""

    metrics: dict[str, float]
    trained: list[tuple[int, int]]
    updates: dict[str, list[dict[str, Any]]]
    weights: dict[str, Tables]
    version: int


@dataclass
class RunRecord:
    seed: int
    steps: list[StepRecord] = field(default_factory=list)
    emitted: dict[tuple[int, int, int], tuple[float, int]] = field(default_factory=dict)  # see ``ScriptedEngine``


def run_seeds(seeds: Sequence[int]) -> list[RunRecord]:
    """The runs of the seeds, one after the other; reward workers are started once. Collective."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate(config_of(seeds[0]))
    workers = start_reward_workers(config.reward_functions, config.reward_workers, decode, MOST_TOKENS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [_run_seed(seed, workers, Path(folder)) for seed in seeds]
    finally:
        workers.close()


def _run_seed(seed: int, workers: Any, folder: Path) -> RunRecord:
    config, record = RunConfig.model_validate(config_of(seed)), RunRecord(seed)
    state = RunState(actor_steps=0, critic_steps=0)
    run = _make_run(config, state, workers, folder)
    trained: list[Any] = []

    def step(run: Any, state: Any) -> Any:
        metrics, trained[:] = rl_step(run, state)
        return metrics, trained

    for _ in range(config.train.steps):
        version = state.policy_version
        before = {name: len(role.model.updates) for name, role in run.models.trained.items()}
        metrics = take_step(step, run, state)
        record.steps.append(
            StepRecord(
                metrics,
                [(sample.prompt_id, int(sample.tokens[sample.prompt_len])) for sample in trained],
                {name: role.model.updates[before[name] :] for name, role in run.models.trained.items()},
                {name: role.model.weights() for name, role in run.models.trained.items()},
                version,
            )
        )
    record.emitted = run.rl.sampler.rollout.engine.emitted
    return record


def _make_run(config: Any, state: Any, workers: Any, folder: Path) -> Any:
    """As ``rlhpc.trainer.build`` makes it, with table models and a scripted engine."""
    from rlhpc.trainer.colocated import Colocated
    from tests.float64.model import ScriptedEngine, ScriptedTools, Weights

    info, algorithm, batching = RankInfo.from_environ(), find_algorithm(config.algorithm), Batching.of(config)
    models = _models(config, info, algorithm, folder)
    attempt = RunFolder(folder).attempt(1)
    context = RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))
    carryover = Carryover.of(config.train)
    updater = Updater(config, context, models, batching, algorithm)
    weights = Weights(models.actor.model)
    engine = ScriptedEngine(config, state, weights)
    place = EngineRank(info.rank, info.world_size, 1)
    rollout = Rollout(engine, place, config.rollout, config.seed, workers, ScriptedTools(config.seed))
    least = config.train.minibatches * max(role.layout.dp for role in models.trained.values())
    chooser = Chooser(config, _prompts(config.seed), carryover, None, least, algorithm.needs_greedy)
    colocated = Colocated(weights, Sampler(rollout, chooser))
    return Run(config, context, models, algorithm, batching, updater, carryover, colocated)


def _models(config: Any, info: Any, algorithm: Any, folder: Path) -> Any:
    """Actor, reference and critic as the algorithm needs them, with the same bounds on tokens as the real ones."""
    from tests.float64.model import TableModel

    train, shape = config.train, _shape(folder)
    forward = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch

    def role(name: str, section: Any, optimizer: Any, forward: int) -> Any:
        of_values = name == "critic"
        tables = table_of(config.seed, name, 1 if of_values else VOCABULARY)
        layout = make_layout(section.parallel, info.world_size)
        model = TableModel(shape.with_value_head if of_values else shape, layout, tables, optimizer)
        return Role(model, info.rank, train.tokens_per_microbatch, forward)

    models = Models(role("actor", config.actor, config.actor.optimizer, forward))
    if algorithm.needs_reference(config.algorithm):
        models.reference = role("reference", config.actor, None, forward)
    if algorithm.needs_critic:
        models.critic = role("critic", config.critic, config.critic.optimizer, train.tokens_per_microbatch)
    return models


def _shape(folder: Path) -> Any:
    """Of a small model, by which batches are balanced."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return read_model(folder)


def _prompts(seed: int) -> Any:
    tokens = [prompt_of(seed, number) for number in range(PROMPTS)]
    ends = np.concatenate([[0], np.cumsum([len(each) for each in tokens])])
    rows = [Prompt(number, (), "script", None, {"seed": seed, "prompt_id": number}) for number in range(PROMPTS)]
    prompts = Prompts(rows, np.concatenate([np.array(each) for each in tokens]), ends)
    return PromptSet(prompts, 0, (range(PROMPTS),), shuffle=False)
