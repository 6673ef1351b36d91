"""``rlhpc samples``. Imports click only; the rest when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from rlhpc.cli.options import JSON, complete_runs, grouped
from rlhpc.cli.output import echo

Record = dict[str, Any]


@dataclass(frozen=True)
class _Choice:
    """Options on which samples of a step are shown."""

    wrong: bool
    truncated: bool
    source: str | None
    search: str | None
    limit: int


@click.command()
@click.argument("run_or_file", metavar="RUN_OR_FILE", shell_complete=complete_runs)
@click.option("--training", is_flag=True, help="Samples of training steps; default: those of validations.")
@click.option("--step", type=int, metavar="N", help="Samples of this step; default: the last one that has any.")
@click.option("--wrong", is_flag=True, help="Only incorrect responses.")
@click.option("--truncated", is_flag=True, help="Only truncated responses.")
@click.option("--source", metavar="NAME", help="Only samples of this data source or named set.")
@click.option("--search", metavar="TEXT", help="Only samples with this text in prompt, response or answer.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of samples.")
@JSON
@grouped(choice=_Choice)
def samples(*, run_or_file: str, training: bool, step: int | None, choice: _Choice, as_json: bool) -> None:
    """Show prompts with their responses.

    RUN_OR_FILE is a run or an evaluation, by folder, name or job id, or a file of samples. For conditions of your own,
    read the files with pyarrow (docs/evaluation.md).
    """
    from rlhpc.cli.output import json_text
    from rlhpc.cli.sample_view import find_source, show_samples

    source = find_source(run_or_file, training=training)
    step = source.step(step)
    found = _selected(source.read(step), choice)
    shown = found[: choice.limit]
    if as_json:
        outline = {"kind": source.kind, "step": step, "file": str(source.file(step)), "matching": len(found)}
        echo(json_text({**outline, "samples": shown}))
        return
    show_samples(shown)
    what = "samples of step" if source.kind == "validation" else "training samples of step"
    echo(f"{len(shown)} of {len(found)} {what} {step}: {source.file(step)}")


def _selected(records: list[Record], choice: _Choice) -> list[Record]:
    """The samples that all options allow, in their order."""
    from rlhpc.cli.sample_view import is_wrong
    from rlhpc.core.errors import UserError, did_you_mean

    names = {str(record.get(key)) for record in records for key in ("source", "set")} - {"", "None"}
    if choice.source is not None and choice.source not in names:
        remedy = did_you_mean(choice.source, names)
        raise UserError(f"no data source or set {choice.source!r}", where="--source", remedy=remedy)
    return [
        record
        for record in records
        if (choice.source is None or choice.source in (record.get("source"), record.get("set")))
        and not (choice.wrong and not is_wrong(record))
        and not (choice.truncated and not record.get("truncated"))
        and (choice.search is None or _contains(record, choice.search))
    ]


def _contains(record: Mapping[str, Any], text: str) -> bool:
    """True if prompt, response, answer or ground truth contains the text, in upper or lower case."""
    texts = (record.get(name) for name in ("prompt", "response", "answer", "expected"))
    return any(text.casefold() in str(found).casefold() for found in texts if found is not None)
