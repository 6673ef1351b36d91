"""Plain text in columns, and numbers in words. Torch-free, imports nothing else of rlhpc."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


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
