"""pytest plugin: tiers, a time limit, durations and budgets."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers import session, warm
from tests.tiers.durations import (
    CAPABILITIES,
    TIERS,
    Measured,
    Row,
    named_functions,
    outgrown,
    read_table,
    recorded_work,
)
from tests.tiers.meter import Meter, fixed_work

RESOURCES = {
    "heavy": "takes seconds of CPU time in pytest's own process",
    "workers": "starts worker processes: of rewards, of a sandbox, of a conversion",
    "ranks": "starts processes of ranks",
    "vllm": "starts a vLLM engine",
    "slurm": "needs a real Slurm on this machine",
    "gpu": "needs a GPU",
}
_LONG = "further layouts and repetitions of what `make test` proves once; in `make test-all` and in parts of CI"
_WORK_INTERVAL = 20.0  # seconds between measurements of the machine's speed
_LEFT = "not started: time limit"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tiers", metavar="TIER,…", type=_tiers, help=f"run tests of these tiers: {', '.join(TIERS)}")
    group.addoption("--functions", metavar="FILE", type=Path, help="run only the functions that the file lists")
    group.addoption("--write-durations", metavar="FILE", type=Path, help="write durations, and check budgets")
    group.addoption("--vllm-releases", metavar="V,…", help="releases for tests/cuda_sources, with all families")
    group.addoption("--without-budgets", action="store_true", help="do not fail a run that exceeds its budget")
    group.addoption("--start-until", type=float, metavar="TIME", help="start no test after this time (since 1970)")


def _tiers(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(TIERS):
        raise argparse.ArgumentTypeError(f"no tier: {', '.join(sorted(unknown))}")
    return text.split(",")


def tiers_of(items: Iterable[pytest.Item], named: set[str]) -> dict[str, str]:
    """Tier of each test, by node id.

    ``long``: marked so. ``check``: no marker of a resource. ``test``: a row of the page of capabilities names the
    function, or a function of its file that requests the same fixture of module scope. ``more``: all others.
    """
    items = list(items)
    shared = {fixture for item in items if function_of(item) in named for fixture in _module_fixtures(item)}
    tiers = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "long" in marks:
            tier = "long"
        elif not marks & RESOURCES.keys():
            tier = "check"
        else:
            tier = "test" if function_of(item) in named or shared & _module_fixtures(item) else "more"
        tiers[item.nodeid] = tier
    return tiers


def _module_fixtures(item: pytest.Item) -> set[tuple[str, str]]:
    """Fixtures of module scope among the arguments of a test, with its file."""
    if not isinstance(item, pytest.Function):
        return set()
    known, file = item._fixtureinfo.name2fixturedefs, item.nodeid.partition("::")[0]
    requested = [(name, known[name][-1]) for name in item._fixtureinfo.argnames if name in known]
    return {(file, name) for name, fixture in requested if fixture.baseid and fixture.scope == "module"}


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _select(config: pytest.Config, items: list[pytest.Item], keep: list[pytest.Item]) -> None:
    kept = {id(item) for item in keep}
    if left := [item for item in items if id(item) not in kept]:
        config.hook.pytest_deselected(items=left)
        items[:] = keep


class Tiers:
    """The plugin, registered for every run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file: Path | None = config.getoption("--write-durations")
        self._meter = Meter() if self._file else None
        self._work = [fixed_work()] if self._file else []
        self._worked = time.monotonic()
        self._tiers: dict[str, str] = {}
        self._resources: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._cpu: dict[tuple[str, str], float] = defaultdict(float)
        self._cases: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._outgrown: list[str] = []
        self._left: dict[str, None] = {}
        for name, meaning in {**RESOURCES, "long": _LONG}.items():
            config.addinivalue_line("markers", f"{name}: {meaning}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Record all tests before ``-m`` selects, and select those of the tiers."""
        self._tiers = tiers_of(items, named_functions(CAPABILITIES))
        for item in items:
            self._resources[self._key(item)].update(mark.name for mark in item.iter_markers() if mark.name in RESOURCES)
        if tiers := config.getoption("--tiers"):
            _select(config, items, [item for item in items if self._tiers[item.nodeid] in tiers])
        if file := config.getoption("--functions"):
            functions = set(file.read_text(encoding="utf-8").splitlines())
            _select(config, items, [item for item in items if function_of(item) in functions])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """In tests of ranks and their fixtures, fork what launchers and runs start."""
        session.markers = {mark.name for mark in item.iter_markers()}
        if "ranks" in session.markers:
            sys.executable = str(warm.python())
            if self._meter:
                warm.await_imports()  # not a part of this test's seconds
        began = self._cpu_seconds()
        try:
            return (yield)
        finally:
            session.markers, sys.executable = None, warm.INTERPRETER
            self._cpu[self._key(item)] += self._cpu_seconds() - began
            if self._meter and time.monotonic() > self._worked + _WORK_INTERVAL:
                self._work.append(fixed_work(1))
                self._worked = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        until = self._config.getoption("--start-until")
        if until is not None and time.time() > until:
            self._left[item.nodeid] = None
            pytest.skip(_LEFT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._tiers and report.nodeid not in self._left:  # else a process of xdist ran it
            key = (self._tiers[report.nodeid], report.nodeid.partition("[")[0])
            self._seconds[key] += report.duration
            self._cases[key] |= {report.nodeid} if report.when == "call" and not report.skipped else set()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._file is None or self._meter is None:
            return
        rows = [
            Row(*key, "+".join(sorted(self._resources[key])), len(self._cases[key]), round(seconds, 3), self._cpu[key])
            for key, seconds in self._seconds.items()
        ]
        if self._meter.seconds() is None:
            rows = []
        run = Measured(rows, set(self._resources), statistics.mean(self._work), len(self._left))
        run.write(self._file)
        if not self._config.getoption("--without-budgets"):
            self._outgrown = outgrown(read_table(), run, max(1.0, run.work / recorded_work()))
            if self._outgrown and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        if self._meter:
            self._meter.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._meter and self._meter.seconds() is None:
            terminalreporter.write_sep("!", "CPU SECONDS WERE NOT MEASURED: no control group may be made", red=True)
        if self._outgrown:
            terminalreporter.write_sep("!", "TESTS THAT OUTGREW THEIR BUDGET", red=True, bold=True)
            for line in self._outgrown:
                terminalreporter.write_line(line)
        if self._left:
            terminalreporter.write_sep("-", f"{len(self._left)} tests were not started: time limit")
            for name in self._left:
                terminalreporter.write_line(name)

    def _key(self, item: pytest.Item) -> tuple[str, str]:
        return self._tiers[item.nodeid], function_of(item)

    def _cpu_seconds(self) -> float:
        return (self._meter.seconds(but=warm.servers()) if self._meter else None) or 0.0
