"""Runs tiers in two concurrent lanes: ``python -m tests.tiers.lanes NAME [ARGUMENT OF PYTEST …]``.

Two test processes keep both cores busy: tests of ranks use both but wait in between, those on a real Slurm mostly wait
for its timers. The table of durations divides the files, so that each lane collects only its own. A cluster is in the
second lane only. The second lane's output is shown after the first lane has ended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tiers import durations
from tests.tiers.durations import TIERS, Measured, Row
from tests.tiers.imports import ROOT, is_test_file, tracked_files

FOLDER = Path("build", "lanes")
_NAMES = {"check": TIERS[:1], "test": TIERS[:2], "test-all": TIERS}
_NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Lanes:
    """Two lists of test files or functions to run at the same time. ``until``: start none later; ``end``: stop all
    then. Tiers depend on other functions of a file, so that files are collected whole."""

    name: str
    tiers: Sequence[str]
    tests: Sequence[Sequence[str]]
    until: float | None = None
    end: float | None = None

    def file(self, lane: int) -> Path:
        """Measurements of a lane."""
        return FOLDER / f"{self.name}-{lane + 1}.json"

    def run(self, options: Sequence[str] = ()) -> int:
        """Exit code: 0 if both lanes passed, else 1."""
        began, codes = time.monotonic(), []
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as output:
            streams = [{}, {"stdout": output, "stderr": subprocess.STDOUT}]
            processes = []
            for lane, tests in enumerate(self.tests):
                self.file(lane).unlink(missing_ok=True)
                if tests:
                    files = dict.fromkeys(test.partition("::")[0] for test in tests)
                    command = [sys.executable, "-m", "pytest", "-q", *self._options(lane), *options, *files]
                    processes.append(subprocess.Popen(command, cwd=ROOT, **streams[lane]))
            try:
                for process in processes:
                    codes.append(process.wait(self.end and max(1.0, self.end - time.time())))
            except subprocess.TimeoutExpired:
                print(f"{self.name}: ended before all tests were done", file=sys.stderr)
                codes.append(1)
            finally:
                for process in processes:
                    process.terminate()
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
        print(f"{self.name}: {(time.monotonic() - began) / 60:.1f} minutes, exit codes {codes}", flush=True)
        return 0 if set(codes) <= {0, _NO_TESTS} else 1

    def _options(self, lane: int) -> list[str]:
        # With "=": before reading conftest.py, pytest would take a separate word for a test file.
        options = [f"--tiers={','.join(self.tiers)}", f"--write-durations={self.file(lane)}"]
        if self.until is not None:
            options.append(f"--start-until={self.until}")
        if functions := [test for test in self.tests[lane] if "::" in test]:
            selected = self.file(lane).with_suffix(".txt")
            selected.write_text("\n".join(functions), encoding="utf-8")
            options.append(f"--functions={selected}")
        return options


def divide(table: Iterable[Row], tiers: Collection[str], named: Iterable[str], files: Iterable[str]) -> list[list[str]]:
    """Files of both lanes: those with a row in the tiers or a function on the page of capabilities, and in the first
    lane also those with a function that has no row. ``files``: all test files."""
    table, files = list(table), set(files)
    divided = durations.lanes(row for row in table if row.tier in tiers and row.file in files)
    found = [sorted({row.file for row in lane}) for lane in divided]
    known = {row.function for row in table}
    wanted = {name.partition("::")[0] for name in named if "test" in tiers}
    for file in sorted(files - {*found[0], *found[1]}):
        text = (ROOT / file).read_text(encoding="utf-8")
        functions = {f"{file}::{name}" for name in re.findall(r"^def (test_\w+)", text, re.M)}
        if file in wanted or functions - known:
            found[0].append(file)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.lanes", description=__doc__)
    parser.add_argument("name", choices=_NAMES)
    parser.add_argument("--only", nargs="+", metavar="FILE", help="these test files instead of all")
    parser.add_argument(
        "--record", action="store_true", help="store the durations in the table; budgets are not checked"
    )
    options, rest = parser.parse_known_args(arguments)
    tiers = _NAMES[options.name]
    files = options.only or [file for file in tracked_files() if is_test_file(file)]
    tests = divide(durations.read_table(), tiers, durations.named_functions(), files)
    lanes = Lanes(options.name, tiers, tests)
    code = lanes.run([*rest, *(["--without-budgets"] if options.record else [])])
    if options.record:
        written = [file for file in map(lanes.file, range(2)) if file.exists()]
        durations.record(map(Measured.read, written))
        print(durations.summary(durations.read_table()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
