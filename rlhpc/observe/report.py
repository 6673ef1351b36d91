"""Table of a finished evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.observe.evaluation import BY_SET, BY_SOURCE, OVERALL

_WIDTH = 110


def write_evaluation(folder: RunFolder, metrics: Mapping[str, float]) -> None:
    """Writes report/report.txt: a row for each metric, a column for all prompts and for each group of them."""
    from rich import box
    from rich.table import Table

    from rlhpc.core.terminal import Terminal

    groups: dict[str, dict[str, float]] = {}
    for path, value in metrics.items():
        group, _, name = path.rpartition("/")
        groups.setdefault(group, {})[name] = value
    table = Table(title="Evaluation on held-out prompts", title_justify="left", title_style="", box=box.ASCII2)
    table.add_column("metric", overflow="fold")
    for group in groups:
        table.add_column(group.removeprefix(BY_SET).removeprefix(BY_SOURCE) or "all", overflow="fold")
    for name in groups[OVERALL]:
        table.add_row(name, *(_number(found.get(name)) for found in groups.values()))
    console = Terminal(width=_WIDTH, color_system=None, file=(text := StringIO()))
    console.print(table)
    console.print(f"Samples: {folder.samples}", soft_wrap=True)
    folder.report.mkdir(parents=True, exist_ok=True)
    write_atomic(folder.report_text, text.getvalue())


def _number(value: float | None) -> str:
    """Number with four digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
