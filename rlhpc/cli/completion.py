"""``rlhpc completion``, and what the shell completes besides commands and options. Imports click only at startup."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from rlhpc.cli.echo import echo
from rlhpc.core import env

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    For bash put `eval "$(rlhpc completion bash)"` into ~/.bashrc, for zsh the same with zsh into ~/.zshrc after
    compinit; for fish write the output to ~/.config/fish/completions/rlhpc.fish.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    echo(kind(ctx.find_root().command, {}, "rlhpc", env.RLHPC_COMPLETE).source())


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

    from rlhpc.cli.configs import shipped_files

    return [CompletionItem(name) for name in shipped_files() if name.startswith(incomplete)]
