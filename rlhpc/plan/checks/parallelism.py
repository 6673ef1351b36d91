"""Checks that a layout fits a model: the reason if not, and the nearest layouts that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log2
from typing import TYPE_CHECKING

from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.sharding.engine_shards import engine_vocab
from rlhpc.sharding.layout import ParallelLayout, divisors, make_layout
from rlhpc.sharding.shards import padded_vocab

if TYPE_CHECKING:
    from rlhpc.config.rollout import RolloutSection
    from rlhpc.config.training import ParallelSection

_AXES = ("tp", "pp", "cp", "ep", "etp")
LAYOUT_KEYS = (*_AXES, "vpp", "first_stage_layers", "last_stage_layers")
_GROUPED_ROW = 8  # bfloat16 elements in 16 bytes: strides that torch.nn.functional.grouped_mm takes on CUDA
_VIRTUAL = (2, 3, 4, 5, 6)
_PER_AXIS = 5  # sizes of one axis that a search tries
_END_STEPS = {"first_stage_layers": 0.3, "last_stage_layers": 0.25}  # the last one has the head: less suits it
_PROPOSED = 3  # layouts in a remedy
_TRIED = 24  # of which those that suit GPUs and batches are proposed
_LARGEST_STAGE = 1.25  # of the mean, plus one layer: all ranks wait for it


@dataclass(frozen=True)
class Misfit:
    """One reason why a layout does not fit a model; ``where`` is the config key."""

    where: str
    message: str
    remedy: str = ""  # where another layout does not help


Suits = Callable[[ParallelLayout], bool]


def fitting_layout(
    parallel: ParallelSection, world_size: int, shape: ModelShape | None, suits: Suits | None = None
) -> ParallelLayout:
    """Returns the configured layout. Raises UserError with the nearest fitting ones if it does not fit ranks or model.

    Without a shape, which ``prepare`` may have yet to create, only the ranks are checked. ``suits``: whether the rest
    of the config and the GPUs suit a layout; others are proposed only if there is none.
    """
    try:
        layout = make_layout(parallel, world_size)
    except UserError as error:
        misfit = Misfit(error.where, error.message)
    else:
        found = next(misfits(shape, layout, parallel), None) if shape else None
        if found is None:
            return layout
        misfit = found
    raise UserError(
        misfit.message, where=misfit.where, remedy=misfit.remedy or _proposal(shape, parallel, world_size, suits)
    )


def _proposal(shape: ModelShape | None, parallel: ParallelSection, world_size: int, suits: Suits | None) -> str:
    """The nearest layouts in words: those that suit among the first few, else the nearest of all."""
    nearest = nearest_layouts(shape, parallel, world_size, _TRIED)
    suitable = list(filter(suits, nearest))
    if not suitable:
        suitable = list(filter(suits, nearest_layouts(shape, parallel, world_size, _TRIED, needless=True)))
    text = " | ".join(layout.text for layout in (suitable or nearest)[:_PROPOSED])
    return f"nearest that fit: {text}" if suitable else f"nearest: {text}, but with too little GPU memory or data"


def check_engine(shape: ModelDescription, rollout: RolloutSection) -> None:
    """Refuses a tensor-parallel size that the engine cannot divide this model by."""
    where = "rollout.tp"

    def wrong(size: int) -> Iterator[Misfit]:
        yield from _tensor_misfits(shape, size, where)
        yield from _does_not_divide(size, engine_vocab(shape.vocab_size), "rows of the vocabulary, padded", where)
        if shape.experts and rollout.expert_parallel:
            yield from _does_not_divide(size, shape.experts.num_experts, "experts", where)
        elif shape.experts:
            yield from _does_not_divide(size, shape.experts.ffn_size, "feed-forward size of an expert", where)

    misfit = next(wrong(rollout.tp), None)
    if misfit is not None:
        valid = [size for size in divisors(shape.num_heads) if not any(wrong(size))]
        raise UserError(misfit.message, where=misfit.where, remedy=f"use one of {valid}")


def misfits(shape: ModelShape, layout: ParallelLayout, parallel: ParallelSection) -> Iterator[Misfit]:
    """Yields all reasons why the layout does not fit the model."""
    yield from _tensor_misfits(shape, layout.tp, "actor.parallel.tp")
    if shape.latent is None:  # Megatron cuts their rows evenly, also where ranks share a key-value head
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        yield from _does_not_divide(layout.tp, rows, "rows of query, key and value", "actor.parallel.tp")
    if padded_vocab(shape.vocab_size, layout.tp) // layout.tp * (layout.tp - 1) >= shape.vocab_size:
        message = f"{layout.tp} leaves a rank no row of the model's vocabulary of {shape.vocab_size} (config.json)"
        yield Misfit("actor.parallel.tp", message)
    yield from _sequence_misfits(shape, layout, parallel)
    yield from _expert_misfits(shape, layout)
    yield from _stage_misfits(shape.num_layers, layout)


def parallel_of(asked: ParallelSection, layout: ParallelLayout) -> ParallelSection:
    """Returns the section ``asked`` with the sizes of the layout."""
    return asked.model_copy(update={name: getattr(layout, name) for name in LAYOUT_KEYS})


def layouts(
    shape: ModelShape | None, parallel: ParallelSection, world_size: int, sizes: Mapping[str, Iterable[int]]
) -> Iterator[ParallelLayout]:
    """Yields the layouts of these sizes of each axis that fit ranks and model."""
    for tp, pp, cp, ep, etp in product(*(sizes[axis] for axis in _AXES)):
        if world_size % (tp * pp * cp) or world_size % (ep * etp * pp):
            continue
        for stages in _stages(shape, parallel, pp):
            layout = replace(stages, world_size=world_size, tp=tp, cp=cp, ep=ep, etp=etp)
            if shape is None or not any(misfits(shape, layout, parallel)):
                yield layout


def nearest_layouts(
    shape: ModelShape | None, parallel: ParallelSection, world_size: int, count: int = 3, *, needless: bool = False
) -> list[ParallelLayout]:
    """Returns the layouts nearest to the configured one that fit ranks and model, nearest first.

    At least one: data parallelism alone. Tries a few sizes of each axis; doubling or halving a size is one step. A
    layout whose changed keys include all those of another is left out, unless ``needless``.
    """

    def suits(axis: str, size: int) -> bool:
        """True if the size of this axis alone fits the model."""
        if axis == "pp":
            return bool(_stages(shape, parallel, size))
        if shape is None or axis == "cp":
            return True
        if axis == "tp":
            return not any(_tensor_misfits(shape, size, ""))
        return not any(_expert_misfits(shape, replace(ParallelLayout(size), **{axis: size})))

    sizes = {}
    for axis in _AXES:
        asked = getattr(parallel, axis)
        valid = sorted((abs(log2(size / asked)), size) for size in divisors(world_size) if suits(axis, size))
        sizes[axis] = {size for _, size in valid[:_PER_AXIS]} | {1}
    found = {layout: distance(shape, layout, parallel) for layout in layouts(shape, parallel, world_size, sizes)}
    changed = {layout: _changed(layout, parallel) for layout in found}
    sets = set() if needless else set(changed.values())
    kept = [layout for layout in found if not any(less < changed[layout] for less in sets)]
    return sorted(kept, key=lambda layout: (found[layout], layout.text))[:count]


def _tensor_misfits(shape: ModelDescription, tp: int, where: str) -> Iterator[Misfit]:
    yield from _does_not_divide(tp, shape.num_heads, "attention heads", where)
    has_dense_layers = shape.experts is None or len(shape.experts.layers) < shape.num_layers
    if has_dense_layers and shape.ffn_size is not None:
        yield from _does_not_divide(tp, shape.ffn_size, "feed-forward size", where)
    if shape.experts and shape.experts.shared_ffn_size:
        yield from _does_not_divide(tp, shape.experts.shared_ffn_size, "feed-forward size of shared experts", where)
    if max(tp, shape.num_kv_heads) % min(tp, shape.num_kv_heads):
        message = f"{tp} and the model's {shape.num_kv_heads} key-value heads (config.json) do not divide one another"
        yield Misfit(where, message)


def _sequence_misfits(shape: ModelShape, layout: ParallelLayout, parallel: ParallelSection) -> Iterator[Misfit]:
    heads = shape.num_heads // layout.tp
    if parallel.cp_method == "ulysses" and heads % layout.cp:
        message = f"{layout.cp} does not divide the {heads} attention heads of a rank, as cp_method ulysses needs"
        yield Misfit("actor.parallel.cp", message)
    if layout.tp > 1 and (shape.experts or shape.latent) and not parallel.sequence_parallel:
        part = "experts" if shape.experts else "latent attention"
        yield Misfit(
            "actor.parallel.sequence_parallel",
            f"a model with {part} needs it at tp {layout.tp}",
            "set it to true, or tp to 1",
        )


def _expert_misfits(shape: ModelShape, layout: ParallelLayout) -> Iterator[Misfit]:
    if shape.experts is None:
        for axis in ("ep", "etp"):
            if layout.size(axis) > 1:
                message = f"{layout.size(axis)} ranks are to share experts, which the model does not have"
                yield Misfit(f"actor.parallel.{axis}", message)
        return
    yield from _does_not_divide(layout.ep, shape.experts.num_experts, "experts", "actor.parallel.ep")
    ffn_size = shape.experts.ffn_size
    yield from _does_not_divide(layout.etp, ffn_size, "feed-forward size of an expert", "actor.parallel.etp")
    each, left = divmod(ffn_size, layout.etp)
    if layout.etp > 1 and not left and each % _GROUPED_ROW:
        message = (
            f"{layout.etp} leaves a rank {each} of the model's {ffn_size} feed-forward size of an expert "
            f"(config.json), and grouped products take multiples of {_GROUPED_ROW}"
        )
        yield Misfit("actor.parallel.etp", message)


def _stage_misfits(num_layers: int, layout: ParallelLayout) -> Iterator[Misfit]:
    for key in ("vpp", "first_stage_layers", "last_stage_layers"):
        value = getattr(layout, key)
        if value is not None and layout.pp == 1:
            yield Misfit(f"actor.parallel.{key}", f"{value} has a meaning only with several pipeline stages (pp > 1)")
    try:
        layout.stage_layers(num_layers)
    except UserError as error:
        yield Misfit(error.where, error.message)


def _does_not_divide(size: int, number: int, label: str, where: str) -> Iterator[Misfit]:
    if number % size:
        yield Misfit(where, f"{size} does not divide the model's {number} {label} (config.json)")


def _stages(shape: ModelShape | None, parallel: ParallelSection, pp: int) -> list[ParallelLayout]:
    own = (parallel.first_stage_layers, parallel.last_stage_layers) if pp == parallel.pp else None
    return _stage_layouts(shape.num_layers if shape is not None else None, pp, own, parallel.vpp)


@cache
def _stage_layouts(
    num_layers: int | None, pp: int, own: tuple[int | None, int | None] | None, asked: int | None
) -> list[ParallelLayout]:
    """Returns layouts of ``pp`` stages: of the configured first and last stage, ``own``, and nearly equal ones; with
    virtual stages, ``asked`` and others, and without. Each division of the layers comes once."""
    if pp == 1:
        return [ParallelLayout(1)]
    found: dict[object, ParallelLayout] = {}
    for begin, end in dict.fromkeys([*([own] if own else []), *_ends(num_layers or pp, pp)]):
        for vpp in dict.fromkeys((None, *_VIRTUAL, None if asked == 1 else asked)):
            layout = ParallelLayout(pp, pp=pp, vpp=vpp, first_stage_layers=begin, last_stage_layers=end)
            if num_layers is None:
                found[layout] = layout
                continue
            with suppress(UserError):
                counts = layout.stage_layers(num_layers)
                if (begin, end) == own or max(counts) <= _LARGEST_STAGE * num_layers / pp + 1:
                    found.setdefault((vpp, *counts), layout)
    return list(found.values())


def _ends(num_layers: int, pp: int) -> Iterator[tuple[int | None, int | None]]:
    """Yields layers of a first and a last stage about as large as those between them; None for as large."""
    if num_layers % pp == 0:
        yield None, None
    for each in range(max(1, num_layers // pp), -(-num_layers // pp) + 1):
        ends = num_layers - each * (pp - 2)
        for last in (ends // 2, each - 1, each, each + 1, ends - each):
            first = ends - last
            if first >= 1 and last >= 1 and (first, last) != (each, each):
                yield first if first != each else None, last if last != each else None


def _changed(layout: ParallelLayout, parallel: ParallelSection) -> frozenset[str]:
    """Returns the axes that differ from the configured layout; the layers of stages count with their number."""
    axes = {axis for axis in _AXES if layout.size(axis) != getattr(parallel, axis)}
    asked = (parallel.first_stage_layers, parallel.last_stage_layers)
    if (layout.first_stage_layers, layout.last_stage_layers) != asked and "pp" not in axes:
        axes.add("stages")
    if layout.pp > 1 and (layout.vpp or 1) != (parallel.vpp or 1):
        axes.add("vpp")
    return frozenset(axes)


def distance(shape: ModelShape | None, layout: ParallelLayout, parallel: ParallelSection) -> tuple[float, float]:
    """Returns the steps from the configured layout, and for ties the change of the model's share on a rank."""
    steps = [log2(layout.size(axis) / getattr(parallel, axis)) for axis in _AXES]
    chunks = abs(log2((layout.vpp or 1) / (parallel.vpp or 1)))
    moved = sum(step for name, step in _END_STEPS.items() if getattr(layout, name) != getattr(parallel, name))
    if shape and moved:  # ranks wait for the largest stage
        moved += max(layout.stage_layers(shape.num_layers)) * layout.pp / shape.num_layers - 1
    return sum(map(abs, steps)) + chunks + moved, abs(sum(steps))
