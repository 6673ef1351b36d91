"""Output of commands. Imports click only."""

from __future__ import annotations

import click

from rlhpc.core.text import printable


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Prints text in which control characters are replaced: names, logs and messages in it may be of others."""
    click.echo(printable(text), nl=nl, err=err)
