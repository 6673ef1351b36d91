"""The ``rlhpc`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from rlhpc import __version__
from rlhpc.cli.convert import convert
from rlhpc.cli.eval import evaluate
from rlhpc.cli.plan import plan
from rlhpc.cli.report import note, profile, report
from rlhpc.cli.run import cancel, resume, run, submit
from rlhpc.cli.samples import samples
from rlhpc.cli.setup import completion, configs, init, schema
from rlhpc.cli.status import logs, status
from rlhpc.cli.study import study
from rlhpc.core.errors import EXIT_DOES_NOT_FIT, EXIT_USER_ERROR, DoesNotFitError, UserError
from rlhpc.core.exits import EXIT_STORAGE
from rlhpc.core.inputs import unreadable
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import show, use_escapes
from rlhpc.core.storage import Patience, kind_of, use

_COMMAND_SECONDS = 30.0  # a user is waiting; a run has its own limit
_GROUPS = {
    "Run": (run, submit, resume, cancel),
    "Look": (status, logs, report, samples, note, profile),
    "Plan": (plan,),
    "Models": (convert, evaluate),
    "Studies": (study,),
    "Set-up": (init, configs, schema, completion),
}
# Former commands, and what to use instead.
_FORMER = {
    "watch": "use `rlhpc status RUN --follow`, or `watch -n 10 rlhpc status` for the table of all runs",
    "replay": "read the run's log or update.json in its folder skipped_updates, which name the samples at fault",
    "sync": "send what trackers lack with `python -m rlhpc.observe.trackers RUN_FOLDER`, upload with `wandb sync`",
}


class _Grouped(click.Group):
    """A group whose help lists the commands under titles."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name. Raises UserError for a former one."""
        if cmd_name in _FORMER:
            raise UserError("this command was removed", where=cmd_name, remedy=_FORMER[cmd_name])
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each title."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(str(each.name), each.get_short_help_str(limit)) for each in commands])


@click.group(cls=_Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlhpc", message="%(prog)s %(version)s")
def cli() -> None:
    """Reinforcement-learning post-training of large language models on Slurm clusters."""


for command in (each for commands in _GROUPS.values() for each in commands):
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
