"""Options that several commands share. Imports click only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

T = TypeVar("T", bound=Callable[..., Any])


class _Step(click.ParamType):
    """Number of a checkpoint, or ``best``."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "best" if value == "best" else int(click.INT.convert(value, param, ctx))


STEP = _Step()
CONFIG = click.argument("config")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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
