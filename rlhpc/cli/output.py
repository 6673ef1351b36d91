"""Output of commands: printable text, JSON, tables, numbers in words. Imports click only.

The fields of each command's JSON are in docs/scripting.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlhpc.core.text import printable

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Prints text in which control characters are replaced: names, logs and messages in it may be of others."""
    click.echo(printable(text), nl=nl, err=err)


def json_text(value: Any, indent: int | None = 2) -> str:
    """The value as JSON; null in place of NaN and infinities, which JSON does not have."""
    return json.dumps(_finite(value), indent=indent, default=str).replace("\x7f", r"\u007f")


def run_printing(run: Callable[[], int], result: Path, *, as_json: bool) -> int:
    """Exit code of ``run``. With ``as_json`` its progress goes to stderr, the JSON file that it writes to stdout."""
    if not as_json:
        return run()
    with contextlib.redirect_stdout(sys.stderr):
        code = run()
    if not code:
        echo(json_text(json.loads(result.read_text(encoding="utf-8"))))
    return code


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(one) for one in value]
    return value


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each label with its text."""
    return [f"{label:<10}{text}" for label, text in rows]


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows in columns, aligned to the right except for the columns in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size_text(size: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point; a kB is 1,000 bytes."""
    unit = next((unit for unit in _UNITS if size >= unit[0]), None)
    return f"{size / unit[0]:,.1f} {unit[1]}" if unit else f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time with three digits."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    rounded = float(f"{seconds:.3g}")  # 0.9996 s are 1 s, not 1e+03 ms
    scale, unit = (1.0, "s") if rounded >= 1 else (1e3, "ms") if rounded >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"
