"""pytest plugin: tiers, slices, a time limit, durations and budgets."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers import session, warm
from tests.tiers.durations import TABLE, TIERS, Row, machine_factor, outgrown, read_table, slices
from tests.tiers.imports import ROOT

RESOURCES = {
    "heavy": "takes seconds of CPU time in pytest's own process",
    "workers": "starts worker processes: of rewards, of a sandbox, of a conversion",
    "ranks": "starts processes of ranks",
    "vllm": "starts a vLLM engine",
    "slurm": "needs a real Slurm on this machine",
    "gpu": "needs a GPU",
}
_LONG = "further layouts and repetitions of what `make test` proves once; in `make test-all` and in slices of CI"
_CAPABILITIES = ROOT / "docs" / "capabilities.md"
_LEFT = "not started: time limit"
_LEAST_ROWS = 20  # of a run with checked budgets: fewer do not determine the machine's speed


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tiers", metavar="TIER,…", type=_tiers, help=f"run tests of these tiers: {', '.join(TIERS)}")
    group.addoption("--write-durations", metavar="FILE", help="write durations for tests.tiers.durations")
    group.addoption("--slice", metavar="I/N", help="run slice I (from 1) of N parts of equal duration")
    group.addoption("--vllm-releases", metavar="V,…", help="releases for tests/cuda_sources, with all families")
    group.addoption("--without-budgets", action="store_true", help="do not fail tests that exceed their budget")
    group.addoption("--start-until", type=float, metavar="TIME", help="start no test after this time (since 1970)")


def _tiers(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(TIERS):
        raise argparse.ArgumentTypeError(f"no tier: {', '.join(sorted(unknown))}")
    return text.split(",")


def tiers_of(items: Iterable[pytest.Item], page: Path) -> dict[str, str]:
    """Tier of each test, by node id.

    ``long``: marked so. ``check``: no marker of a resource. ``test``: a row of the page of capabilities names the
    function, or a function of its file that requests the same fixture of module scope. ``more``: all others.
    """
    items = list(items)
    named = set(re.findall(r"`(tests/\S+\.py::\w+)`", page.read_text(encoding="utf-8")))
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
        self._collected: set[tuple[str, str]] = set()
        self._tiers: dict[str, str] = {}
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._cases: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._outgrown: list[str] = []
        self._left: list[str] = []
        for name, meaning in {**RESOURCES, "long": _LONG}.items():
            config.addinivalue_line("markers", f"{name}: {meaning}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Record all tests before ``-m`` selects, and select those of the tiers and of the slice."""
        self._tiers = tiers_of(items, _CAPABILITIES)
        self._collected = {(self._tiers[item.nodeid], function_of(item)) for item in items}
        if tiers := config.getoption("--tiers"):
            _select(config, items, [item for item in items if self._tiers[item.nodeid] in tiers])
        selected = config.getoption("--slice")
        if selected is None:
            return
        part, count = (int(number) for number in selected.split("/"))
        rows = [row for row in read_table() if row.tier == "long"]
        known = {row.function for row in rows}
        wanted = slices(rows, count)[part - 1]
        keep = [item for item in items if function_of(item) in wanted or (function_of(item) not in known and part == 1)]
        _select(config, items, keep)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """In tests of ranks and their fixtures, fork what launchers and runs start."""
        session.markers = {mark.name for mark in item.iter_markers()}
        if "ranks" in session.markers:
            sys.executable = str(warm.python())
        try:
            return (yield)
        finally:
            session.markers, sys.executable = None, warm.INTERPRETER

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        until = self._config.getoption("--start-until")
        if until is not None and time.time() > until:
            self._left.append(item.nodeid)
            pytest.skip(_LEFT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            return
        key = (self._tiers.get(report.nodeid, "check"), report.nodeid.partition("[")[0])
        self._seconds[key] += report.duration
        self._cases[key].add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        rows = [Row(*key, len(self._cases[key]), round(seconds, 3)) for key, seconds in self._seconds.items()]
        file = self._config.getoption("--write-durations")
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            document = {
                "rows": [[r.tier, r.function, r.cases, r.seconds] for r in rows],
                "collected": sorted(self._collected),
            }
            Path(file).write_text(json.dumps(document), encoding="utf-8")
        if len(rows) >= _LEAST_ROWS and TABLE.exists() and not self._config.getoption("--without-budgets"):
            table = read_table()
            self._outgrown = outgrown(table, rows, machine_factor(table, rows))
            if self._outgrown and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._outgrown:
            terminalreporter.write_sep("!", "TESTS THAT OUTGREW THEIR BUDGET", red=True, bold=True)
            for line in self._outgrown:
                terminalreporter.write_line(line)
        if self._left:
            terminalreporter.write_sep("-", f"{len(self._left)} tests were not started: time limit")
            for name in self._left:
                terminalreporter.write_line(name)
