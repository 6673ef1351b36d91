"""Options that several commands share, and what the shell completes of their values. Imports click only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlhpc.cli.output import echo

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rlhpc.config.schema import RunConfig

T = TypeVar("T", bound=Callable[..., Any])


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs; folders where no name fits. Reads no run folder."""
    from click.shell_completion import CompletionItem

    from rlhpc.launch.runs.run_registry import known_names

    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in known_names() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or complete_files(ctx, param, incomplete)


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, by the shell itself."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of shipped configurations and job scripts."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in shipped_files() if name.startswith(incomplete)]


def shipped_files() -> dict[str, Path]:
    """Configs (``dapo``) and job scripts (``grpo.sbatch``) by name, in the order of the list."""
    from rlhpc.core.files import shipped

    folder = shipped("configs")
    found = sorted(folder.rglob("*.yaml"), key=lambda file: (file.parent != folder, file))
    scripts = sorted(shipped("sbatch").glob("*.sbatch"))
    return {file.stem: file for file in found} | {file.name: file for file in scripts}


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
        from rlhpc.cli.output import json_text

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
