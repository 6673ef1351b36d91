"""Optimizer updates. A skipped update is counted, its batch is written for `rlhpc replay`, and too many in a row end
the run.

A back end skips an update whose gradient norm is not finite, or above the limit that it gets. This file looks at
``TrainStats.applied`` alone.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlhpc.api import LossFunction, PackedBatch, RunState, TrainBackend, TrainStats
from rlhpc.config.schema import TrainSection
from rlhpc.core.context import RankContext
from rlhpc.core.errors import NonFiniteError
from rlhpc.core.files import write_json
from rlhpc.core.folder import SkippedUpdate
from rlhpc.parallel.agreement import facts_of
from rlhpc.parallel.compat import device
from rlhpc.parallel.transfer import gather_objects
from rlhpc.reshard.verify import checksum
from rlhpc.trainer.batches import Minibatch
from rlhpc.trainer.roles import Role
from rlhpc.trainer.spikes import largest_norm, with_norm

NEWEST = 8  # batches on disk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """One optimizer update: the ``number``-th of its model in its step, from 1.

    ``prompt_ids`` has the row of the prompt (in the warm-up, of the example) for each sample id of the step.
    """

    phase: Literal["sft", "rl"]
    step: int
    model: Literal["actor", "critic"]
    number: int
    minibatch: Minibatch
    temperature: float
    rate: float
    prompt_ids: Sequence[int]
    skip_above: float = math.inf  # a larger gradient norm is a spike

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.step:08d}-{self.model}-{self.number:03d}"

    @property
    def section(self) -> str:
        """Name of the optimizer that makes the update."""
        return self.model if self.phase == "rl" else "sft"

    def reason(self, norm: float) -> str:
        """Why it is skipped with this gradient norm."""
        limit = f", above {self.skip_above:.3g}" if math.isfinite(norm) else ""
        return f"its gradient norm is {norm:.3g}{limit}"


def make_update(
    context: RankContext, section: TrainSection, role: Role, state: RunState, update: Update, loss: LossFunction
) -> TrainStats:
    """Trains on the update's minibatch. Collective.

    Raises NonFiniteError, before anything else may use the weights, at the ``max_skipped_updates``-th skipped update in
    a row.
    """
    norms = state.grad_norms.get(update.section, [])
    update = replace(update, skip_above=largest_norm(norms, section.max_grad_norm_ratio))
    batches, denominator = update.minibatch.batches, update.minibatch.denominator
    stats = role.model.train(batches, loss, denominator, update.temperature, update.rate, update.skip_above)
    if section.max_grad_norm_ratio is not None:
        state.grad_norms[update.section] = with_norm(norms, stats.grad_norm)
    counter = f"{update.model}_skipped"
    in_a_row = 0 if stats.applied else getattr(state, counter) + 1
    setattr(state, counter, in_a_row)
    if in_a_row:
        _report(context, role, state, update, stats)
    if in_a_row >= section.max_skipped_updates:
        raise NonFiniteError(_end(context, section, update, stats.grad_norm, in_a_row))
    return stats


def _end(context: RankContext, section: TrainSection, update: Update, norm: float, in_a_row: int) -> str:
    """The error of a run that ends."""
    cause, remedy = "their gradients are not finite", "correct data, rewards or loss"
    if math.isfinite(norm):
        cause = f"the last one because {update.reason(norm)} (train.max_grad_norm_ratio)"
        remedy = f"raise that ratio, {remedy}"
    return (
        f"{update.phase} step {update.step}: {in_a_row} update(s) of the {update.model} in a row were skipped, {cause} "
        f"(train.max_skipped_updates: {section.max_skipped_updates}); the batches are in "
        f"{context.run.skipped_updates}, `rlhpc replay {context.run.path}` shows which sequences are at fault; "
        f"{remedy}, or lower {update.section}.optimizer.learning_rate, and resume the run"
    )


def _report(context: RankContext, role: Role, state: RunState, update: Update, stats: TrainStats) -> None:
    """Writes the batch and a warning. A batch that cannot be written does not end the run. Collective."""
    problem = _write(context, role, state, update, stats)
    if context.info.rank == 0:
        kept = f"could not be written ({problem})" if problem else f"is {context.run.skipped_updates / update.name}"
        _log.warning(
            "%s step %d, update %d of the %s: skipped, %s; its batch %s",
            update.phase,
            update.step,
            update.number,
            update.model,
            update.reason(stats.grad_norm),
            kept,
        )


def _write(context: RankContext, role: Role, state: RunState, update: Update, stats: TrainStats) -> str | None:
    """Writes the batches of all ranks into one folder; returns the problem, if this rank knows of one. Collective."""
    folder, rank, coord = context.run.skipped_updates, context.info.rank, role.coord
    record = _record(context, state, update, stats, weights_digest(role.model))
    if rank == 0:
        context.attempt.check_current()
    writing = SkippedUpdate(folder / f".writing-{context.attempt.path.name}-{update.model}")
    problem = _problem(lambda: begin_writing(writing.path)) if rank == 0 else None
    dist.barrier()
    if problem is None and coord["tp"] == coord["cp"] == 0:  # the others have the same batches
        problem = _problem(lambda: save_batches(writing.batches(coord["dp"], coord["pp"]), update.minibatch.batches))
    problems = [found for found in gather_objects(problem) if found is not None]
    if problems or rank:
        return problems[0] if problems else None
    return _problem(lambda: finish_writing(writing, record, folder / update.name))


def _record(context: RankContext, state: RunState, update: Update, stats: TrainStats, weights: str) -> dict[str, Any]:
    """Numbers that may not be finite are strings, because JSON has no such numbers."""
    denominator = update.minibatch.denominator
    return {
        "phase": update.phase,
        "step": update.step,
        "model": update.model,
        "update": update.number,
        "time": time.time(),
        "attempt": context.attempt.number,
        "world_size": context.info.world_size,
        "grad_norm": str(stats.grad_norm),
        "skip_above": str(update.skip_above),
        "loss": str(stats.sums["loss"] / denominator),
        "denominator": denominator,
        "temperature": update.temperature,
        "learning_rate": update.rate,
        "kl_coefficient": state.kl_coefficient,
        "weights": weights,
        "prompt_ids": list(update.prompt_ids),
        "versions": facts_of([]),
    }


def weights_digest(model: TrainBackend) -> str:
    """Digest of all weights' bits, of the same layout. Collective."""
    total = torch.zeros((), dtype=torch.int64, device=device())
    for shard in model.shards():
        total += checksum(model.view(shard), shard).sum()
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def save_batches(file: Path, batches: Sequence[PackedBatch]) -> None:
    """Writes every field of a rank's packed batches as tensors and plain values, readable without our classes."""
    content = [{field.name: getattr(batch, field.name) for field in fields(batch)} for batch in batches]
    with open(file, "wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


def load_batches(file: Path) -> list[PackedBatch]:
    """The batches that ``save_batches`` wrote."""
    return [PackedBatch(**content) for content in torch.load(file, weights_only=True)]


def begin_writing(writing: Path) -> None:
    writing.parent.mkdir(exist_ok=True)
    attempt, _, _ = writing.name.rpartition("-")
    for leftover in writing.parent.glob(".writing-*"):
        if leftover == writing or not leftover.name.startswith(attempt):  # another model's may be in progress
            shutil.rmtree(leftover)
    writing.mkdir()


def finish_writing(writing: SkippedUpdate, record: dict[str, Any], final: Path) -> None:
    """Renames the complete folder; deletes the oldest beyond ``NEWEST``."""
    write_json(writing.record, record)
    if final.exists():  # a resumed run repeats the step
        shutil.rmtree(final)
    os.replace(writing.path, final)
    named = [path for path in final.parent.iterdir() if not path.name.startswith(".")]
    for old in sorted(named, key=lambda path: path.stat().st_mtime)[:-NEWEST]:
        shutil.rmtree(old)


def _problem(act: Callable[[], None]) -> str | None:
    try:
        act()
    except (OSError, RuntimeError) as error:  # PyTorch raises RuntimeError on a full disk
        return str(error)
    return None
