"""``rlhpc samples``. Imports click only; the rest when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import JSON, complete_runs, grouped
from rlhpc.cli.output import echo

if TYPE_CHECKING:
    from rlhpc.cli.sample_view import Source

Record = dict[str, Any]


@dataclass(frozen=True)
class _Which:
    """Options on which steps are meant."""

    training: bool
    step: int | None
    diff: tuple[int, int] | None


@dataclass(frozen=True)
class _Choice:
    """Options on which samples of a step are shown, and in which order."""

    where: tuple[str, ...]
    wrong: bool
    truncated: bool
    source: str | None
    search: str | None
    sort: str | None
    limit: int


@dataclass(frozen=True)
class _Output:
    """Options on how they are shown."""

    follow: bool
    as_json: bool


@click.command()
@click.argument("run_or_file", metavar="RUN_OR_FILE", shell_complete=complete_runs)
@click.option("--training", is_flag=True, help="Samples of training steps; default: those of validations.")
@click.option("--step", type=int, metavar="N", help="Samples of this step; default: the last one that has any.")
@click.option("--diff", nargs=2, type=int, metavar="A B", help="Compare two steps by prompt, the largest loss first.")
@click.option("--where", multiple=True, metavar="CONDITION", help="Only such samples: 'reward < 0.5'; repeatable.")
@click.option("--wrong", is_flag=True, help="Only incorrect responses.")
@click.option("--truncated", is_flag=True, help="Only truncated responses.")
@click.option("--source", metavar="NAME", help="Only samples of this data source or named set.")
@click.option("--search", metavar="TEXT", help="Only samples with this text in prompt, response or answer.")
@click.option("--sort", metavar="[-]COLUMN", help="Order by a column, such as reward or -length (greatest first).")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of samples.")
@click.option("--follow", is_flag=True, help="Show samples of new steps until the run ends.")
@JSON
@grouped(which=_Which, choice=_Choice, output=_Output)
def samples(*, run_or_file: str, which: _Which, choice: _Choice, output: _Output) -> None:
    """Show prompts with their responses.

    RUN_OR_FILE is a run or an evaluation, by folder, name or job id, or a file of samples. A condition compares a
    column with a number or a text: < <= > >= = !=, ~ (contains), !~.
    """
    from rlhpc.cli.sample_view import find_source

    source = find_source(run_or_file, training=which.training)
    if output.follow:
        _follow(source, which, choice, output)
    elif which.diff is not None:
        _compare(source, which.diff, choice, as_json=output.as_json)
    else:
        _print_step(source, source.step(which.step), choice, as_json=output.as_json)


def _print_step(source: Source, step: int, choice: _Choice, *, as_json: bool, indent: int | None = 2) -> None:
    from rlhpc.cli.output import json_text
    from rlhpc.cli.sample_view import show_samples

    found = _selected(source.read(step), choice)
    shown = found[: choice.limit]
    if as_json:
        outline = {"kind": source.kind, "step": step, "file": str(source.file(step)), "matching": len(found)}
        echo(json_text({**outline, "samples": shown}, indent))
        return
    show_samples(shown)
    what = "samples of step" if source.kind == "validation" else "training samples of step"
    echo(f"{len(shown)} of {len(found)} {what} {step}: {source.file(step)}")


def _compare(source: Source, steps: tuple[int, int], choice: _Choice, *, as_json: bool) -> None:
    from rlhpc.cli.output import json_text
    from rlhpc.cli.sample_view import show_pairs
    from rlhpc.core.errors import UserError
    from rlhpc.observe.sample_choice import pairs

    before, after = (source.read(source.step(step)) for step in steps)
    if not pairs(before, after):
        remedy = "compare validations, or steps of different epochs"
        raise UserError(f"steps {steps[0]} and {steps[1]} have no prompt in common", where="--diff", remedy=remedy)
    found = pairs(_selected(before, choice), _selected(after, choice))
    shown = found[: choice.limit]
    if as_json:
        prompts = [{"change": pair.change, "before": pair.before, "after": pair.after} for pair in shown]
        echo(json_text({"kind": source.kind, "steps": steps, "matching": len(found), "prompts": prompts}))
        return
    show_pairs(shown, steps)
    echo(f"{len(shown)} of {len(found)} prompts that steps {steps[0]} and {steps[1]} have in common")


def _follow(source: Source, which: _Which, choice: _Choice, output: _Output) -> None:
    """Shows the newest step, then each new one."""
    import time

    from rlhpc.cli.status import POLL_SECONDS, run_over
    from rlhpc.core.errors import UserError

    if which.step is not None or which.diff is not None or source.run is None:
        what = "a file" if source.run is None else "--step" if which.step is not None else "--diff"
        raise UserError(f"applies to new steps of a run, not to {what}", where="--follow", remedy="leave one out")
    over, seen = run_over(source.run), set(source.marks()[:-1])
    try:
        while True:
            last = over()
            for mark in source.marks():
                if mark not in seen:
                    _print_step(source, mark[0], choice, as_json=output.as_json, indent=None)
                seen.add(mark)
            if last:
                return
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        echo(err=True)


def _selected(records: list[Record], choice: _Choice) -> list[Record]:
    """The samples that all conditions hold for, in the order asked for."""
    from rlhpc.core.errors import UserError, did_you_mean
    from rlhpc.observe.sample_choice import contains, in_order, is_wrong, read_conditions

    conditions = read_conditions(choice.where, records)
    names = {str(record.get(key)) for record in records for key in ("source", "set")} - {"", "None"}
    if choice.source is not None and choice.source not in names:
        remedy = did_you_mean(choice.source, names)
        raise UserError(f"no data source or set {choice.source!r}", where="--source", remedy=remedy)
    found: Sequence[Any] = [
        record
        for record in records
        if (choice.source is None or choice.source in (record.get("source"), record.get("set")))
        and not (choice.wrong and not is_wrong(record))
        and not (choice.truncated and not record.get("truncated"))
        and (choice.search is None or contains(record, choice.search))
        and all(condition.holds(record) for condition in conditions)
    ]
    return list(in_order(found, choice.sort) if choice.sort is not None else found)
