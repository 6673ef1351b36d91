"""Options that several commands share. Imports click only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlhpc.cli.completion import complete_files, complete_runs
from rlhpc.cli.echo import echo

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig

T = TypeVar("T", bound=Callable[..., Any])


class _Step(click.ParamType):
    """Number of a checkpoint, or ``best``."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "best" if value == "best" else int(click.INT.convert(value, param, ctx))


STEP = _Step()
CONFIG = click.argument("config", shell_complete=complete_files)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
REPLAY = click.option(
    "--replay",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Follow the recorded order of RUN's generation, for equal weights.",
)
CHECK_JSON = click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")


def replayed(config: RunConfig, replay: str | None) -> RunConfig:
    """The configuration, or the one that replays a run."""
    if replay is None:
        return config
    from rlhpc.launch.runs.derived_runs import with_replay
    from rlhpc.launch.runs.run_registry import find_run

    return with_replay(config, find_run(replay).folder)


def print_checks(config: RunConfig, lines: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """Prints what a check found, by topic; warnings have the topic ``warning``."""
    if as_json:
        from rlhpc.cli.json_text import json_text

        outline = [{"topic": topic, "text": text} for topic, text in lines if topic != "warning"]
        warnings = [text for topic, text in lines if topic == "warning"]
        named = {"name": config.name, "folder": str(config.folder)}
        echo(json_text({**named, "outline": outline, "warnings": warnings}))
        return
    for topic, text in lines:
        echo(f"{topic:<8}{text}")


def grouped(**kinds: Any) -> Callable[[T], Callable[..., None]]:
    """Innermost decorator of a command: passes the options that are fields of a dataclass as one value of it, by the
    keyword of the dataclass here."""

    def decorate(command: T) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            groups = {
                name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
                for name, kind in kinds.items()
            }
            command(**groups, **given)

        return call

    return decorate
