"""Several ranks: each axis of the trainer compared with one rank, and weight sync between layouts.

With several GPUs the ranks communicate through NCCL. On one GPU they share it and use gloo, as on a CPU: that checks
the numbers, not the speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import rig
from bench.acceptance.process import BOTH, TRAINER, WorkerCall, run_each
from bench.acceptance.results import IS_TRUE, Context, Figure, Goal, Skipped
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import OptimizerSection, ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.launch.machine import gpu_count
from rlhpc.sharding.layout import make_layout

_UPDATES = 2
# The large epsilon keeps first updates from following the signs of gradients that are only rounding errors.
_OPTIMIZER = OptimizerSection(learning_rate=rig.LEARNING_RATE, epsilon=1e-5)
_SHARED_VOCABULARY = 16384  # of the MoE model, of which a shared GPU holds one per rank


@dataclass(frozen=True)
class Axis:
    """A layout of the trainer. ``sends``: uses send and receive, which gloo refuses for device tensors."""

    name: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    sends: bool = False


_DENSE = (
    Axis("tp", {"tp": 2}),
    Axis("tp without sequence parallelism", {"tp": 2, "sequence_parallel": False}),
    Axis("cp by all-gather", {"cp": 2}),
    Axis("cp by Ulysses", {"cp": 2, "cp_method": "ulysses"}),
    Axis("dp"),
    Axis("pp", {"pp": 2}, sends=True),
    Axis("vpp", {"pp": 2, "vpp": 2}, sends=True),
    Axis("tp x pp", {"tp": 2, "pp": 2}, ranks=4, sends=True),
    Axis("tp x cp", {"tp": 2, "cp": 2}, ranks=4),
)
_EXPERTS = (
    Axis("ep by all-to-all", {"ep": 2}),
    Axis("ep by all-gather", {"ep": 2, "expert_dispatch": "allgather"}),
    Axis("etp", {"tp": 2, "etp": 2}),
    Axis("tp x ep", {"tp": 2, "ep": 2}, ranks=4),
)
AXES = {"dense": _DENSE, "moe": _EXPERTS}
_SYNCED = {"dense": ("tp", "cp by all-gather", "dp", "pp", "tp x pp"), "moe": ("ep by all-to-all", "etp", "tp x ep")}


@dataclass(frozen=True)
class RankSetup:
    """Ranks that this machine can run, and the backend of their collectives."""

    ranks: int
    backend: str  # nccl; gloo, on CPUs; "gloo, shared GPU"

    @classmethod
    def of(cls, context: Context) -> RankSetup:
        """Setup of this machine, at most four ranks."""
        if not context.on_gpu:
            return cls(2, "gloo")
        gpus = gpu_count()
        return cls(4 if gpus >= 4 else 2, "nccl" if gpus > 1 else "gloo, shared GPU")

    @property
    def shares_gpu(self) -> bool:
        return self.backend == "gloo, shared GPU"

    def refusal(self, axis: Axis) -> str:
        """Reason that an axis cannot run here; empty if it can."""
        if axis.ranks > self.ranks:
            return f"needs {axis.ranks} GPUs"
        return "gloo cannot send device tensors" if axis.sends and self.shares_gpu else ""

    def by_ranks(self, axes: Sequence[Axis]) -> list[list[Axis]]:
        """The axes that can run here, grouped by their number of ranks."""
        able = [axis for axis in axes if not self.refusal(axis)]
        return [[axis for axis in able if axis.ranks == ranks] for ranks in sorted({axis.ranks for axis in able})]


def run(context: Context) -> None:
    """Compare every axis with one rank, then sync weights from each layout to engines."""
    setup = RankSetup.of(context)
    context.report(Figure("ranks", setup.ranks, note=setup.backend))
    for kind, axes in AXES.items():
        for axis in axes:
            if reason := setup.refusal(axis):
                context.report(Skipped(f"{kind}, {axis.name}", reason))
        _compare_axes(context, setup, kind)
    if setup.shares_gpu:
        reason = "gloo's coalesced all-gather reads device tensors as CPU memory"
        context.report(Skipped("updates: the distributed optimizer's all-gather", reason))
        context.report(Skipped("weight sync to engines of tp 2", "NCCL supports one rank per GPU"))
    run_each(context, _sync_calls(setup))


def _compare_axes(context: Context, setup: RankSetup, kind: str) -> None:
    """Compute the numbers of one rank and of every axis, and report their differences."""
    groups, calls = [[Axis("one rank", ranks=1)], *setup.by_ranks(AXES[kind])], []
    for axes in groups:
        ranks, shared = axes[0].ranks, setup.shares_gpu
        arguments = {"kind": kind, "axes": [dict(axis.parallel) for axis in axes], "share_gpu": shared and ranks > 1}
        arguments["updates"] = 0 if shared else _UPDATES
        name = f"{kind}, {ranks} ranks"
        calls.append(WorkerCall(name, f"{__name__}:train_axes", arguments, ranks, TRAINER, share_gpu=shared))
    alone, *several = run_each(context, calls)
    if alone is None:
        return
    ((expected,),) = alone
    for axes, values in zip(groups[1:], several, strict=True):
        for axis, numbers in zip(axes, zip(*values, strict=True), strict=True) if values is not None else ():
            report_axis(context, kind, axis.name, expected, numbers)


def report_axis(
    context: Context, kind: str, axis: str, expected: dict[str, Any], ranks: Sequence[dict[str, Any]]
) -> None:
    """``ranks``: results of each rank; a sequence's log-probs are on the ranks of its dp index."""
    name, goal = f"{kind}, {axis}", _tolerance(context, kind)
    for moment, whole in expected["log_probs"].items():
        own = {key: value for rank in ranks for key, value in rank["log_probs"][moment].items()}
        pairs = [(a, b) for key in whole for a, b in zip(own[key], whole[key], strict=True)]
        mean = sum(abs(a - b) for a, b in pairs) / len(pairs)
        context.report(Figure(f"{name}: logprob_diff_mean {moment}", mean, goal=goal))
    for key in ("loss", "grad_norm"):
        worst = max(abs(rank[key] / expected[key] - 1) for rank in ranks)
        context.report(Figure(f"{name}: {key}, relative difference", worst, goal=goal))


def _tolerance(context: Context, kind: str) -> Goal:
    """Bound of differences: in bfloat16 the order of sums matters, and some tokens go to other experts."""
    return Goal("<", (0.05 if kind == "moe" else 0.02) if context.on_gpu else 1e-4)


def train_axes(
    context: Context, kind: str, axes: Sequence[Mapping[str, Any]], *, share_gpu: bool, updates: int
) -> list[dict[str, Any]]:
    """Runs on every rank: for each layout log-probs, a backward pass and, with ``updates``, log-probs after them."""
    from rlhpc.parallel.offload import release_cached

    rig.join_ranks(share_gpu=share_gpu)
    first, found = RankInfo.from_environ().rank == 0, []
    for parallel in axes:
        if first:
            context.log(str(dict(parallel)))
        found.append(_train_axis(context, kind, ParallelSection(**parallel), updates))
        release_cached()
    return found


def _train_axis(context: Context, kind: str, parallel: ParallelSection, updates: int) -> dict[str, Any]:
    actor = _actor(context, kind, parallel, _OPTIMIZER)
    lengths = (24, 9, 15, 40, 11, 33, 18, 26) if context.tiny else (512, 96, 300, 700, 128, 450, 256, 333)
    batches, tokens = _own_batches(actor, lengths), float(sum(lengths) - len(lengths))
    log_probs = {"before": _scores(actor, batches)}
    stats = actor.differentiate(batches, rig.likelihood_loss, tokens, temperature=1.0)
    for _ in range(updates):
        actor.train(batches, rig.likelihood_loss, tokens, temperature=1.0, rate=rig.LEARNING_RATE)
    if updates:
        log_probs["after updates"] = _scores(actor, batches)
    return {"loss": stats.sums["loss"] / tokens, "grad_norm": stats.grad_norm, "log_probs": log_probs}


def _actor(context: Context, kind: str, parallel: ParallelSection, optimizer: OptimizerSection | None) -> Any:
    from rlhpc.parallel.groups import Groups

    groups = Groups(make_layout(parallel, RankInfo.from_environ().world_size))
    _, shape = _model(context, kind)
    return rig.make_actor(shape, context.dtype, ModelSettings(parallel, optimizer=optimizer), groups)


def _model(context: Context, kind: str) -> tuple[Any, Any]:
    """Model folder and shape; four layers if there may be virtual pipeline stages."""
    name = {"dense": "tiny" if context.tiny else "1.5b", "moe": "tiny-moe" if context.tiny else "30b-a3b"}[kind]
    changes = {} if context.tiny or kind == "dense" else {"vocab_size": _SHARED_VOCABULARY}
    folder = context.folder / "models" / f"several-{kind}"
    return rig.model_folder(folder, name, 4 if kind == "dense" else 2, context.dtype, **changes)


def _own_batches(actor: Any, lengths: Sequence[int]) -> list[Any]:
    """Two microbatches of the sequences of this rank's dp index."""
    from rlhpc.data.collate import pack_batch

    sequences = rig.random_sequences(actor.weights.shape, lengths)
    coord = actor.layout.coord(RankInfo.from_environ().rank)
    own = range(len(lengths))[coord["dp"] :: actor.layout.dp]
    return [pack_batch([sequences[i] for i in half], sample_ids=half) for half in (own[::2], own[1::2])]


def _scores(actor: Any, batches: Sequence[Any]) -> dict[str, list[float]]:
    """Log-probs by sequence id."""
    ids = [str(i) for batch in batches for i in batch.sample_ids]
    values = rig.log_probs(actor, batches, prompt=1)
    return {key: value.tolist() for key, value in zip(ids, values, strict=True)}


def _sync_calls(setup: RankSetup) -> list[WorkerCall]:
    """Calls for each engine size and each kind of model, synced from one layout after the other."""
    calls = []
    for kind, names in _SYNCED.items():
        for axes in setup.by_ranks([axis for axis in AXES[kind] if axis.name in names]):
            layouts, ranks, shared = {axis.name: dict(axis.parallel) for axis in axes}, axes[0].ranks, setup.shares_gpu
            for tp in (1,) if shared else (1, 2):
                name = f"{kind}, {ranks} ranks to engines of tp {tp}"
                arguments = {"kind": kind, "axes": layouts, "share_gpu": shared, "tp": tp}
                calls.append(WorkerCall(name, f"{__name__}:sync_axes", arguments, ranks, BOTH, shared))
    return calls


def sync_axes(context: Context, kind: str, axes: Mapping[str, Mapping[str, Any]], *, share_gpu: bool, tp: int) -> None:
    """Runs on every rank: weight sync from each layout to the same engines, comparing log-probs with the trainer's."""
    rig.join_ranks(share_gpu=share_gpu)
    folder, shape = _model(context, kind)
    sizes = (4, 12, 12) if context.tiny else (16, 64, 48)
    section = {"tp": tp, "kv_cache_gib": 0.0625 if context.tiny else 0.5, "max_num_seqs": sizes[0]}
    engine = rig.make_engine(folder, shape, context.dtype, sizes[1] + sizes[2], **section)
    asked = rig.requests(shape, *sizes)
    for axis, parallel in axes.items():
        error, mean = _sync_axis(_actor(context, kind, ParallelSection(**parallel), None), engine, asked, tp)
        if RankInfo.from_environ().rank == 0:
            name = f"{kind}, {axis} to tp {tp}"
            context.report(Figure(f"{name}: weights equal", not error, goal=IS_TRUE, note=error))
            context.report(Figure(f"{name}: logprob_diff_mean", mean, goal=_tolerance(context, kind)))


def _sync_axis(actor: Any, engine: Any, asked: Sequence[Any], tp: int) -> tuple[str, float]:
    """Error of the verification, empty if there is none, and the mean log-prob difference of the worst engine."""
    from rlhpc.parallel.transfer import one_to_all

    ranks = RankInfo.from_environ().world_size
    manager = rig.make_manager(actor, engine, tp=tp, ranks_per_node=ranks)
    manager.sync()
    answered = engine.generate(asked)
    error = rig.verification_error(manager)
    manager.sleep()
    means = []
    for first in range(0, ranks, tp):  # each engine's responses, scored by all trainers together
        theirs = one_to_all(answered, first)
        ours = rig.log_probs(actor, rig.packed_responses(asked, theirs, tokens=2048), len(asked[0].prompt))
        means.append(rig.differences(ours, [completion.log_probs for completion in theirs])[0])
    return error, max(means)
