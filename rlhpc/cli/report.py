"""``rlhpc report`` and ``note``. Imports click only; the rest when a command runs."""

from __future__ import annotations

from pathlib import Path

import click

from rlhpc.cli.options import complete_runs
from rlhpc.cli.output import echo


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option(
    "--out", metavar="FILE", help="Page to write; default: report/report.html of the run, report.html for several runs."
)
def report(*, runs: tuple[str, ...], out: str | None) -> None:
    """Write a page of runs: curves, timeline, events, placement, samples, configuration.

    RUN is a run folder, a run name or a job id. The page is one HTML file that opens without server and network.
    See docs/watch.md.
    """
    from rlhpc.core.errors import UserError
    from rlhpc.launch.runs.run_registry import find_runs
    from rlhpc.observe.page.document import write_own_page, write_page

    folders = list({run.folder.path: run.folder for text in runs for run in find_runs(text)}.values())
    if out is None and len(folders) == 1:
        write_own_page(folders[0])
        echo(str(folders[0].page))
        return
    file = Path(out or "report.html")
    if not file.parent.is_dir() or file.is_dir():
        problem = "is a folder" if file.is_dir() else "its folder does not exist"
        raise UserError(problem, where=f"--out {file}", remedy="give the path of a file in an existing folder")
    write_page(folders, file)
    echo(str(file))


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("text")
def note(*, run: str, text: str) -> None:
    """Add a note to a run at its present step.

    RUN is a run folder, a run name or a job id. The page of the run shows the note on its curves.
    """
    from rlhpc.launch.runs.run_registry import find_run
    from rlhpc.observe.notes import add_note

    found = find_run(run)
    added = add_note(found.folder, text)
    echo(f"{found.name}: note after {added.phase} step {added.step}")
