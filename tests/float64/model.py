"""What replaces Megatron and vLLM at their interfaces: a table of logits with its optimizer, and an engine and tools
that follow a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.api import Completion, LossFunction, PackedBatch, Request, RunState, TokenStats, TokenValues, TrainStats
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import OptimizerSection
from rlhpc.models import ModelShape
from rlhpc.rollout.collect import Reply
from rlhpc.rollout.requests import Task, request_seed
from rlhpc.sharding.layout import ParallelLayout
from tests.float64.script import FIRST, GREEDY, POSITIONS, STEPS, Turn, engine_noise, prompt_id_of, prompt_of, turns_of

Tables = dict[str, np.ndarray]


class TableModel:
    """``rlhpc.api.TrainBackend``: the logits after a token are a row by the token plus a row by its position.

    All in float64, differentiated by autograd and updated by PyTorch's AdamW.
    """

    def __init__(
        self, shape: ModelShape, layout: ParallelLayout, tables: Tables, section: OptimizerSection | None
    ) -> None:
        self.shape, self.layout, self._section = shape, layout, section
        self.meets_in_microbatches = layout.ep > 1
        self.tables = {name: torch.tensor(table).requires_grad_() for name, table in tables.items()}
        self.updates: list[dict[str, Any]] = []  # of each: sample ids of this rank's microbatches, gradient, statistics
        if section is not None:
            self._optimizer = torch.optim.AdamW(
                list(self.tables.values()),
                betas=(section.beta1, section.beta2),
                eps=section.epsilon,
                weight_decay=section.weight_decay,
                foreach=False,
            )

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Nothing to release."""

    def shards(self) -> tuple[()]:
        """None: a skipped update's record has a digest of them."""
        return ()

    def weights(self) -> Tables:
        """A copy."""
        return {name: table.detach().numpy().copy() for name, table in self.tables.items()}

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """See ``TrainBackend``."""
        with torch.no_grad():
            return [self._stats(batch, temperature) for batch in batches]

    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """See ``TrainBackend``."""
        with torch.no_grad():
            return [TokenValues(self._rows(batch)[:, 0]) for batch in batches]

    def train(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        denominator: float,
        temperature: float,
        rate: float,
        skip_above: float = math.inf,
    ) -> TrainStats:
        """See ``TrainBackend``."""
        self._optimizer.zero_grad()
        sums: dict[str, float] = {}
        for batch in batches:
            value_head = self.shape.head == "value"
            stats = TokenValues(self._rows(batch)[:, 0]) if value_head else self._stats(batch, temperature)
            found = loss(stats, batch)
            if found.total.requires_grad:  # a blank batch has no token with a loss
                (found.total / denominator).backward()
            for name, value in found.metrics.items():
                known = sums.get(name, value.item())
                sums[name] = max(known, value.item()) if name.startswith("max/") else sums.get(name, 0.0) + value.item()
        for table in self.tables.values():
            table.grad = torch.zeros_like(table) if table.grad is None else table.grad
        if self.layout.dp > 1:
            sums = self._over_ranks(sums)
        gradient = {name: table.grad.numpy().copy() for name, table in self.tables.items()}
        assert self._section is not None
        norm = float(torch.nn.utils.clip_grad_norm_(self.tables.values(), self._section.max_grad_norm))
        self.updates.append({"ids": [list(batch.sample_ids) for batch in batches], "gradient": gradient})
        if norm > skip_above:
            return TrainStats(norm, sums, applied=False)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return TrainStats(norm, sums)

    def _over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Adds gradients and sums of the data-parallel ranks, which are all ranks."""
        for table in self.tables.values():
            dist.all_reduce(table.grad)
        reduced = dict(sums)
        for most, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            names = sorted(name for name in sums if name.startswith("max/") == most)
            values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
            dist.all_reduce(values, op=operation)
            reduced |= dict(zip(names, values.tolist(), strict=True))
        return reduced

    def _rows(self, batch: PackedBatch) -> torch.Tensor:
        return self.tables["context"][batch.tokens] + self.tables["position"][batch.positions % POSITIONS]

    def _stats(self, batch: PackedBatch, temperature: float) -> TokenStats:
        """Of the tokens trained on; 0 elsewhere, as from Megatron's back end."""
        log_probs = (self._rows(batch) / temperature).log_softmax(-1)
        trained = batch.loss_weight > 0
        picked = log_probs.gather(-1, batch.targets[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return TokenStats(torch.where(trained, picked, 0.0), torch.where(trained, entropy, 0.0))


class Weights:
    """The engine's copy of the actor's weights, as ``rlhpc.reshard.manager.ReshardManager`` keeps it."""

    def __init__(self, actor: TableModel) -> None:
        self._actor = actor
        self.sync()

    def sync(self) -> None:
        """Copies the weights."""
        self.tables = self._actor.weights()

    def sleep(self) -> None:
        """Nothing to release."""


def line_of(seed: int, prompt_id: int, place: int) -> list[tuple[int, int]]:
    """(token, turn) of a response without a limit of tokens; tools' tokens have turn -1. A tool's reply that begins
    with the end of the turn, which the policy sampled itself, gives it only once."""
    line: list[tuple[int, int]] = []
    for number, turn in enumerate(turns_of(seed, prompt_id, place)):
        line += [(token, number) for token in turn.sampled]
        reply = turn.reply[1:] if turn.reply[:1] == turn.sampled[-1:] else turn.reply
        line += [(token, -1) for token in reply]
    return line


@dataclass
class _Running:
    line: list[tuple[int, int]]
    key: tuple[int, int]  # prompt, place in the group
    start: int  # tokens of the response before this request
    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class ScriptedEngine:
    """``rlhpc.api.RolloutEngine``: generates what the script says, a token a step. The log-probs are those of the
    synced weights, plus the script's noise, in float32.

    ``emitted``: for (prompt, place in the group, place of the token) its log-prob and the policy version that sampled
    it.
    """

    def __init__(self, config: RunConfig, state: RunState, weights: Weights) -> None:
        self._seed, self._samples = config.seed, config.rollout.samples_per_prompt
        self._state, self._weights = state, weights
        self._running: dict[int, _Running] = {}
        self.emitted: dict[tuple[int, int, int], tuple[float, int]] = {}

    @property
    def unfinished(self) -> int:
        return len(self._running)

    def statistics(self) -> dict[str, float]:
        """See ``RolloutEngine``."""
        return {}

    def submit(self, key: int, request: Request) -> None:
        """See ``RolloutEngine``."""
        prompt_id = prompt_id_of(request.prompt)
        roots = ((self._seed, step, prompt_id, place) for place in range(self._samples) for step in range(STEPS))
        place = next(root[3] for root in roots if request_seed(root) == request.seed) if request.temperature else GREEDY
        start = len(request.prompt) - len(prompt_of(self._seed, prompt_id))
        line = line_of(self._seed, prompt_id, place)
        self._running[key] = _Running(line, (prompt_id, place), start, request)

    def step(self) -> list[tuple[int, Completion]]:
        """See ``RolloutEngine``."""
        finished = []
        for key, running in list(self._running.items()):
            self._sample(running)
            at, made = running.start + len(running.tokens), len(running.tokens)
            ended = at == len(running.line) or running.line[at][1] != running.line[at - 1][1]
            if ended or made == running.request.max_tokens:
                del self._running[key]
                finished.append((key, _completion(running, truncated=not ended)))
        return finished

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        """See ``RolloutEngine``."""
        return {key: _completion(self._running.pop(key), truncated=True) for key in keys}

    def _sample(self, running: _Running) -> None:
        before = (*running.request.prompt, *running.tokens)
        token, _ = running.line[running.start + len(running.tokens)]
        position = len(before) - 1
        tables = self._weights.tables
        row = tables["context"][before[-1]] + tables["position"][position % POSITIONS]
        row = row / (running.request.temperature or 1.0)
        exact = float(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max())
        place = running.start + len(running.tokens)
        prompt_id, number = running.key
        log_prob = float(np.float32(exact + engine_noise(self._seed, prompt_id, number, place)))
        self.emitted[(*running.key, place)] = (log_prob, self._state.policy_version)
        running.tokens.append(token)
        running.log_probs.append(log_prob)


def _completion(running: _Running, truncated: bool) -> Completion:
    return Completion(
        np.array(running.tokens, dtype=np.int32), np.array(running.log_probs, dtype=np.float32), truncated
    )


class ScriptedTools:
    """``rlhpc.rollout.collect.Dialogue``: replies as the script says."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._replies: dict[int, Reply] = {}

    def begin(self, key: int, task: Task) -> bool:
        """See ``Dialogue``."""
        reply = self._last_turn(task).reply
        if reply:
            self._replies[key] = Reply(reply, calls=1)
        return bool(reply)

    def unanswered(self, task: Task) -> bool:
        """See ``Dialogue``."""
        return self._last_turn(task).cut

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        """See ``Dialogue``."""
        found, self._replies = self._replies, {}
        return found

    def ready(self) -> dict[int, Reply]:
        """See ``Dialogue``."""
        return self.answers(all_of_them=True)

    def end(self, task: Task) -> None:
        """Nothing to free."""

    def _last_turn(self, task: Task) -> Turn:
        """By the response's first token, which is its place in the group, and its length."""
        prompt_id, draft = task.prompt.prompt_id, task.draft
        place = int(draft.tokens[draft.prompt_len]) - FIRST
        turn = line_of(self._seed, prompt_id, place)[draft.response_len - 1][1]
        return turns_of(self._seed, prompt_id, place)[turn]
