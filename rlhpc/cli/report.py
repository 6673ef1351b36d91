"""``rlhpc report``, ``profile`` and ``note``. Imports click only; the rest when a command runs."""

from __future__ import annotations

from pathlib import Path

import click

from rlhpc.cli.options import complete_runs
from rlhpc.cli.output import echo

_MOST_PROFILED = 1000  # steps


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
@click.option("--steps", type=click.IntRange(1, _MOST_PROFILED), default=1, show_default=True, help="Number of steps.")
def profile(*, run: str, steps: int) -> None:
    """Profile the coming steps of a running run.

    RUN is a run folder, a run name or a job id. The section profile of its configuration names ranks and tools.
    """
    from rlhpc.core import attempts
    from rlhpc.core.errors import UserError
    from rlhpc.core.files import make_folder, write_json
    from rlhpc.launch.run_lock import is_locked
    from rlhpc.launch.runs.run_registry import find_run

    found = find_run(run)
    folders = attempts.folders(found.folder)
    verdict = attempts.read_verdict(folders[-1]) if folders else None
    ended = verdict is not None and verdict.action in ("none", "stop")
    if ended or (found.job is None and not is_locked(found.folder)):
        raise UserError("the run is over", where=found.name, remedy="set profile.steps, and resume it")
    make_folder(found.folder.profiles)
    write_json(found.folder.profile_request, {"steps": steps})
    coming = "the next step" if steps == 1 else f"the next {steps} steps"
    echo(f"{found.name}: asked for profiles of {coming}, in {found.folder.profiles}")


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
