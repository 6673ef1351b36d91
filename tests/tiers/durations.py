"""The table of durations: seconds of every test function by tier, from which budgets and slices follow.

``python -m tests.tiers.durations`` prints each tier's time and its longest tests; ``record FILE …`` stores measurements
of runs (``build/durations-*.json``). Record on a quiet machine: ``make durations``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIERS = ("check", "test", "more", "long")  # in the order of the commands that run them first
TABLE = Path(__file__).with_name("durations.tsv")


@dataclass(frozen=True)
class Budget:
    """Maximum seconds of a tier's tests in total, on two quiet cores in two concurrent lanes, and of one test function.
    With lanes of 900 seconds each, `make test` takes a quarter of an hour."""

    total: float
    function: float


# A tier also runs the tests of earlier tiers; the budget is for its own tests.
BUDGETS = {
    "check": Budget(400.0, 15.0),
    "test": Budget(1500.0, 90.0),
    "more": Budget(1500.0, 90.0),
    "long": Budget(6400.0, 400.0),
}
_LEAST_SECONDS = 1.0  # of a row that counts for the machine's speed


@dataclass(frozen=True)
class Row:
    """One test function in a tier: its number of cases, and their seconds including fixtures."""

    tier: str
    function: str  # tests/x/test_y.py::test_z
    cases: int
    seconds: float

    @property
    def file(self) -> str:
        return self.function.partition("::")[0]


def read_table(path: Path = TABLE) -> list[Row]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [Row(tier, function, int(cases), float(seconds)) for tier, function, cases, seconds in rows]


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    ordered = sorted(rows, key=lambda row: (list(BUDGETS).index(row.tier), row.function))
    lines = [f"{row.tier}\t{row.function}\t{row.cases}\t{row.seconds:.2f}" for row in ordered]
    path.write_text("\n".join(["tier\tfunction\tcases\tseconds", *lines]) + "\n", encoding="utf-8")


def merged(table: Iterable[Row], measured: Sequence[Row], present: Iterable[tuple[str, str]]) -> list[Row]:
    """The table updated with measurements, without functions no longer ``present`` in their tier."""
    rows = {(row.tier, row.function): row for row in [*table, *measured]}
    return [rows[key] for key in set(present) & rows.keys()]


def machine_factor(table: Iterable[Row], measured: Iterable[Row]) -> float:
    """Slowdown of this machine relative to the table's, median over functions, at least 1."""
    recorded = {(row.tier, row.function): row for row in table}
    ratios = []
    for row in measured:
        known = recorded.get((row.tier, row.function))
        if known is not None and known.cases == row.cases and known.seconds >= _LEAST_SECONDS:
            ratios.append(row.seconds / known.seconds)
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def outgrown(table: Iterable[Row], measured: Iterable[Row], factor: float) -> list[str]:
    """Functions that exceed their tier's budget, corrected for the machine's speed, and ten times their recorded time:
    beside other processes some slow down more than the median."""
    recorded = {(row.tier, row.function): row.seconds for row in table}
    return [
        f"{row.function} took {row.seconds:.1f} s; a test of the tier {row.tier} may take"
        f" {BUDGETS[row.tier].function * factor:.0f} s here: make it cheaper, or mark what is repeated as long"
        for row in measured
        if row.seconds > max(BUDGETS[row.tier].function * factor, 10 * recorded.get((row.tier, row.function), 0.0))
    ]


def slices(rows: Iterable[Row], count: int) -> list[set[str]]:
    """Functions in ``count`` parts of about equal duration, files kept together if possible.

    Files go, longest first, to the part with the shortest time. A file longer than a part is split by function.
    """
    rows = list(rows)
    of_file: Counter[str] = Counter()
    for row in rows:
        of_file[row.file] += row.seconds  # type: ignore[assignment]
    most = sum(of_file.values()) / count
    groups: dict[str, tuple[float, set[str]]] = {}
    for row in rows:
        key = row.file if of_file[row.file] <= most / 2 else row.function
        seconds, functions = groups.get(key, (0.0, set()))
        groups[key] = (seconds + row.seconds, functions | {row.function})
    loads, parts = [0.0] * count, [set[str]() for _ in range(count)]
    for key in sorted(groups, key=lambda key: (-groups[key][0], key)):
        seconds, functions = groups[key]
        least = loads.index(min(loads))
        loads[least] += seconds
        parts[least] |= functions
    return parts


def summary(rows: Sequence[Row], most: int = 12) -> str:
    """Time of each tier and its longest functions."""
    lines = []
    for tier, budget in BUDGETS.items():
        own = sorted((row for row in rows if row.tier == tier), key=lambda row: -row.seconds)
        total, cases = sum(row.seconds for row in own), sum(row.cases for row in own)
        lines.append(f"{tier}: {cases} tests, {total:.0f} s of {budget.total:.0f} s")
        lines += [f"  {row.seconds:7.1f} s  {row.function} ({row.cases})" for row in own[:most]]
    return "\n".join(lines)


def _read_measured(files: Sequence[str]) -> tuple[list[Row], set[tuple[str, str]]]:
    """Rows of all runs, where later ones take precedence, and the (tier, function) pairs collected by the last run."""
    rows: dict[tuple[str, str], Row] = {}
    present: set[tuple[str, str]] = set()
    for file in files:
        document: Mapping[str, list] = json.loads(Path(file).read_text(encoding="utf-8"))
        rows |= {(row[0], row[1]): Row(*row) for row in document["rows"]}
        present = {(tier, function) for tier, function in document["collected"]}
    return list(rows.values()), present


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["record"]:
        measured, present = _read_measured(arguments[1:])
        write_table(merged(read_table() if TABLE.exists() else [], measured, present))
    print(summary(read_table()))


if __name__ == "__main__":
    main(sys.argv[1:])
