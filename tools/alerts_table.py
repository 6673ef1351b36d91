"""Rewrites the table of built-in rules in docs/watch.md from the code.

python -m tools.alerts_table
"""

from __future__ import annotations

from pathlib import Path

from rlhpc.observe.alerts.builtin import BUILTIN, JOB_EVENTS
from tools.markers import rewrite

PAGE, MARKER = Path(__file__).parents[1] / "docs" / "watch.md", "alerts-table"


def table() -> str:
    """Markdown with a row per built-in rule and event of the job."""
    rows = [f"| `{rule.name}` | {rule.text} | {rule.window} | {rule.severity} |" for rule in BUILTIN.values()]
    rows += [f"| `{name}` | {text} | event | {severity} |" for name, (text, severity) in JOB_EVENTS.items()]
    return "\n".join(["| rule | fires when | window | severity |", "| --- | --- | --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    rewrite(PAGE, MARKER, table())
