"""Predicts the bytes and the time of a weight sync from the config and the model's config.json alone.

python -m tools.weight_sync my.yaml            # the whole job
python -m tools.weight_sync my.yaml --rank 5   # what rank 5 copies, receives and sends
python -m tools.weight_sync my.yaml --json     # for programs; with --rank every single copy
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.cli.options import CONFIG, JSON, OVERRIDES
from rlhpc.cli.output import json_text, labelled, seconds_text, size_text, table
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig, with_job_ranks
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import check_node_range
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.reshard.plan import Copy, ReshardPlan, Traffic, lower_bound
from rlhpc.reshard.sides import plan_weight_sync, sync_sides
from rlhpc.reshard.staged.plan import StagedPlan, plan_staged_sync
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import make_mesh_sizes
from rlhpc.sharding.placement import Placement, backend_for, placement_of, receiving_together

# Fields of Traffic.
BYTES = ("received", "received_across", "received_within", "sent", "sent_across", "sent_within", "local")
CHANGED = (0.01, 0.05)  # shares of elements that updates of bfloat16 weights change at usual learning rates
CHANGED_BYTES = {"plain": 3.2, "compressed": 1.6}  # bytes of a changed element, as measured at those
_LAYER = re.compile(r"\.layers\.\d+\.")


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths of one rank in bytes per second, one direction; of memory, reads and writes together."""

    network: float
    node: float
    memory: float


@dataclass(frozen=True)
class Spread:
    """Bytes over ranks, and the rank with most."""

    total: int
    least: int
    mean: float
    most: int
    busiest: int


@dataclass(frozen=True)
class Duration:
    """Seconds of a rank's traffic across nodes, inside the node and in memory, one after the other."""

    rank: int
    network: float
    node: float
    memory: float

    @property
    def total(self) -> float:
        return self.network + self.node + self.memory


@dataclass(frozen=True)
class CopyGroup:
    """Copies of one rank that differ only in layer, offset and partner. ``layers`` is empty outside of layers."""

    direction: str  # local, sends or receives
    tensor: str
    block: tuple[int, ...]
    layers: tuple[int, ...]
    partners: tuple[int, ...]
    copies: int
    size: int  # bytes


@dataclass(frozen=True)
class ExpectedDeltas:
    """Bytes that trainers send in the first weight sync, and about as many in a later one, by the share of elements
    that have changed."""

    full: int
    later: Mapping[float, int]


@dataclass(frozen=True)
class WeightSyncReport:
    """A weight-sync plan with its summary."""

    placement: Placement
    training: ParallelLayout
    engine: EngineLayout
    ranks_per_node: int
    itemsize: int
    plan: ReshardPlan
    least: Mapping[int, int]  # minimum bytes that each rank must receive
    staging: Mapping[int, int]  # bytes of staging memory, of engines on ranks of their own and their trainers
    seconds: float  # of planning
    deltas: ExpectedDeltas | None  # with reshard.delta

    @property
    def ranks(self) -> int:
        """Number of the job's ranks."""
        return self.placement.engines.ranks.stop

    @property
    def engines(self) -> int:
        return self.placement.num_engines

    @property
    def engine_nodes(self) -> int:
        """Number of nodes of each engine."""
        return max(1, self.engine.tp // self.ranks_per_node)

    @property
    def reaches_least(self) -> bool:
        """Whether no rank receives more bytes than it must."""
        return all(traffic.received == self.least.get(rank, 0) for rank, traffic in self.plan.traffic.items())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the busiest rank besides the weights: two buffers to send and two to receive, or staging memory."""
        return max(self.staging.values(), default=4 * self.plan.largest_bucket)

    def spread(self, kind: str) -> Spread:
        """Returns the distribution over ranks of ``kind``, one of BYTES."""
        sizes = {rank: int(getattr(traffic, kind)) for rank, traffic in self.plan.traffic.items()}
        busiest = max(sizes, key=lambda rank: (sizes[rank], -rank))
        total = sum(sizes.values())
        return Spread(total, min(sizes.values()), total / len(sizes), sizes[busiest], busiest)

    def slowest(self, bandwidths: Bandwidths) -> Duration:
        """Returns the duration of the slowest rank, if no rank waits for another."""
        return max(
            (_duration(rank, traffic, bandwidths) for rank, traffic in self.plan.traffic.items()),
            key=lambda duration: (duration.total, -duration.rank),
        )

    def copies_of(self, rank: int) -> list[CopyGroup]:
        """Returns the rank's copies in groups, most bytes first. Only of the rank given to report_weight_sync."""
        return _groups(self.plan.copies, rank, self.itemsize)


def report_weight_sync(config: RunConfig, rank: int | None = None) -> WeightSyncReport:
    """Plans the weight sync on the most nodes that the config allows; with ``rank``, the report has its copies."""
    shape, ranks_per_node = resolve_model(config), config.resources.ranks_per_node
    if not isinstance(shape, ModelShape):
        raise UserError(
            f"weights of {shape.architecture} go whole through vLLM's loader, one after the other",
            where="weight sync",
            remedy="use it for a model of a known family",
        )
    check_node_range(config)
    training = check_layout(config, config.slurm.most_nodes, shape)
    placement = placement_of(config, config.slurm.most_nodes * ranks_per_node)
    ranks = placement.engines.ranks.stop
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"no rank {rank}", where="--rank", remedy=f"use 0 to {ranks - 1}")
    itemsize, started = ITEMSIZE[config.model.dtype], time.perf_counter()
    engine = EngineLayout(config.rollout.tp, config.rollout.expert_parallel and shape.experts is not None)
    by_mesh = backend_for(config, shape) == "fsdp"
    cut = make_mesh_sizes(config.actor.parallel, training.world_size) if by_mesh else training
    sides = sync_sides(shape, cut, engine, placement.trainers.ranks, placement.engines.ranks)
    options = {
        "ranks_per_node": ranks_per_node,
        "bucket_bytes": config.reshard.bucket_mib << 20,
        "itemsize": itemsize,
    }
    staging: Mapping[int, int] = {}
    deltas = None
    if placement.separate:
        options["ranks_per_node"] = receiving_together(config)
        staged = plan_staged_sync(sides, **options, delta=config.reshard.delta)
        plan, staging = _as_reshard_plan(staged, rank), staged.staging
        deltas = _expected(config, sum(found.sent for found in staged.traffic.values()), itemsize)
    else:
        plan = plan_weight_sync(sides, **options, rank=-1 if rank is None else rank)  # none
    seconds = time.perf_counter() - started
    least = lower_bound(sides.source, sides.target, itemsize)
    return WeightSyncReport(
        placement, training, engine, ranks_per_node, itemsize, plan, least, staging, seconds, deltas
    )


def _expected(config: RunConfig, size: int, itemsize: int) -> ExpectedDeltas | None:
    """Returns the traffic of trainers that send ``size`` bytes in full; None without deltas."""
    if config.reshard.delta == "off":
        return None
    element = CHANGED_BYTES[config.reshard.delta]
    return ExpectedDeltas(size, {rate: int(size / itemsize * rate * element) for rate in CHANGED})


def _as_reshard_plan(plan: StagedPlan, rank: int | None) -> ReshardPlan:
    """Returns the plan of a staged sync as one with the copies of ``rank``."""
    copies = (*plan.syncs, *plan.forwards)
    traffic = {
        number: Traffic(
            sent_within=found.sent - found.sent_across + found.forwarded,
            sent_across=found.sent_across,
            received_within=found.received - found.received_across + found.taken,
            received_across=found.received_across,
        )
        for number, found in plan.traffic.items()
    }
    mine = tuple(copy for copy in copies if rank in (copy.source_rank, copy.target_rank))
    sizes = (plan.num_buckets, plan.bucket_bytes, plan.largest_bucket)
    return ReshardPlan(mine, traffic, len(copies), *sizes, plan.digest)


def as_json_data(report: WeightSyncReport, bandwidths: Bandwidths, rank: int | None = None) -> dict[str, Any]:
    """Returns the report as JSON data, in bytes and seconds, with every copy of ``rank``."""
    plan, slowest = report.plan, report.slowest(bandwidths)
    document: dict[str, Any] = {
        "ranks": report.ranks,
        "ranks_per_node": report.ranks_per_node,
        "training": report.training.axes,
        "engines": report.engines,
        "engine": asdict(report.engine),
        "bytes": {kind: asdict(report.spread(kind)) for kind in BYTES},
        "least_received": sum(report.least.values()),
        "reaches_least": report.reaches_least,
        "copies": plan.num_copies,
        "buckets": plan.num_buckets,
        "bucket_bytes": plan.bucket_bytes,
        "largest_bucket": plan.largest_bucket,
        "buffer_bytes": report.buffer_bytes,
        "slowest": {**asdict(slowest), "total": slowest.total},
        "planning_seconds": round(report.seconds, 3),
        "digest": plan.digest,
    }
    if report.deltas is not None:
        document["deltas"] = asdict(report.deltas)
    if rank is not None:
        document["rank"] = {"rank": rank, "copies": [_copy_json(copy) for copy in plan.copies]}
    return document


def _copy_json(copy: Copy) -> dict[str, Any]:
    return {
        "bucket": copy.bucket if copy.bucket >= 0 else None,
        "source_rank": copy.source_rank,
        "target_rank": copy.target_rank,
        "tensor": copy.tensor.name,
        "start": copy.box.start,
        "stop": copy.box.stop,
        "source": {"chunk": copy.source.chunk, "name": copy.source.local_name, "start": copy.source.local_start},
        "target": {"name": copy.target.local_name, "start": copy.target.local_start},
    }


def _duration(rank: int, traffic: Traffic, bandwidths: Bandwidths) -> Duration:
    moved = traffic.local + traffic.sent + traffic.received  # each byte is read once and written once
    return Duration(
        rank,
        max(traffic.sent_across, traffic.received_across) / bandwidths.network,
        max(traffic.sent_within, traffic.received_within) / bandwidths.node,
        2 * moved / bandwidths.memory,
    )


def _groups(copies: Iterable[Copy], rank: int, itemsize: int) -> list[CopyGroup]:
    def kind(copy: Copy) -> tuple[str, str, tuple[int, ...]]:
        name = _LAYER.sub(".layers.{layer}.", copy.tensor.name)
        direction = "local" if copy.bucket < 0 else "sends" if copy.source_rank == rank else "receives"
        return direction, name, copy.box.shape

    groups = []
    for (direction, name, block), found in groupby(sorted(copies, key=kind), key=kind):
        alike = list(found)
        partners = {copy.target_rank if direction == "sends" else copy.source_rank for copy in alike}
        layers = {copy.tensor.layer for copy in alike if copy.tensor.layer is not None}
        size = sum(copy.box.volume * (4 if copy.tensor.float32 else itemsize) for copy in alike)
        groups.append(
            CopyGroup(direction, name, block, tuple(sorted(layers)), tuple(sorted(partners)), len(alike), size)
        )
    return sorted(groups, key=lambda group: (group.direction, -group.size, group.tensor))


_GB = 10**9
_SPEEDS = (50.0, 450.0, 4000.0)  # GB/s of network, node and memory where no GPU is named
_PARTNERS = 24  # characters
_SPEED = click.FloatRange(min=0, min_open=True)


def bandwidths_of(config: RunConfig, gpu: str | None, speeds: Sequence[float | None]) -> Bandwidths:
    """Bandwidths of network, node and memory: ``speeds`` in GB/s, and for None those of the GPU. Raises UserError."""
    for name, speed in zip(("--network", "--node", "--memory"), speeds, strict=True):
        if speed is not None and not math.isfinite(speed):
            raise UserError(f"{speed} is not allowed", where=name, remedy="give GB/s, a number above 0")
    found = named_gpu(config, read_site(config), gpu)
    known = (found.network_gbps, found.node_gbps, found.memory_gbps) if found else _SPEEDS
    selected = [default if speed is None else speed for default, speed in zip(known, speeds, strict=True)]
    return Bandwidths(*(speed * _GB for speed in selected))


def report_lines(report: WeightSyncReport, bandwidths: Bandwidths) -> list[str]:
    """The whole job's movement, some twenty lines."""
    plan, slowest = report.plan, report.slowest(bandwidths)
    least = size_text(sum(report.least.values()))
    reached = "the plan receives no more" if report.reaches_least else "THE PLAN RECEIVES MORE"
    network, node, memory = map(seconds_text, (slowest.network, slowest.node, slowest.memory))
    parts = f"{network} network, {node} node, {memory} memory"
    bucket, buffers = size_text(plan.largest_bucket), size_text(report.buffer_bytes)
    copies = f"{plan.num_copies:,}, in {plan.num_buckets:,} bucket(s) of {size_text(plan.bucket_bytes)} at most"
    what = f"a rank: two of {bucket} to send, two to receive"
    limit = ""
    if report.placement.separate:
        limit = "while both sides work, at least "
        sends = "what a trainer sends" if report.deltas is None else "twice what a trainer sends"
        what = f"of CPU memory at most on a rank: {sends}, or two versions of what an engine needs"
    rows = [["a rank", "min", "mean", "max", "busiest", "all"], *(_bytes_row(report, kind) for kind in BYTES)]
    facts = [
        ("least", f"{least} must be received; {reached}"),
        ("copies", copies),
        ("buffers", f"{buffers} {what}"),
        ("time", f"{limit}{seconds_text(slowest.total)} on rank {slowest.rank}, which takes longest: {parts}"),
        ("planned", f"in {report.seconds:.1f} s, digest {plan.digest}"),
    ]
    if report.deltas is not None:
        later = " or ".join(f"{size_text(size)} ({rate:.0%} changed)" for rate, size in report.deltas.later.items())
        facts.insert(3, ("deltas", f"trainers send {size_text(report.deltas.full)} first, later about {later}"))
    return [*labelled(_layouts(report)), "", *table(rows), "", *labelled(facts)]


def _layouts(report: WeightSyncReport) -> list[tuple[str, str]]:
    training, engine = report.training, report.engine
    cut = ", whole experts on each rank" if engine.expert_parallel else ""
    over = f" over {report.engine_nodes} nodes" if report.engine_nodes > 1 else ""
    own = report.placement.engines.ranks
    where = f"ranks {own.start}-{own.stop - 1} of their own" if report.placement.separate else "the same ranks"
    rollout = f"{report.engines} engine(s) of tp {engine.tp}{cut}{over}, on {where}"
    nodes = report.ranks // report.ranks_per_node
    return [
        ("ranks", f"{report.ranks} on {nodes} node(s) of {report.ranks_per_node}"),
        ("training", training.text),
        ("rollout", rollout),
    ]


def _bytes_row(report: WeightSyncReport, kind: str) -> list[str]:
    titles = {"across": "  across nodes", "within": "  inside a node", "local": "copied in place"}
    spread = report.spread(kind)
    sizes = map(size_text, (spread.least, spread.mean, spread.most))
    busiest = f"rank {spread.busiest}" if spread.most else "none"
    return [titles.get(kind.rpartition("_")[2], kind), *sizes, busiest, size_text(spread.total)]


def rank_lines(report: WeightSyncReport, rank: int) -> list[str]:
    """Like copies in one line, by direction."""
    titles = {"local": "copies in place", "receives": "receives", "sends": "sends"}
    groups, lines = report.copies_of(rank), []
    for direction, title in titles.items():
        mine = [group for group in groups if group.direction == direction]
        size, count = sum(group.size for group in mine), sum(group.copies for group in mine)
        lines.append(f"rank {rank} {title} {size_text(size)} in {count:,} copies")
        lines += [f"  {line}" for line in table([_group_row(group) for group in mine], left=range(4))]
    return lines


def _group_row(group: CopyGroup) -> list[str]:
    word = {"sends": "to ", "receives": "from ", "local": ""}[group.direction]
    return [
        group.tensor.replace("{layer}", _layers(group.layers)),
        " x ".join(map(str, group.block)),
        f"{group.copies:,} of {size_text(group.size // group.copies)}",
        f"{word}{_partners(group.partners)}" if word else "",
    ]


def _layers(numbers: Sequence[int]) -> str:
    """``{0-3,8}``; the number alone if it is one."""
    return _ranges(numbers) if len(numbers) == 1 else f"{{{_ranges(numbers)}}}"


def _partners(ranks: Sequence[int]) -> str:
    """All of them, or how many where that would be long."""
    text = _ranges(ranks)
    return text if len(text) <= _PARTNERS else f"{len(ranks)} ranks of {ranks[0]}-{ranks[-1]}"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,8``, numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


@click.command()
@CONFIG
@OVERRIDES
@click.option("--rank", type=int, metavar="N", help="Show what this rank copies, sends and receives.")
@click.option("--network", type=_SPEED, metavar="GB/S", help="Bandwidth of a rank to other nodes, one direction.")
@click.option("--node", type=_SPEED, metavar="GB/S", help="Bandwidth of a rank inside its node, one direction.")
@click.option("--memory", type=_SPEED, metavar="GB/S", help="Bandwidth of a rank's GPU memory.")
@click.option("--gpu", metavar="NAME", help="GPU, such as h200; default: planning.gpu, else slurm.gpu_type.")
@JSON
def main(
    *, config: str, overrides: tuple[str, ...], rank: int | None, gpu: str | None, as_json: bool, **speeds: float | None
) -> None:
    """Report bytes and time of a weight sync.

    Shows what moves from training into the engines, and the buffers that it takes.

    Bandwidths default to those of the GPU. If none is named, they are those of a 400 Gb/s adapter and fourth-generation
    NVLink per GPU, and of an H100's or H200's memory.
    """
    loaded = load_config(Path(config), overrides)
    loaded = with_job_ranks(loaded) or loaded
    bandwidths = bandwidths_of(loaded, gpu, [speeds[name] for name in ("network", "node", "memory")])
    report = report_weight_sync(loaded, rank)
    if as_json:
        click.echo(json_text(as_json_data(report, bandwidths, rank)))
    else:
        click.echo("\n".join(report_lines(report, bandwidths) if rank is None else rank_lines(report, rank)))


if __name__ == "__main__":
    main()
