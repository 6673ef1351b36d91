"""The table of all algorithms shows the stored results of their runs."""

from __future__ import annotations

from tools.algorithm_table import entry, table
from tools.demo_table import Result


def test_a_row_for_each_algorithm_has_the_range_of_its_seeds() -> None:
    kept = {
        "ppo": {"0": entry(Result(0, 0.25, 0.96875, 100, 90.4)), "10": entry(Result(10, 0.3, 0.85, 100, 80.0))},
        "grpo": {"2": entry(Result(2, 0.3, 1.0, 80, 70.0))},
    }
    assert table(kept).splitlines()[2:] == [
        "| `grpo` | 30.0% | 100.0% | 1 | 80 |",
        "| `ppo` | 25.0%-30.0% | 85.0%-96.9% (missed) | 2 | 100 |",
    ]
