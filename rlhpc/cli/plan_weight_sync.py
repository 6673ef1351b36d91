"""Text of ``rlhpc plan weight-sync``: what moves in the whole job, or what one rank copies, sends and receives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhpc.cli.tables import labelled, seconds_text, size_text, table
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.weight_sync_report import BYTES, Bandwidths, CopyGroup, WeightSyncReport

_GB = 10**9
_SPEEDS = (50.0, 450.0, 4000.0)  # GB/s of network, node and memory where no GPU is named
_PARTNERS = 24  # characters


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
