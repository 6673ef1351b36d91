"""Optimizer updates. A skipped update is counted, repeated once to find the samples at fault, and its batch is written;
too many in a row end the run.

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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import LossFunction, LossSums, PackedBatch, RunState, TokenStats, TokenValues, TrainStats
from rlhpc.config.schema import TrainSection
from rlhpc.core.context import RankContext
from rlhpc.core.errors import NonFiniteError
from rlhpc.core.files import write_json
from rlhpc.core.folder import SkippedUpdate
from rlhpc.parallel.transfer import gather_objects
from rlhpc.trainer.batches import Minibatch
from rlhpc.trainer.roles import Role
from rlhpc.trainer.spikes import largest_norm, with_norm

NEWEST = 8  # batches on disk
_NAMED = 3  # samples in a warning; update.json has all

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
        _report(context, role, state, update, stats, loss)
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
        f"{context.run.skipped_updates}, with the samples at fault in update.json; {remedy}, or lower "
        f"{update.section}.optimizer.learning_rate, and resume the run"
    )


@dataclass(frozen=True)
class Suspect:
    """One sequence of a skipped update: its ``sample`` of the step, number of trained tokens, part of the loss sum, and
    for each per-token value the number of tokens at which it is not finite. Tokens of weight 0 count: they spoil a sum
    too."""

    sample: int
    prompt_id: int
    tokens: int
    loss: float
    not_finite: dict[str, int]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and not self.not_finite

    def __str__(self) -> str:
        parts = [f"{name} at {count} token(s)" for name, count in self.not_finite.items()]
        return f"sample {self.sample} of prompt {self.prompt_id} ({', '.join(parts) or f'loss {self.loss}'})"


@dataclass
class _Watched:
    """A loss that also evaluates each sequence alone."""

    loss: LossFunction
    prompt_ids: Sequence[int]
    found: list[Suspect] = field(default_factory=list)

    def __call__(self, stats: Any, batch: PackedBatch) -> LossSums:
        ends = batch.cu_seqlens.tolist()
        with torch.no_grad():
            for place, sample in enumerate(batch.sample_ids):
                self.found.append(self._look(stats, batch, slice(ends[place], ends[place + 1]), sample))
        return self.loss(stats, batch)

    def _look(self, stats: TokenStats | TokenValues, batch: PackedBatch, own: slice, sample: int) -> Suspect:
        alone = type(stats)(*(getattr(stats, part.name)[own] for part in fields(stats)))
        cut = _cut(batch, own, sample)
        values = {**{part.name: getattr(alone, part.name) for part in fields(alone)}, **cut.extra}
        counts = {name: int((~torch.isfinite(value)).sum()) for name, value in values.items()}
        loss = float(self.loss(alone, cut).total)  # type: ignore[arg-type]
        tokens = int((cut.loss_weight > 0).sum())
        wrong = {name: count for name, count in counts.items() if count}
        return Suspect(sample, self.prompt_ids[sample], tokens, loss, wrong)


def _cut(batch: PackedBatch, own: slice, sample: int) -> PackedBatch:
    """A batch of a single sequence of a batch."""
    parts: dict[str, Tensor] = {
        part.name: getattr(batch, part.name)[own]
        for part in fields(batch)
        if isinstance(getattr(batch, part.name), Tensor) and part.name != "cu_seqlens"
    }
    cu_seqlens = batch.cu_seqlens.new_tensor([0, own.stop - own.start])
    extra = {name: value[own] for name, value in batch.extra.items()}
    return replace(batch, **parts, cu_seqlens=cu_seqlens, sample_ids=(sample,), extra=extra)


def _examine(role: Role, update: Update, loss: LossFunction) -> tuple[list[Suspect], float]:
    """Repeats forward and backward pass of the update: its sequences that are not finite, and the gradient norm of the
    repetition. Collective."""
    watched = _Watched(loss, update.prompt_ids)
    batches, denominator = update.minibatch.batches, update.minibatch.denominator
    stats = role.model.differentiate(batches, watched, denominator, update.temperature)
    # Context- and tensor-parallel ranks see the same sequences, earlier pipeline stages none.
    mine = watched.found if role.coord["tp"] == role.coord["cp"] == 0 else []
    found = [suspect for part in gather_objects(mine) for suspect in part if not suspect.finite]
    return sorted(found, key=lambda suspect: suspect.sample), stats.grad_norm


def _cause(suspects: Sequence[Suspect], norm: float) -> str:
    """Cause of a gradient that was not finite, by its repetition."""
    if suspects:
        more = f" and {len(suspects) - _NAMED} more" if len(suspects) > _NAMED else ""
        return f"not finite: {', '.join(map(str, suspects[:_NAMED]))}{more}"
    if math.isfinite(norm):
        return f"repeated, it is {norm:.3g}: a device may be faulty"
    return "each of its samples is finite, the backward pass is not"


def _report(
    context: RankContext, role: Role, state: RunState, update: Update, stats: TrainStats, loss: LossFunction
) -> None:
    """Writes the batch and a warning. A batch that cannot be written does not end the run. Collective."""
    suspects: list[Suspect] = []
    reason = update.reason(stats.grad_norm)
    if not math.isfinite(stats.grad_norm):
        suspects, norm = _examine(role, update, loss)
        reason = f"{reason}, {_cause(suspects, norm)}"
    problem = _write(context, role, _record(context, state, update, stats, suspects), update)
    if context.info.rank == 0:
        kept = f"could not be written ({problem})" if problem else f"is {context.run.skipped_updates / update.name}"
        place = (update.phase, update.step, update.number, update.model)
        _log.warning("%s step %d, update %d of the %s: skipped, %s; its batch %s", *place, reason, kept)


def _write(context: RankContext, role: Role, record: dict[str, Any], update: Update) -> str | None:
    """Writes the batches of all ranks into one folder; returns the problem, if this rank knows of one. Collective."""
    folder, rank, coord = context.run.skipped_updates, context.info.rank, role.coord
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


def _record(
    context: RankContext, state: RunState, update: Update, stats: TrainStats, suspects: Sequence[Suspect]
) -> dict[str, Any]:
    """Numbers that may not be finite are strings, because JSON has no such numbers."""
    denominator = update.minibatch.denominator
    return {
        "phase": update.phase,
        "step": update.step,
        "model": update.model,
        "update": update.number,
        "time": time.time(),
        "attempt": context.attempt.number,
        "grad_norm": str(stats.grad_norm),
        "skip_above": str(update.skip_above),
        "loss": str(stats.sums["loss"] / denominator),
        "denominator": denominator,
        "temperature": update.temperature,
        "learning_rate": update.rate,
        "kl_coefficient": state.kl_coefficient,
        "prompt_ids": list(update.prompt_ids),
        "not_finite": [{**asdict(suspect), "loss": str(suspect.loss)} for suspect in suspects],
    }


def save_batches(file: Path, batches: Sequence[PackedBatch]) -> None:
    """Writes every field of a rank's packed batches as tensors and plain values, readable without our classes."""
    content = [{field.name: getattr(batch, field.name) for field in fields(batch)} for batch in batches]
    with open(file, "wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


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
