"""Optimizer updates, and what happens where one is skipped: it is counted, its batch is written for `rlhpc replay`, and
too many in a row end the run.

A back end skips an update whose gradient norm is not finite. Here only ``TrainStats.applied`` counts, whatever the
reason was.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlhpc.api import LossFunction, PackedBatch, RunState, TrainStats
from rlhpc.core.errors import NonFiniteError
from rlhpc.core.files import write_json
from rlhpc.core.folder import SkippedUpdate
from rlhpc.parallel.agreement import facts_of
from rlhpc.parallel.compat import device
from rlhpc.parallel.transfer import gather_objects
from rlhpc.reshard.checksum import checksum
from rlhpc.sharding.shards import megatron_shards
from rlhpc.trainer.batches import Minibatch
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import Role

KEPT = 8  # batches on disk, the newest ones

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """One optimizer update: the ``number``-th of its model in its step, from 1.

    ``prompt_ids`` has for each sample of the step, by its id, the prompt's row; in the warm-up the example's.
    """

    phase: Literal["sft", "rl"]
    step: int
    model: Literal["actor", "critic"]
    number: int
    minibatch: Minibatch
    temperature: float
    rate: float
    prompt_ids: Sequence[int]

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.step:08d}-{self.model}-{self.number:03d}"

    @property
    def rate_key(self) -> str:
        section = "critic" if self.model == "critic" else "train" if self.phase == "rl" else "sft"
        return f"{section}.optimizer.learning_rate"


def make_update(run: Run, role: Role, state: RunState, update: Update, loss: LossFunction) -> TrainStats:
    """Trains on the update's minibatch. Collective.

    Raises NonFiniteError, before anything else may use the weights, where it is one skipped update in a row too many.
    """
    batches, denominator = update.minibatch.batches, update.minibatch.denominator
    stats = role.model.train(batches, loss, denominator, update.temperature, update.rate)
    counter = f"{update.model}_skipped"
    in_a_row = 0 if stats.applied else getattr(state, counter) + 1
    setattr(state, counter, in_a_row)
    if in_a_row:
        _report(run, role, state, update, stats)
    most = run.config.train.max_skipped_updates
    if in_a_row >= most:
        raise NonFiniteError(
            f"{update.phase} step {update.step}: {in_a_row} update(s) of the {update.model} in a row were skipped, "
            f"their gradients are not finite (train.max_skipped_updates: {most}); the batches are in "
            f"{run.folder.skipped_updates}, `rlhpc replay {run.folder.path}` shows which sequences are at fault; "
            f"correct data, rewards or loss, or lower {update.rate_key}, and resume the run"
        )
    return stats


def _report(run: Run, role: Role, state: RunState, update: Update, stats: TrainStats) -> None:
    """Writes the batch and a warning. A batch that cannot be written is no reason to end the run. Collective."""
    problem = _write(run, role, state, update, stats)
    if run.info.rank == 0:
        kept = f"could not be written ({problem})" if problem else f"is {run.folder.skipped_updates / update.name}"
        _log.warning(
            "%s step %d, update %d of the %s: skipped, its gradient norm is %s; its batch %s",
            update.phase,
            update.step,
            update.number,
            update.model,
            stats.grad_norm,
            kept,
        )


def _write(run: Run, role: Role, state: RunState, update: Update, stats: TrainStats) -> str | None:
    """Writes the batches of all ranks into one folder; what went wrong, as far as this rank knows. Collective."""
    folder, rank, coord = run.folder.skipped_updates, run.info.rank, role.layout.coord(run.info.rank)
    record = _record(run, state, update, stats, weights_digest(role, rank))
    if rank == 0:
        run.context.attempt.check_current()
    writing = SkippedUpdate(folder / f".writing-{run.context.attempt.path.name}")
    problem = _problem(lambda: _begin(writing.path)) if rank == 0 else None
    dist.barrier()
    if problem is None and coord["tp"] == coord["cp"] == 0:  # the others have the same batches
        problem = _problem(lambda: save_batches(writing.batches(coord["dp"], coord["pp"]), update.minibatch.batches))
    problems = [found for found in gather_objects(problem) if found is not None]
    if problems or rank:
        return problems[0] if problems else None
    return _problem(lambda: _finish(writing, record, folder / update.name))


def _record(run: Run, state: RunState, update: Update, stats: TrainStats, weights: str) -> dict[str, Any]:
    """Numbers that may not be finite are texts: JSON has no others."""
    denominator = update.minibatch.denominator
    return {
        "phase": update.phase,
        "step": update.step,
        "model": update.model,
        "update": update.number,
        "time": time.time(),
        "attempt": run.context.attempt.number,
        "world_size": run.info.world_size,
        "grad_norm": str(stats.grad_norm),
        "loss": str(stats.sums["loss"] / denominator),
        "denominator": denominator,
        "temperature": update.temperature,
        "learning_rate": update.rate,
        "kl_coefficient": state.kl_coefficient,
        "weights": weights,
        "prompt_ids": list(update.prompt_ids),
        "versions": facts_of([]),
    }


def weights_digest(role: Role, rank: int) -> str:
    """Of all weights of a model in its layout, bit by bit. Collective."""
    total = torch.zeros((), dtype=torch.int64, device=device())
    for shard in megatron_shards(role.model.weights.shape, role.layout, rank):
        total += checksum(role.model.view(shard), shard).sum()
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def save_batches(file: Path, batches: Sequence[PackedBatch]) -> None:
    """Writes every field of a rank's packed batches, as tensors and plain values that need no class to be read."""
    content = [{field.name: getattr(batch, field.name) for field in fields(batch)} for batch in batches]
    with open(file, "wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


def load_batches(file: Path) -> list[PackedBatch]:
    """The batches that ``save_batches`` wrote."""
    return [PackedBatch(**content) for content in torch.load(file, weights_only=True)]


def _begin(writing: Path) -> None:
    writing.parent.mkdir(exist_ok=True)
    for leftover in writing.parent.glob(".writing-*"):
        shutil.rmtree(leftover)
    writing.mkdir()


def _finish(writing: SkippedUpdate, record: dict[str, Any], final: Path) -> None:
    """Gives the whole folder its name; the oldest ones beyond ``KEPT`` go."""
    write_json(writing.record, record)
    if final.exists():  # a resumed run takes the same step again
        shutil.rmtree(final)
    os.replace(writing.path, final)
    named = [path for path in final.parent.iterdir() if not path.name.startswith(".")]
    for old in sorted(named, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)


def _problem(act: Callable[[], None]) -> str | None:
    try:
        act()
    except (OSError, RuntimeError) as error:  # PyTorch makes a RuntimeError of a disk that is full
        return str(error)
    return None
