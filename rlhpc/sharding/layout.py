"""Parallel layout of ranks, microbatches of a pipeline, and the exchange of context parallelism. Needs no numpy.

No other module computes rank numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, isqrt, lcm, prod
from typing import TYPE_CHECKING, Literal

from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.config.training import ParallelSection


from math import sqrt

# Innermost axis first, Megatron's order "tp-cp-ep-dp-pp" (megatron/core/parallel_state.py, RankGenerator). Dense layers
# and experts divide the same ranks differently: by tp and cp, and by etp and ep.
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
JOB_RANKS = "ranks of the job (slurm.nodes x resources.ranks_per_node)"  # in errors

# What a microbatch costs beside its samples, as so many tokens of each of its ranks: below it, the time of a layer on a
# GPU is that of launching its kernels (site.efficiency.launch_us) and no longer of its products.
MICROBATCH_TOKENS = 256

ContextMethod = Literal["all_gather", "ulysses"]


@dataclass(frozen=True)
class ParallelLayout:
    """Division of ``world_size`` ranks into axes. dp and edp (the experts' dp) follow from the others.

    ``vpp`` is the number of virtual stages on each pipeline rank, None without interleaving. The first and the last
    pipeline rank may have numbers of layers of their own; the others share the rest evenly.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            model_size = prod(getattr(self, axis) for axis in axes)
            if model_size < 1 or self.world_size % model_size:
                product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)
                raise UserError(
                    f"{product} = {model_size} ranks does not divide the {self.world_size} {JOB_RANKS}",
                    where="actor.parallel",
                    remedy=f"use a multiple of {model_size} ranks, or sizes whose product is one of "
                    f"{divisors(self.world_size)}",
                )

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def text(self) -> str:
        """Readable axes: tp and dp, and others larger than one."""
        stages = [f"vpp {self.vpp}"] if self.vpp else []
        for name, layers in (("first", self.first_stage_layers), ("last", self.last_stage_layers)):
            stages += [f"{name} stage of {layers}"] if layers else []
        parts = [f"tp {self.tp}"]
        if self.pp > 1:
            parts.append(f"pp {self.pp}" + (f" ({', '.join(stages)})" if stages else ""))
        parts += [f"cp {self.cp}"] if self.cp > 1 else []
        experts = [f"{axis} {self.size(axis)}" for axis in ("etp", "ep") if self.size(axis) > 1]
        text = " x ".join([*parts, f"dp {self.dp}"])
        return f"{text}, experts {' x '.join([*experts, f'dp {self.edp}'])}" if experts else text

    @property
    def axes(self) -> dict[str, int | None]:
        """Sizes of all axes, with virtual stages and layers of the first and last stage, None without any."""
        names = dict.fromkeys((*DENSE_AXES, *EXPERT_AXES, "vpp", "first_stage_layers", "last_stage_layers"))
        return {"ranks": self.world_size, **{name: getattr(self, name) for name in names}}

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``: tp, cp, dp, pp, etp, ep or edp."""
        return int(getattr(self, axis))

    def coord(self, rank: int) -> dict[str, int]:
        """The rank's index on every axis."""
        return self._coords[rank]

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers on each pipeline rank; raises UserError if they do not divide evenly."""
        own = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers} if self.pp > 1 else {}
        sizes = {stage: layers for stage, layers in own.items() if layers is not None}
        if self.vpp and len(sizes) == self.pp:
            raise UserError(
                "with two pipeline ranks and virtual stages, the last rank has the layers that the first leaves",
                where="actor.parallel.last_stage_layers",
                remedy="leave it out",
            )
        rest, others = num_layers - sum(sizes.values()), self.pp - len(sizes)
        share = rest // others if others else 0
        counts = [sizes.get(stage, share) for stage in range(self.pp)]
        if sum(counts) != num_layers or min(counts) < 1:
            remaining = f"{rest} of the {num_layers} layers" if sizes else f"{num_layers} layers"
            raise UserError(
                f"{remaining} do not divide into {others}{' other' if sizes else ''} pipeline stages",
                where="actor.parallel.pp",
                remedy="set actor.parallel.first_stage_layers or last_stage_layers, or another pp",
            )
        uneven = next((count for count in counts if count % (self.vpp or 1)), None)
        if uneven is not None:
            raise UserError(
                f"the {uneven} layers of a pipeline stage do not divide into {self.vpp} virtual stages",
                where="actor.parallel.vpp",
                remedy=f"use one of {divisors(gcd(*counts))}",
            )
        return counts

    def layer_places(self, num_layers: int) -> list[tuple[int, int, int]]:
        """(pipeline rank, chunk, number inside the chunk) of every layer: chunks are assigned round-robin.

        Equal to Megatron's get_num_layers_to_build (transformer_block.py) and get_transformer_layer_offset
        (transformer_layer.py).
        """
        chunks, counts = self.vpp or 1, self.stage_layers(num_layers)
        return [
            (stage, chunk, local)
            for chunk in range(chunks)
            for stage, count in enumerate(counts)
            for local in range(count // chunks)
        ]

    @cached_property
    def _coords(self) -> list[dict[str, int]]:
        coords = []
        for rank in range(self.world_size):
            coord = {}
            for order in (DENSE_AXES, EXPERT_AXES):
                rest = rank
                for axis in order:
                    rest, coord[axis] = divmod(rest, self.size(axis))
            coords.append(coord)
        return coords


def make_layout(parallel: ParallelSection, world_size: int) -> ParallelLayout:
    """Layout of a configuration on ``world_size`` ranks."""
    return ParallelLayout(
        world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.vpp if parallel.vpp != 1 else None,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
    )


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def best_microbatches(stages: int, virtual_stages: int, work: float, overhead: float) -> float:
    """The number m that makes (m + (stages - 1) / virtual_stages) (work / m + overhead) least: the time of 1F1B, with
    the filling and draining of the pipeline. ``work``: of all microbatches; each also costs ``overhead``."""
    return sqrt((stages - 1) / virtual_stages * work / overhead)


@dataclass(frozen=True)
class ContextChoice:
    """The method, and in words why."""

    method: ContextMethod
    reason: str


def choose_context_method(heads: int, kv_heads: int, cp: int, requested: ContextMethod | None = None) -> ContextChoice:
    """Ulysses where cp divides the query heads, otherwise all-gather; ``requested`` if the heads allow it."""
    assert min(heads, kv_heads, cp) > 0
    assert heads % kv_heads == 0, (heads, kv_heads)
    if heads % cp:
        return ContextChoice("all_gather", f"{heads} query heads cannot be divided among {cp} ranks")
    if requested == "all_gather":
        return ContextChoice("all_gather", "requested")
    text = f"each of {cp} ranks takes {heads // cp} of {heads} query heads"
    copies = lcm(kv_heads, cp) // kv_heads
    if copies > 1:
        text += f"; each of {kv_heads} key-value heads is copied {copies} times to divide them"
    return ContextChoice("ulysses", text)
