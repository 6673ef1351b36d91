"""``rlhpc plan``. Little is imported before it runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhpc.config.schema import RunConfig
    from rlhpc.models import ModelShape
    from rlhpc.plan.weight_sync_report import Bandwidths, CopyGroup, WeightSyncReport

_GB = 10**9
_SPEEDS = (50.0, 450.0, 4000.0)  # GB/s of network, node and memory where no GPU is named
_SPEED = click.FloatRange(min=0, min_open=True)
_PARTNERS, _WIDTH = 24, 140  # characters
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--reshard", is_flag=True, help="What moves when the engines get new weights.")
@click.option("--rank", type=int, metavar="N", help="With --reshard: what this rank copies, sends and receives.")
@click.option("--network", type=_SPEED, help="With --reshard: GB/s of a rank to other nodes, one way.")
@click.option("--node", type=_SPEED, help="With --reshard: GB/s of a rank inside its node, one way.")
@click.option("--memory", type=_SPEED, help="With --reshard: GB/s that a rank reads and writes.")
@click.option("--gpu", metavar="NAME", help="Predict times for this GPU; default: planning.gpu, slurm.gpu_type.")
@click.option("--search", "searches", is_flag=True, help="The five fastest layouts that fit, as YAML.")
@click.option("--sweep", metavar="gpus=A..B", help="The same run on A to B GPUs, as a table and a plot.")
@click.option("--plot", metavar="FILE", help="With --sweep: where the plot goes; default: NAME-sweep.png.")
@click.option("--calibrate", metavar="RUN", help="Fit site.efficiency to the finished run in this folder.")
@click.option("--json", "as_text", is_flag=True, help="Print JSON, for programs.")
def plan(
    config: str,
    overrides: tuple[str, ...],
    reshard: bool,
    rank: int | None,
    network: float | None,
    node: float | None,
    memory: float | None,
    gpu: str | None,
    searches: bool,
    sweep: str | None,
    plot: str | None,
    calibrate: str | None,
    as_text: bool,
) -> None:
    """Predict a run of CONFIG, a YAML file, from it and the model's config.json; weights may be elsewhere.

    See docs/planning.md for what is predicted, and how well.

    Bandwidths that --reshard is not told are those of the GPU that is named; without one, of a 400 Gb/s adapter and
    fourth-generation NVLink for each GPU and of an H100's or H200's memory.
    """
    from rlhpc.config.load import load_config

    loaded = load_config(Path(config), overrides)
    asked = {"--reshard": reshard, "--search": searches, "--sweep": bool(sweep), "--calibrate": bool(calibrate)}
    if sum(asked.values()) > 1:
        several = [name for name, there in asked.items() if there]
        raise UserError(f"cannot be combined with {several[0]}", where=several[1], remedy="use one of them")
    if plot is not None and sweep is None:
        raise UserError("is for a plot of several numbers of GPUs", where="--plot", remedy="add --sweep")
    speeds = {"--network": network, "--node": node, "--memory": memory}
    only = next((name for name, value in {"--rank": rank, **speeds}.items() if value is not None), None)
    if only is not None and not reshard:
        raise UserError("is for what moves", where=only, remedy="add --reshard")
    for name, value in speeds.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"{value} is not allowed", where=name, remedy="give GB/s, a number above 0")
    if reshard:
        lines = _moved(loaded, gpu, rank, list(speeds.values()), as_text)
    elif searches:
        lines = _search(loaded, gpu, as_text)
    elif sweep is not None:
        lines = _sweep(loaded, gpu, sweep, plot, as_text)
    elif calibrate is not None:
        lines = _calibrate(loaded, gpu, calibrate, as_text)
    else:
        lines = _predicted(loaded, gpu, as_text)
    click.echo("\n".join(lines))


def _moved(
    config: RunConfig, gpu: str | None, rank: int | None, speeds: Sequence[float | None], as_text: bool
) -> list[str]:
    """``speeds`` in GB/s, of network, node and memory; None: the GPU's."""
    from rlhpc.plan.estimates.hardware import named_gpu, read_site
    from rlhpc.plan.weight_sync_report import Bandwidths, as_json, report_weight_sync

    found = named_gpu(config, read_site(config), gpu)
    known = (found.network_gbps, found.node_gbps, found.memory_gbps) if found else _SPEEDS
    told = [own if speed is None else speed for own, speed in zip(known, speeds, strict=True)]
    bandwidths = Bandwidths(*(speed * _GB for speed in told))
    report = report_weight_sync(config, rank)
    if as_text:
        return [json.dumps(as_json(report, bandwidths, rank), indent=2)]
    return _report(report, bandwidths) if rank is None else _rank_lines(report, rank)


def _predicted(config: RunConfig, gpu: str | None, as_text: bool) -> list[str]:
    """Layout, batches and model; the memory of each phase; the time of a step where a GPU is named."""
    from rlhpc.cli.plan_memory import memory_json, render_memory
    from rlhpc.cli.plan_time import run_json, step_json, step_lines
    from rlhpc.plan.checks.run import check_layout, outline
    from rlhpc.plan.estimates.hardware import Reserves, host_limit
    from rlhpc.plan.estimates.memory import predict_memory
    from rlhpc.plan.remedies import find_remedies
    from rlhpc.plan.scenario import case_of

    rows, case = outline(config), case_of(config, gpu)
    rl = config.train.steps > 0
    shape = case.shape if case else _read_shape(config)
    layout = case.layout if case else check_layout(config, config.slurm.most_nodes, shape)
    step = case.step() if case and rl else None
    gib, reserves = (case.gpu.memory_gib, case.gpu.reserves) if case else (None, Reserves())
    memory = predict_memory(config, shape, layout, gib, reserves)
    host = host_limit(config, case.gpu if case else None)
    if as_text:
        times = {"time": step_json(step), "run": run_json(case.run(step))} if case and step else {}
        return [json.dumps({**dict(rows), "memory": memory_json(memory, host), **times}, indent=2)]
    lines = _aligned(rows)
    if not rl:
        lines += _aligned([("time", "is predicted of RL steps, of which there are none (train.steps)")])
    elif case is None or step is None:
        lines += _aligned([("time", "of a step is predicted for a GPU that is named: --gpu h200, or planning.gpu")])
    else:
        lines += step_lines(case, step)
    remedies = find_remedies(config, shape, layout, memory)
    return [*lines, "", *_rendered(render_memory(memory, gib, remedies, host))]


def _read_shape(config: RunConfig) -> ModelShape:
    from rlhpc.models import read_model

    return read_model(config.model.path, config.model.family)


def _rendered(what: RenderableType) -> list[str]:
    """Lines of it as wide as they are, whatever the terminal."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=_WIDTH, color_system=None, highlight=False).print(what)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _search(config: RunConfig, gpu: str | None, as_text: bool) -> list[str]:
    from rlhpc.cli.plan_time import found_on, needed_machine, search_json, search_lines

    shape, found_gpu, site = needed_machine(config, gpu, "--search")
    found = found_on(config, shape, found_gpu, site.efficiency)
    if as_text:
        return [json.dumps(search_json(found), indent=2)]
    return search_lines(config, found_gpu, found, _as_configured(config, gpu))


def _as_configured(config: RunConfig, gpu: str | None) -> str:
    """What is searched need not be able to run as it is."""
    from rlhpc.cli.plan_time import asked_text, needed_case

    try:
        return asked_text(needed_case(config, gpu, "--search"))
    except UserError as error:
        return f"cannot run ({error.where}: {error.message})"


def _sweep(config: RunConfig, gpu: str | None, numbers: str, file: str | None, as_text: bool) -> list[str]:
    from rlhpc.cli.plan_time import needed_case, sweep_json, sweep_lines, swept

    case, path = needed_case(config, gpu, "--sweep"), Path(file or f"{config.name}-sweep.png")
    points, plotted = swept(case, numbers, path)
    return [json.dumps(sweep_json(points), indent=2)] if as_text else sweep_lines(points, plotted)


def _calibrate(config: RunConfig, gpu: str | None, run: str, as_text: bool) -> list[str]:
    from rlhpc.cli.plan_time import calibrate_json, calibrate_lines, calibrated, needed_case

    found = calibrated(needed_case(config, gpu, "--calibrate"), Path(run))
    return [json.dumps(calibrate_json(found), indent=2)] if as_text else calibrate_lines(found)


def _report(report: WeightSyncReport, bandwidths: Bandwidths) -> list[str]:
    """The whole job's movement, some twenty lines."""
    from rlhpc.plan.weight_sync_report import BYTES

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


def _layouts(report: WeightSyncReport) -> list[tuple[str, str]]:
    training, engine = report.training, report.engine
    cut = ", whole experts on each rank" if engine.expert_parallel else ""
    over = f" over {report.engine_nodes} nodes" if report.engine_nodes > 1 else ""
    rollout = f"{report.engines} engine(s) of tp {engine.tp}{cut}{over}, on the same ranks"
    nodes = training.world_size // report.ranks_per_node
    return [
        ("ranks", f"{training.world_size} on {nodes} node(s) of {report.ranks_per_node}"),
        ("training", training.text),
        ("rollout", rollout),
    ]


def _bytes_row(report: WeightSyncReport, kind: str) -> list[str]:
    titles = {"across": "  across nodes", "within": "  inside a node", "local": "copied in place"}
    spread = report.spread(kind)
    sizes = map(_bytes, (spread.least, spread.mean, spread.most))
    busiest = f"rank {spread.busiest}" if spread.most else "none"
    return [titles.get(kind.rpartition("_")[2], kind), *sizes, busiest, _bytes(spread.total)]


def _rank_lines(report: WeightSyncReport, rank: int) -> list[str]:
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
