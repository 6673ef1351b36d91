"""``rlhpc profile``. Imports click only; the rest when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhpc.cli.options import JSON, complete_runs, grouped
from rlhpc.cli.output import echo

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry
    from rlhpc.observe.profiles.index import RankProfile
    from rlhpc.observe.profiles.table import TraceTable

_NAME_LETTERS = 70


@dataclass(frozen=True)
class _Options:
    """Ranks, phases and tools of a profile."""

    ranks: str
    phases: str
    tools: str


@dataclass(frozen=True)
class _View:
    """Options on the output."""

    top: int
    as_json: bool


@click.command()
@click.argument("run_or_file", metavar="RUN_OR_FILE", shell_complete=complete_runs)
@click.argument("steps", required=False, metavar="[STEPS]")
@click.option("--ranks", default="0", show_default=True, help="Ranks: 0,8-15, or 0-95:8 for every eighth, or all.")
@click.option("--phases", default="", help="Phases, with commas between; default: the whole step.")
@click.option("--tools", default="torch", show_default=True, help="Tools: torch, memory, nsys, nvtx, py-spy.")
@click.option("--wait", is_flag=True, help="Wait for the profile, and print its table.")
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Rows of the table.")
@JSON
@grouped(options=_Options, view=_View)
def profile(*, run_or_file: str, steps: str | None, options: _Options, view: _View, wait: bool) -> None:
    """Profile coming steps of a running run, or list its profiles.

    RUN_OR_FILE is a run folder, a run name or a job id, or a trace, whose table is printed. STEPS: 40, 40-42, next
    for the step after the running one, +2 for the second after it. Without STEPS the profiles of the run are listed.
    """
    from rlhpc.launch.runs.run_registry import find_run

    if Path(run_or_file).is_file():
        _show_trace(Path(run_or_file), view)
        return
    run = find_run(run_or_file)
    if steps is None:
        _list(run, view)
    else:
        _ask(run, steps, options, view, wait=wait)


def _ask(run: RunEntry, steps: str, options: _Options, view: _View, *, wait: bool) -> None:
    from rlhpc.cli.output import json_text
    from rlhpc.launch.runs.profile import Wanted, ask, wait_for_answer, wait_for_profiles

    asked = ask(run, steps, Wanted(options.ranks, options.phases, options.tools))
    if not wait:
        if view.as_json:
            echo(json_text(asked.request.selection.as_json() | {"relative": asked.request.relative}))
        else:
            echo(f"{run.name}: asked for step {steps}; see `rlhpc profile {run.folder.path}`")
        return
    selection = wait_for_answer(asked)
    if not view.as_json:
        echo(f"{run.name}: step {selection.steps} will be profiled")
    profiles = wait_for_profiles(asked, selection)
    if view.as_json:
        echo(json_text([one.as_json() for one in profiles]))
        return
    _show(profiles)
    traces = [trace for one in profiles for trace in one.traces]
    for trace in traces[:1]:
        _show_trace(trace, view)


def _list(run: RunEntry, view: _View) -> None:
    from rlhpc.cli.output import json_text
    from rlhpc.core.profiles import read_answer, read_request
    from rlhpc.observe.profiles.index import read_profiles

    profiles = read_profiles(run.folder)
    if view.as_json:
        echo(json_text([one.as_json() for one in profiles]))
        return
    _show(profiles)
    if not profiles:
        echo("no profiles yet")
    request, answer = read_request(run.folder), read_answer(run.folder)
    if answer is not None and answer.refused:
        echo(f"refused: step {answer.selection.steps}: {answer.refused}")
    if request is not None and (answer is None or answer.id != request.id):
        echo("a request waits for the end of the present step")


def _show(profiles: list[RankProfile]) -> None:
    """A line for each file, with what is missing."""
    from rlhpc.cli.output import size_text, table

    rows = [
        (str(one.step), str(one.rank), size_text(file.stat().st_size), str(file))
        for one in profiles
        for file in one.files
        if file.is_file()
    ]
    if rows:
        echo("\n".join(table([("step", "rank", "size", "file"), *rows], left=(3,))))
    for one in profiles:
        for warning in one.warnings:
            echo(f"warning: step {one.step}, rank {one.rank}: {warning}")


def _show_trace(file: Path, view: _View) -> None:
    from rlhpc.cli.output import json_text
    from rlhpc.observe.profiles.table import read_trace, trace_table

    found = trace_table(read_trace(file))
    if view.as_json:
        echo(json_text(found.as_json()))
    else:
        echo("\n".join(_lines(file, found, view.top)))


def _lines(file: Path, found: TraceTable, top: int) -> list[str]:
    from rlhpc.cli.output import seconds_text, table
    from rlhpc.core.text import printable

    total = sum(row.seconds for row in found.rows) or 1.0
    what = "GPU kernels and copies" if found.device == "gpu" else "operators, without what they call"
    rows = [
        (
            f"{row.seconds / total:.1%}",
            seconds_text(row.seconds),
            str(row.calls),
            row.kind,
            printable(row.name)[:_NAME_LETTERS],
        )
        for row in found.rows[:top]
    ]
    shares = [
        (one.name, *map(seconds_text, (one.seconds, one.computation, one.communication, one.exposed)))
        for one in found.shares
    ]
    return [
        f"{file}: {what}",
        *table([("share", "time", "calls", "kind", "name"), *rows], left=(3, 4)),
        "",
        *table([("phase", "time", "computation", "communication", "of it exposed"), *shares]),
    ]
