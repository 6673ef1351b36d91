"""Writes the names of docs/metrics.md into rlhpc/observe/alerts/metric_names.txt, which rules of alerts are checked by.

python -m tools.metric_names
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "metrics.md", ROOT / "rlhpc" / "observe" / "alerts" / "metric_names.txt"
OF_RANKS = "## Numbers of each rank"
_ROW = re.compile(r"\| `([^`]+)` \|")
_NOT_METRICS = ("phase", "step", "total_steps", "time")


def names(page: str) -> list[str]:
    """Names in the tables of metrics, with those that a number of each rank has."""
    found, of_ranks = [], False
    for line in page.partition("\n## Samples")[0].splitlines():
        if line.startswith("## "):
            of_ranks = line == OF_RANKS
        if (match := _ROW.match(line)) and match[1] not in _NOT_METRICS:
            found += [f"{match[1]}_{kind}" for kind in ("mean", "max", "max_rank")] if of_ranks else [match[1]]
    return list(dict.fromkeys(found))


def text(page: str) -> str:
    """Contents of the file: a name a line."""
    return "".join(f"{name}\n" for name in names(page))


def main() -> None:
    FILE.write_text(text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
