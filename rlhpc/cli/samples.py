"""``rlhpc samples``. Imports click only; the rest when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

Record = dict[str, Any]


@click.command()
@click.argument("run_or_file", metavar="RUN_OR_FILE")
@click.option("--step", type=int, metavar="N", help="Samples of the validation after this step; default: the last one.")
@click.option("--wrong", is_flag=True, help="Only incorrect responses.")
@click.option("--source", metavar="NAME", help="Only samples of this data source or named set.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of samples.")
def samples(*, run_or_file: str, step: int | None, wrong: bool, source: str | None, limit: int) -> None:
    """Show held-out prompts with their responses.

    RUN_OR_FILE is a run or an evaluation, by folder, name or job id, or a file of samples.
    """
    from rlhpc.core.errors import UserError, did_you_mean

    file = _file_of(run_or_file)
    steps = {record["step"] for record in _read(file)}
    step = max(steps, default=0) if step is None else step
    if step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(f"no samples of step {step}", where=str(file), remedy=f"steps with samples: {there}")
    of_step = [record for record in _read(file) if record["step"] == step]
    names = {str(record.get(key)) for record in of_step for key in ("source", "set")} - {"", "None"}
    if source is not None and source not in names:
        raise UserError(f"no data source or set {source!r}", where="--source", remedy=did_you_mean(source, names))
    selected = [
        record
        for record in of_step
        if (source is None or source in (record.get("source"), record.get("set")))
        and not (wrong and record.get("correct", record["reward"] > 0))
    ]
    _show(selected[:limit])
    click.echo(f"{min(limit, len(selected))} of {len(selected)} samples of step {step}: {file}")


def _file_of(text: str) -> Path:
    """The file of a run's samples, or the file itself."""
    from rlhpc.core.errors import UserError
    from rlhpc.launch.runs.run_registry import find_run

    if Path(text).is_file():
        return Path(text)
    file = find_run(text).folder.samples
    if not file.is_file():
        raise UserError(
            "no samples yet", where=text, remedy="wait for the first validation, which needs data.validation"
        )
    return file


def _read(file: Path) -> Iterator[Record]:
    """Records of the complete lines."""
    import json

    from rlhpc.core.errors import UserError

    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                record["step"], record["reward"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    "not a sample", where=f"{file}:{number}", remedy="give a run or its samples.jsonl"
                ) from None
            yield record


def _show(records: list[Record]) -> None:
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    from rlhpc.core.text import printable

    console = Console(highlight=False)
    for number, record in enumerate(records, 1):
        words = [f"{number}", f"reward {record['reward']:g}"]
        words += [f"{name} {value:g}" for name, value in (record.get("parts") or {}).items()]
        words += [str(record[key]) for key in ("set", "source") if record.get(key)]
        words += ["truncated"] if record.get("truncated") else []
        right = record.get("correct", record["reward"] > 0)
        console.print(Rule(Text(" | ".join(words)), align="left", style="green" if right else "red"))
        for key in ("prompt", "response", "expected"):
            console.print(Text.assemble((f"{key:<10}", "bold"), printable(str(record.get(key, "")))))
