"""``rlhpc replay``: repeats forward and backward of a skipped update, without the update."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.algo import find_algorithm
from rlhpc.algo.objective import with_coefficient
from rlhpc.api import LossFunction, LossSums, PackedBatch, TokenStats, TokenValues
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder, SkippedUpdate
from rlhpc.core.heartbeat import touch
from rlhpc.observe.report import write_replay
from rlhpc.parallel.agreement import facts_of
from rlhpc.parallel.transfer import gather_objects
from rlhpc.trainer.models import make_trained
from rlhpc.trainer.roles import Role
from rlhpc.trainer.skipped import load_batches, weights_digest
from rlhpc.trainer.update import critic_loss, policy_loss, sft_loss

Record = dict[str, Any]


def replay(config: RunConfig, context: RankContext) -> None:
    """Differentiates the batch in the folder above this one by ``config.model``, and writes the result. Collective over
    the same number of ranks and layout as the update."""
    update, info = SkippedUpdate(context.run.path.parent), context.info
    record = read_json(update.record)
    saved = _checkpoint(config, update)
    role = _model(config, context, record["model"], saved)
    digest, coord = weights_digest(role.model), role.coord
    touch("replay", record["step"])
    batches = load_batches(update.batches(coord["dp"], coord["pp"]))
    loss = _Watched(_loss_of(config, record))
    stats = role.model.differentiate(batches, loss, record["denominator"], record["temperature"])
    # Context- and tensor-parallel ranks see the same sequences, earlier pipeline stages none.
    mine = loss.sequences if coord["tp"] == coord["cp"] == 0 else None
    sequences = [sequence for part in gather_objects(mine) for sequence in part or ()]
    if info.rank:
        return
    bad = sorted((one for one in sequences if not one.finite), key=lambda one: one.sample)
    result = {
        "update": update.path.name,
        "weights": {
            "checkpoint": saved.name if saved else None,
            "files": str(config.model.weights or config.model.path),
            "same": digest == record["weights"],
        },
        "grad_norm": {"recorded": record["grad_norm"], "replayed": str(stats.grad_norm)},
        "loss": {"recorded": record["loss"], "replayed": str(stats.sums["loss"] / record["denominator"])},
        "versions": _changed(record["versions"], facts_of([])),
        "sequences": len(sequences),
        "not_finite": [_described(sequence, record) for sequence in bad],
    }
    write_json(context.run.replayed, result)
    write_replay(context.run, result)


def _checkpoint(config: RunConfig, update: SkippedUpdate) -> Path | None:
    """The run's checkpoint that holds the weights; None if they are the initial ones."""
    folder = config.model.weights.parent if config.model.weights else None
    run = RunFolder(update.path.parent.parent)
    return folder if folder is not None and folder.parent == run.checkpoints else None


def _model(config: RunConfig, context: RankContext, name: str, saved: Path | None) -> Role:
    role = make_trained(config, context.info, name)
    if name == "critic" and saved is not None and (saved / name).is_dir():
        role.model.load(saved / name)
    return role


def _loss_of(config: RunConfig, record: Record) -> LossFunction:
    """The loss of the update, with its KL coefficient."""
    if record["model"] == "critic":
        return functools.partial(critic_loss, clip=config.critic.value_clip)
    if record["phase"] == "sft":
        return sft_loss
    section = config.algorithm
    if record["kl_coefficient"] is not None:
        section = with_coefficient(section, record["kl_coefficient"])
    return functools.partial(policy_loss, algorithm=find_algorithm(section), section=section)


@dataclass(frozen=True)
class _Sequence:
    """One sequence: its sample id, number of trained tokens, part of the loss sum, and for each per-token value the
    number of tokens at which it is not finite. Tokens of weight 0 count: they spoil a sum too."""

    sample: int
    tokens: int
    loss: float
    not_finite: dict[str, int]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and not self.not_finite


@dataclass
class _Watched:
    """A loss that also evaluates each sequence alone."""

    loss: LossFunction
    sequences: list[_Sequence] = field(default_factory=list)

    def __call__(self, stats: Any, batch: PackedBatch) -> LossSums:
        ends = batch.cu_seqlens.tolist()
        with torch.no_grad():
            for place, sample in enumerate(batch.sample_ids):
                self.sequences.append(self._look(stats, batch, slice(ends[place], ends[place + 1]), sample))
        return self.loss(stats, batch)

    def _look(self, stats: TokenStats | TokenValues, batch: PackedBatch, own: slice, sample: int) -> _Sequence:
        alone = type(stats)(*(getattr(stats, part.name)[own] for part in fields(stats)))
        cut = _cut(batch, own, sample)
        values = {**{part.name: getattr(alone, part.name) for part in fields(alone)}, **cut.extra}
        counts = {name: int((~torch.isfinite(value)).sum()) for name, value in values.items()}
        loss = float(self.loss(alone, cut).total)  # type: ignore[arg-type]
        tokens = int((cut.loss_weight > 0).sum())
        return _Sequence(sample, tokens, loss, {name: n for name, n in counts.items() if n})


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


def _described(sequence: _Sequence, record: Record) -> Record:
    return {
        "sample": sequence.sample,
        "prompt_id": record["prompt_ids"][sequence.sample],
        "tokens": sequence.tokens,
        "loss": str(sequence.loss),
        "not_finite": sequence.not_finite,
    }


def _changed(recorded: Mapping[str, str], present: Mapping[str, str]) -> dict[str, list[str]]:
    """Packages whose version differs from that at the update, with both versions."""
    return {name: [old, present.get(name, "")] for name, old in recorded.items() if old != present.get(name)}
