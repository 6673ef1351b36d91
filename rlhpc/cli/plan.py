"""``rlhpc plan``. Imports click only; the rest when it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.plan.push_report import Bandwidths, CopyGroup, PushReport

_GB = 10**9
_SPEED = click.FloatRange(min=0, min_open=True)
_PARTNERS = 24  # characters
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--reshard", is_flag=True, help="What moves when the engines get new weights.")
@click.option("--rank", type=int, metavar="N", help="With --reshard: what this rank copies, sends and receives.")
@click.option("--network", type=_SPEED, default=50, show_default=True, help="GB/s of a rank to other nodes, one way.")
@click.option("--node", type=_SPEED, default=450, show_default=True, help="GB/s of a rank inside its node, one way.")
@click.option("--memory", type=_SPEED, default=4000, show_default=True, help="GB/s that a rank reads and writes.")
@click.option("--json", "as_text", is_flag=True, help="Print JSON, for programs.")
def plan(
    config: str,
    overrides: tuple[str, ...],
    reshard: bool,
    rank: int | None,
    network: float,
    node: float,
    memory: float,
    as_text: bool,
) -> None:
    """Foretell a run of CONFIG, a YAML file, from it and the model's config.json; weights may be elsewhere.

    The bandwidths are for the time that is foretold: one 400 Gb/s adapter and fourth-generation NVLink for each GPU,
    and the memory of an H100 or H200, unless told otherwise.
    """
    import json
    from pathlib import Path

    from rlhpc.config.load import load_config

    loaded = load_config(Path(config), overrides)
    if not reshard:
        if rank is not None:
            raise UserError("is for what moves", where="--rank", remedy="add --reshard")
        from rlhpc.plan.check import outline

        rows = outline(loaded)
        click.echo(json.dumps(dict(rows), indent=2) if as_text else "\n".join(_aligned(rows)))
        return
    from rlhpc.plan.push_report import Bandwidths, as_json, report_push

    bandwidths = Bandwidths(network * _GB, node * _GB, memory * _GB)
    report = report_push(loaded, rank)
    if as_text:
        click.echo(json.dumps(as_json(report, bandwidths, rank), indent=2))
        return
    for line in _report(report, bandwidths) if rank is None else _rank_lines(report, rank):
        click.echo(line)


def _report(report: PushReport, bandwidths: Bandwidths) -> list[str]:
    """The whole job's movement, some twenty lines."""
    from rlhpc.plan.push_report import BYTES

    plan, longest = report.plan, report.slowest(bandwidths)
    least = sum(report.least.values())
    reached = "the plan receives no more" if report.reaches_least else "THE PLAN RECEIVES MORE"
    buffers = f"{_bytes(report.buffer_bytes)} a rank: two of {_bytes(plan.largest_bucket)} to send, two to receive"
    parts = f"{_seconds(longest.network)} network, {_seconds(longest.node)} node, {_seconds(longest.memory)} memory"
    return [
        *_aligned(_layouts(report)),
        "",
        *_table([["a rank", "min", "mean", "max", "busiest", "all"], *(_bytes_row(report, kind) for kind in BYTES)]),
        "",
        *_aligned(
            [
                ("least", f"{_bytes(least)} must be received; {reached}"),
                (
                    "copies",
                    f"{plan.num_copies:,}, in {plan.num_buckets:,} bucket(s) of {_bytes(plan.bucket_bytes)} at most",
                ),
                ("buffers", buffers),
                ("time", f"{_seconds(longest.total)} on rank {longest.rank}, which takes longest: {parts}"),
                ("planned", f"in {report.seconds:.1f} s, digest {plan.digest}"),
            ]
        ),
    ]


def _layouts(report: PushReport) -> list[tuple[str, str]]:
    training, engine = report.training, report.engine
    cut = ", whole experts on each rank" if engine.expert_parallel else ""
    note = " (over several nodes: foretold here, not executed in this version)" if report.spans_nodes else ""
    rollout = f"{report.engines} engine(s) of tp {engine.tp}{cut}, on the same ranks{note}"
    nodes = training.world_size // report.ranks_per_node
    return [
        ("ranks", f"{training.world_size} on {nodes} node(s) of {report.ranks_per_node}"),
        ("training", training.text),
        ("rollout", rollout),
    ]


def _bytes_row(report: PushReport, kind: str) -> list[str]:
    titles = {"across": "  across nodes", "within": "  inside a node", "local": "copied in place"}
    spread = report.spread(kind)
    sizes = map(_bytes, (spread.least, spread.mean, spread.most))
    busiest = f"rank {spread.busiest}" if spread.most else "none"
    return [titles.get(kind.rpartition("_")[2], kind), *sizes, busiest, _bytes(spread.total)]


def _rank_lines(report: PushReport, rank: int) -> list[str]:
    """Like copies in one line, by direction."""
    titles = {"local": "copies in place", "receives": "receives", "sends": "sends"}
    groups, lines = report.copies_of(rank), []
    for direction, title in titles.items():
        mine = [group for group in groups if group.direction == direction]
        size, count = sum(group.size for group in mine), sum(group.copies for group in mine)
        lines.append(f"rank {rank} {title} {_bytes(size)} in {count:,} copies")
        lines += [f"  {line}" for line in _table([_group_row(group) for group in mine], left=4)]
    return lines


def _group_row(group: CopyGroup) -> list[str]:
    word = {"sends": "to ", "receives": "from ", "local": ""}[group.direction]
    return [
        group.tensor.replace("{layer}", _layers(group.layers)),
        " x ".join(map(str, group.block)),
        f"{group.copies:,} of {_bytes(group.size // group.copies)}",
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


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{topic:<10}{text}" for topic, text in rows]


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows in columns, the first ``left`` and none of the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def _bytes(size: float) -> str:
    """With the largest unit that leaves a digit before the point; a kB is 1,000 bytes."""
    unit = next((unit for unit in _UNITS if size >= unit[0]), None)
    return f"{size / unit[0]:,.1f} {unit[1]}" if unit else f"{size:.0f} B"


def _seconds(seconds: float) -> str:
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"
