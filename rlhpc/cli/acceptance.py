"""``rlhpc acceptance``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from rlhpc.cli.echo import echo
from rlhpc.cli.options import grouped
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.site.acceptance.part import Size


@dataclass(frozen=True)
class _Options:
    """Options on which parts run, and how."""

    names: tuple[str, ...]
    minutes: float | None
    size: str | None
    retry: bool
    strict: bool


@click.command()
@click.argument("folder", required=False)
@click.option("--part", "names", multiple=True, metavar="NAME", help="Run only this part, even if done; repeatable.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="Time budget: a part starts only if its limit still fits.",
)
@click.option(
    "--size", type=click.Choice(["full", "tiny"]), help="Size of the cases; default: full with a GPU, tiny without."
)
@click.option("--retry", is_flag=True, help="Run failed parts again.")
@click.option("--strict", is_flag=True, help="Exit with 1 on a missed goal too.")
@click.option("--list", "lists", is_flag=True, help="List the parts with their limits; run nothing.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the results; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@grouped(selected=_Options)
def acceptance(*, folder: str | None, lists: bool, schema: bool, as_json: bool, selected: _Options) -> None:
    """Measure what works on this machine, and how fast.

    FOLDER gets a page, the results as JSON and a log. Run again with the same FOLDER, on another machine too, to
    continue with the parts that are left. See docs/acceptance.md.
    """
    from rlhpc.cli.json_text import json_text
    from rlhpc.site.acceptance.driver import Options, accept, select
    from rlhpc.site.acceptance.results import json_schema
    from rlhpc.site.acceptance.table import PARTS

    if schema:
        echo(json_schema(), nl=False)
        return
    if as_json and not lists:
        raise UserError("applies to --list", where="--json", remedy="read acceptance.json in the folder of the results")
    if as_json:
        fields = ("name", "title", "tier", "minutes", "needs_gpu")
        parts = select(PARTS, selected.names)
        echo(json_text([{field: getattr(part, field) for field in fields} for part in parts]))
        return
    if lists:
        for part in select(PARTS, selected.names):
            gpu = "GPU only" if part.needs_gpu else ""
            echo(f"{part.name:<15}{part.tier:<7}{part.minutes:>4g} min  {gpu:<10}{part.title}")
        return
    if folder is None:
        raise UserError("no folder for the results", where="rlhpc acceptance", remedy="name one")
    options = Options(
        names=selected.names,
        minutes=selected.minutes,
        size=cast("Size | None", selected.size),
        retry=selected.retry,
        strict=selected.strict,
    )
    sys.exit(accept(Path(folder), PARTS, options))
