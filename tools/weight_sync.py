"""Bytes of a weight sync from the config and the model's config.json alone; ``rlhpc plan run`` has its time.

python -m tools.weight_sync my.yaml            # the whole job
python -m tools.weight_sync my.yaml --rank 5   # what rank 5 copies, receives and sends
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.cli.options import CONFIG, OVERRIDES
from rlhpc.cli.output import labelled, size_text, table
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig, with_job_ranks
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.rank_phases import ranges
from rlhpc.models import ModelShape
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import check_node_range
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.reshard.plan import Copy, ReshardPlan, Traffic, lower_bound
from rlhpc.reshard.sides import plan_weight_sync, sync_sides
from rlhpc.reshard.staged.plan import StagedPlan, plan_staged_sync
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import make_mesh_sizes
from rlhpc.sharding.placement import Placement, backend_for, placement_of, receiving_together

# Fields of Traffic with their titles.
BYTES = {"received": "received", "received_across": "  across nodes", "received_within": "  inside a node"}
BYTES |= {"sent": "sent", "sent_across": "  across nodes", "sent_within": "  inside a node", "local": "copied in place"}
_LAYER = re.compile(r"\.layers\.\d+\.")


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

    @property
    def reaches_least(self) -> bool:
        """True if no rank receives more bytes than it must."""
        return all(traffic.received == self.least.get(rank, 0) for rank, traffic in self.plan.traffic.items())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the busiest rank besides the weights: two buffers to send and two to receive, or staging memory."""
        return max(self.staging.values(), default=4 * self.plan.largest_bucket)

    def sizes(self, kind: str) -> dict[int, int]:
        """Bytes of ``kind``, one of BYTES, by rank."""
        return {rank: int(getattr(traffic, kind)) for rank, traffic in self.plan.traffic.items()}


def report_weight_sync(config: RunConfig, rank: int | None = None) -> WeightSyncReport:
    """Plans the weight sync on the most nodes that the config allows; with ``rank``, the plan has its copies."""
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
    itemsize = ITEMSIZE[config.model.dtype]
    engine = EngineLayout(config.rollout.tp, config.rollout.expert_parallel and shape.experts is not None)
    by_mesh = backend_for(config, shape) == "fsdp"
    cut = make_mesh_sizes(config.actor.parallel, training.world_size) if by_mesh else training
    sides = sync_sides(shape, cut, engine, placement.trainers.ranks, placement.engines.ranks)
    options: dict[str, Any] = {"bucket_bytes": config.reshard.bucket_mib << 20, "itemsize": itemsize}
    staging: Mapping[int, int] = {}
    if placement.separate:
        together = receiving_together(config)
        staged = plan_staged_sync(sides, ranks_per_node=together, delta=config.reshard.delta, **options)
        plan, staging = _as_reshard_plan(staged, rank), staged.staging
    else:
        plan = plan_weight_sync(sides, ranks_per_node=ranks_per_node, rank=-1 if rank is None else rank, **options)
    least = lower_bound(sides.source, sides.target, itemsize)
    return WeightSyncReport(placement, training, engine, ranks_per_node, itemsize, plan, least, staging)


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


def report_lines(report: WeightSyncReport) -> list[str]:
    """The whole job's movement, some twenty lines."""
    plan, engine, placement = report.plan, report.engine, report.placement
    own, nodes = placement.engines.ranks, engine.tp // report.ranks_per_node
    cut = ", whole experts on each rank" if engine.expert_parallel else ""
    over = f" over {nodes} nodes" if nodes > 1 else ""
    where = f"ranks {own.start}-{own.stop - 1} of their own" if placement.separate else "the same ranks"
    layouts = [
        ("ranks", f"{own.stop} on {own.stop // report.ranks_per_node} node(s) of {report.ranks_per_node}"),
        ("training", report.training.text),
        ("rollout", f"{placement.num_engines} engine(s) of tp {engine.tp}{cut}{over}, on {where}"),
    ]
    reached = "the plan receives no more" if report.reaches_least else "THE PLAN RECEIVES MORE"
    what = f"a rank: two of {size_text(plan.largest_bucket)} to send, two to receive"
    if placement.separate:
        what = "of CPU memory at most on a rank"
    facts = [
        ("least", f"{size_text(sum(report.least.values()))} must be received; {reached}"),
        ("copies", f"{plan.num_copies:,}, in {plan.num_buckets:,} bucket(s) of {size_text(plan.bucket_bytes)} at most"),
        ("buffers", f"{size_text(report.buffer_bytes)} {what}"),
    ]
    head = ["a rank", "min", "mean", "max", "busiest", "all"]
    rows = [head, *(_bytes_row(report.sizes(kind), title) for kind, title in BYTES.items())]
    return [*labelled(layouts), "", *table(rows), "", *labelled(facts)]


def _bytes_row(sizes: Mapping[int, int], title: str) -> list[str]:
    busiest, total = max(sizes, key=lambda rank: (sizes[rank], -rank)), sum(sizes.values())
    cells = map(size_text, (min(sizes.values()), total / len(sizes), sizes[busiest]))
    return [title, *cells, f"rank {busiest}" if sizes[busiest] else "none", size_text(total)]


def rank_lines(report: WeightSyncReport, rank: int) -> list[str]:
    """Copies of one rank by direction; those that differ only in layer, offset and partner share a line."""
    local = [copy for copy in report.plan.copies if copy.bucket < 0]
    sent = [copy for copy in report.plan.copies if copy.bucket >= 0 and copy.source_rank == rank]
    received = [copy for copy in report.plan.copies if copy.bucket >= 0 and copy.source_rank != rank]
    lines = []
    for title, word, copies in (
        ("copies in place", "", local),
        ("receives", "from ", received),
        ("sends", "to ", sent),
    ):
        alike = defaultdict(list)
        for copy in copies:
            alike[_LAYER.sub(".layers.{layer}.", copy.tensor.name), copy.box.shape].append(copy)
        rows = sorted(alike, key=lambda key: (-_size(report, alike[key]), key))
        total = size_text(_size(report, copies))
        lines.append(f"rank {rank} {title} {total} in {len(copies):,} copies")
        cells = [[*_group_cells(report, key[0], alike[key]), _partners(alike[key], word)] for key in rows]
        lines += [f"  {line}" for line in table(cells, left=range(4))]
    return lines


def _size(report: WeightSyncReport, copies: Sequence[Copy]) -> int:
    return sum(copy.box.volume * (4 if copy.tensor.float32 else report.itemsize) for copy in copies)


def _group_cells(report: WeightSyncReport, name: str, copies: Sequence[Copy]) -> list[str]:
    layers = {copy.tensor.layer for copy in copies if copy.tensor.layer is not None}
    text = _ranges(layers) if len(layers) == 1 else f"{{{_ranges(layers)}}}"
    block = " x ".join(map(str, copies[0].box.shape))
    return [name.replace("{layer}", text), block, f"{len(copies):,} of {size_text(_size(report, copies[:1]))}"]


def _partners(copies: Sequence[Copy], word: str) -> str:
    if not word:
        return ""
    return word + _ranges({copy.target_rank if word == "to " else copy.source_rank for copy in copies})


def _ranges(numbers: Iterable[int]) -> str:
    return ",".join(ranges(sorted(numbers)))


@click.command()
@CONFIG
@OVERRIDES
@click.option("--rank", type=int, metavar="N", help="Show what this rank copies, sends and receives.")
def main(config: str, overrides: tuple[str, ...], rank: int | None) -> None:
    """Report the bytes of a weight sync, and the buffers that it takes."""
    loaded = load_config(Path(config), overrides)
    report = report_weight_sync(with_job_ranks(loaded) or loaded, rank)
    click.echo("\n".join(report_lines(report) if rank is None else rank_lines(report, rank)))


if __name__ == "__main__":
    main()
