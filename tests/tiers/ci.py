"""Runs what `make test` leaves out, as far as time allows: ``python -m tests.tiers.ci --started TIME``.

First the tests beside what changed within a day and those that import it, the nearest first; then parts of the others.
CI is a clean clone without state, so the first part is a function of the commit: the number of commits modulo that of
parts; in a shallow clone, where commits cannot be counted, its hash instead. The next parts follow. No test starts
later than 28 minutes after TIME (seconds since 1970); minute 60 ends the run. Tests that did not start are counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.tiers.durations import Measured, Row, lanes, parts, read_table
from tests.tiers.imports import ROOT, changed_within_a_day, read_graph
from tests.tiers.lanes import Lanes

TIERS = ("more", "long")
START_UNTIL, END = 28 * 60.0, 60 * 60.0
_BEFORE = 180.0  # `make lint`, and installation of what the tests need
_PART_SHARE, _CHANGED_SHARE = 0.6, 0.4  # of the time left after `make test`


def time_left(table: Iterable[Row]) -> float:
    """Seconds between the end of `make test` and the last start of a test, on the machine of the table."""
    test = lanes(row for row in table if row.tier not in TIERS)
    return max(60.0, START_UNTIL - _BEFORE - max(sum(row.seconds for row in lane) for lane in test))


def nearest(rows: Iterable[Row], distance: Mapping[str, int], seconds: float) -> list[Row]:
    """Rows of files that have a distance, the nearest first and long ones last, for so many seconds in two lanes."""
    found, load = [], 0.0
    near = (row for row in rows if row.file in distance)
    for row in sorted(near, key=lambda row: (distance[row.file], TIERS.index(row.tier), row.function)):
        if load + row.seconds <= 2 * seconds:
            load += row.seconds
            found.append(row)
    return found


def part_of_commit(count: int, root: Path = ROOT) -> int:
    """Part that the current commit begins with, from 0."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    number = int(_git(root, "rev-parse", "HEAD"), 16) if shallow else int(_git(root, "rev-list", "--count", "HEAD"))
    return number % count


def plan(table: Sequence[Row], distance: Mapping[str, int], root: Path = ROOT) -> Iterator[tuple[str, list[Row]]]:
    """Parts by name, in the order in which the current commit runs them."""
    left = time_left(table)
    rows = [row for row in table if row.tier in TIERS]
    beside = nearest((row for row in rows if row.tier != "long"), distance, _CHANGED_SHARE * left)
    yield "changed", beside
    divided = parts(rows, _PART_SHARE * left)
    first = part_of_commit(len(divided), root)
    for number in [*range(first, len(divided)), *range(first)]:
        yield f"part-{number + 1}-of-{len(divided)}", [row for row in divided[number] if row not in beside]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_part(name: str, rows: Sequence[Row], started: float) -> tuple[int, int]:
    """Exit code, and number of tests that did not start."""
    cases = sum(row.cases for row in rows)
    if not rows or time.time() > started + START_UNTIL:
        return 0, cases
    tests = [list(dict.fromkeys(row.function for row in lane)) for lane in lanes(rows)]
    running = Lanes(name, TIERS, tests, started + START_UNTIL, started + END)
    code = running.run(["--no-header", "--durations=5", "--without-budgets"])
    files = [running.file(lane) for lane in range(2) if running.file(lane).exists()]
    return code, sum(Measured.read(file).left for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.ci", description=__doc__)
    parser.add_argument("--started", type=float, default=time.time(), help="start of CI, in seconds since 1970")
    started = parser.parse_args().started
    codes, lines = [], []
    for name, rows in plan(read_table(), read_graph().near(changed_within_a_day() or [])):
        code, left = run_part(name, rows, started)
        codes.append(code)
        lines.append(f"{name}: {sum(row.cases for row in rows)} tests, {left} not run, exit code {code}")
    print("\n".join([*lines, f"{(time.time() - started) / 60:.0f} minutes after the start"]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
