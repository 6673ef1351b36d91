"""``rlhpc acceptance``. Imports little at startup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.site.acceptance.part import Size


@click.command()
@click.argument("folder", required=False)
@click.option(
    "--part", "names", multiple=True, metavar="NAME", help="Run only this part, even if it is done; repeatable."
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="Time available: a part starts only if its limit still fits.",
)
@click.option(
    "--size", type=click.Choice(["full", "tiny"]), help="Size of the cases; default: full with a GPU, tiny without."
)
@click.option("--retry", is_flag=True, help="Rerun failed parts.")
@click.option("--strict", is_flag=True, help="Also exit with 1 for a missed goal.")
@click.option("--list", "lists", is_flag=True, help="List the parts and their limits without running them.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the results.")
def acceptance(
    folder: str | None,
    names: tuple[str, ...],
    minutes: float | None,
    size: str | None,
    retry: bool,
    strict: bool,
    lists: bool,
    schema: bool,
) -> None:
    """Measure what works on this machine and how fast, with results in FOLDER.

    FOLDER receives a page, the results as JSON, and a log. A later run with the same FOLDER, possibly on another
    machine, continues with the parts that are not done. See docs/acceptance.md.
    """
    from rlhpc.site.acceptance.driver import Options, accept, select
    from rlhpc.site.acceptance.results import json_schema
    from rlhpc.site.acceptance.table import PARTS

    if schema:
        click.echo(json_schema(), nl=False)
        return
    if lists:
        for part in select(PARTS, names):
            gpu = "GPU only" if part.needs_gpu else ""
            click.echo(f"{part.name:<15}{part.tier:<7}{part.minutes:>4g} min  {gpu:<10}{part.title}")
        return
    if folder is None:
        raise UserError("FOLDER is missing", where="rlhpc acceptance", remedy="name a folder for the results")
    options = Options(names, minutes, cast("Size | None", size), retry, strict)
    sys.exit(accept(Path(folder), PARTS, options))
