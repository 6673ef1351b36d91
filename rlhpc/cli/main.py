"""The ``rlhpc`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from rlhpc import __version__
from rlhpc.cli.completion import completion
from rlhpc.cli.configs import configs
from rlhpc.cli.convert import convert
from rlhpc.cli.echo import echo
from rlhpc.cli.eval import evaluate
from rlhpc.cli.init import init
from rlhpc.cli.options import CHECK_JSON, CONFIG, OVERRIDES, REPLAY, grouped, print_checks, replayed
from rlhpc.cli.plan import plan
from rlhpc.cli.profile import profile
from rlhpc.cli.replay import replay
from rlhpc.cli.report import note, report
from rlhpc.cli.samples import samples
from rlhpc.cli.status import cancel, logs, status
from rlhpc.cli.study import study
from rlhpc.cli.submit import resume, submit
from rlhpc.cli.sync import sync
from rlhpc.cli.watch import watch
from rlhpc.core.errors import EXIT_DOES_NOT_FIT, EXIT_USER_ERROR, DoesNotFitError, UserError
from rlhpc.core.exits import EXIT_STORAGE
from rlhpc.core.inputs import unreadable
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import show, use_escapes
from rlhpc.core.storage import Patience, kind_of, use

_COMMAND_SECONDS = 30.0  # a user is waiting; a run has its own limit


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlhpc", message="%(prog)s %(version)s")
def cli() -> None:
    """Reinforcement-learning post-training of large language models on Slurm clusters."""


@dataclass(frozen=True)
class RunOptions:
    """Options of ``rlhpc run`` besides its configuration."""

    check: bool
    resume: bool
    as_json: bool


@cli.command()
@CONFIG
@OVERRIDES
@click.option("--check", is_flag=True, help="Check the configuration; start nothing.")
@click.option("--resume", is_flag=True, help="Resume the run in its folder from the newest checkpoint.")
@click.option("--run-dir", metavar="FOLDER", help="Run folder; default: run_dir of CONFIG.")
@REPLAY
@CHECK_JSON
@grouped(options=RunOptions)
def run(
    *, config: str, overrides: tuple[str, ...], run_dir: str | None, replay: str | None, options: RunOptions
) -> None:
    """Run CONFIG, a YAML file, on this machine.

    KEY.SUB=VALUE overrides a key of CONFIG.
    """
    from pathlib import Path

    from rlhpc.config.load import load_with_site

    given = load_with_site(Path(config), overrides)
    loaded = replayed(given.config, replay)
    if run_dir is not None:
        loaded = loaded.model_copy(update={"run_dir": Path(run_dir)})
    if options.check:
        from rlhpc.launch.machine import profile_warnings, with_local_ranks
        from rlhpc.launch.runs.preflight import check_architectures, check_ground_truths, serving
        from rlhpc.plan.checks.run import check_config

        loaded, ranks = with_local_ranks(loaded)
        lines = check_config(loaded, prepared=loaded.prepare is None, starting=False, workdir=Path.cwd())
        lines += [("ranks", ranks)] if ranks else []
        lines += serving(loaded)
        lines += [("site", given.site.text)] if given.site else []
        warnings = [*profile_warnings(loaded), *check_ground_truths([loaded]), *check_architectures([loaded])]
        print_checks(loaded, [*lines, *(("warning", text) for text in warnings)], as_json=options.as_json)
        return
    if options.as_json:
        raise UserError("applies to --check", where="--json", remedy="read metrics.jsonl in the run folder")
    from rlhpc.launch.runs.run import run_here

    sys.exit(run_here(loaded, resume=options.resume))


@cli.command()
@click.option("--site", is_flag=True, help="Print the schema of the site file.")
def schema(*, site: bool) -> None:
    """Print the JSON schema of the configuration for editors."""
    from rlhpc.config import load, site_file

    echo(site_file.json_schema() if site else load.json_schema(), nl=False)


_RUNS = (plan, submit, status, watch, logs, cancel, resume, evaluate, samples, profile, replay, report, note, sync)
for command in (*_RUNS, study, configs, convert, init, completion):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``rlhpc`` command, by default with the process's arguments: an error that the user can fix is
    one line and exit code 2, or 3 for a plan that does not fit."""
    use_escapes()
    guard_output()
    use(Patience(_COMMAND_SECONDS))
    try:
        cli(arguments, prog_name="rlhpc")
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        sys.exit(EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else EXIT_USER_ERROR)
    except OSError as error:
        if kind_of(error) == "permanent" and error.filename is not None:  # a path or permission of the user's
            show(f"rlhpc: {unreadable(error, error.filename)}", file=sys.stderr)
            sys.exit(EXIT_USER_ERROR)
        if kind_of(error) != "transient":
            raise
        show(f"rlhpc: {error}; the file system does not respond, try again later", file=sys.stderr)
        sys.exit(EXIT_STORAGE)
    except ModuleNotFoundError as error:  # a login node may have only what checks, submits and watches
        if error.name is None or error.name.partition(".")[0] == "rlhpc":
            raise
        needs = f"{error.name} is not installed in {sys.prefix}, but this command needs it (README, Install)"
        show(f"rlhpc: {needs}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
