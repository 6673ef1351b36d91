"""The table keeps to the budgets, slices are of equal length, and a test that outgrows its budget fails the run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.ci import slice_count, slice_of_commit
from tests.tiers.durations import (
    BUDGETS,
    Row,
    machine_factor,
    merged,
    outgrown,
    read_table,
    slices,
    write_table,
)
from tests.tiers.test_imports import commit, git

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tier", BUDGETS)
def test_the_recorded_time_of_a_tier_is_within_its_budget(tier: str) -> None:
    rows = [row for row in read_table() if row.tier == tier]
    assert rows
    assert sum(row.seconds for row in rows) <= BUDGETS[tier].total
    assert max(row.seconds for row in rows) <= BUDGETS[tier].function


def test_every_function_is_in_one_slice_and_slices_are_of_equal_length() -> None:
    random.seed(1)
    rows = [
        Row("long", f"tests/test_{file}.py::test_{number}", 1, random.lognormvariate(1, 1))
        for file in range(30)
        for number in range(random.randrange(1, 12))
    ]
    for count in (1, 2, 3, 5):
        parts = slices(rows, count)
        assert sorted(function for part in parts for function in part) == sorted(row.function for row in rows)
        loads = [sum(row.seconds for row in rows if row.function in part) for part in parts]
        assert max(loads) <= 1.1 * sum(loads) / count
        assert slices(list(reversed(rows)), count) == parts


def test_the_slices_of_the_table_are_of_equal_length() -> None:
    rows = [row for row in read_table() if row.tier == "long"]
    count = slice_count(sum(row.seconds for row in rows))
    loads = [sum(row.seconds for row in rows if row.function in part) for part in slices(rows, count)]
    assert max(loads) - min(loads) <= max(row.seconds for row in rows)


def test_a_table_is_read_as_it_was_written_and_takes_over_what_was_measured(tmp_path: Path) -> None:
    table = [Row("test", "t.py::a", 2, 3.0), Row("long", "t.py::a", 4, 9.0), Row("check", "t.py::gone", 1, 1.0)]
    write_table(table, tmp_path / "table.tsv")
    assert {*read_table(tmp_path / "table.tsv")} == {*table}
    present = [("test", "t.py::a"), ("long", "t.py::a"), ("check", "t.py::new")]
    now = merged(table, [Row("test", "t.py::a", 3, 4.0), Row("check", "t.py::new", 1, 0.5)], present)
    assert {*now} == {Row("test", "t.py::a", 3, 4.0), Row("long", "t.py::a", 4, 9.0), Row("check", "t.py::new", 1, 0.5)}


def test_a_slow_machine_is_distinguished_from_a_slow_test() -> None:
    table = [Row("test", f"t.py::{n}", 1, 2.0 + n) for n in range(9)]
    three_times = [Row("test", f"t.py::{n}", 1, 3 * (2.0 + n)) for n in range(8)]
    assert machine_factor(table, three_times) == pytest.approx(3)
    limit = BUDGETS["test"].function
    assert not outgrown(table, [*three_times, Row("test", "t.py::8", 1, 2.9 * limit)], 3.0)
    (line,) = outgrown(table, [*three_times, Row("test", "t.py::8", 1, 3.1 * limit)], 3.0)
    assert line.startswith("t.py::8 took ")
    known = [Row("test", "t.py::8", 1, 0.9 * limit)]
    assert not outgrown(known, [Row("test", "t.py::8", 1, 8.9 * limit)], 3.0), "slowed down more than the others"
    assert outgrown(known, [Row("test", "t.py::8", 1, 9.1 * limit)], 3.0)
    assert machine_factor(table, [Row("test", "t.py::1", 1, 0.1)]) == 1.0  # a faster one does not shrink budgets


def test_commits_in_a_row_see_every_slice_and_a_shallow_clone_one_of_them(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "whole")
    whole, seen = tmp_path / "whole", []
    for number in range(6):
        (whole / "file").write_text(str(number))
        commit(whole, str(number))
        seen.append(slice_of_commit(3, whole))
    assert seen == [2, 3, 1, 2, 3, 1]
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{whole}", "shallow")
    expected = int(git(whole, "rev-parse", "HEAD"), 16) % 3 + 1
    assert slice_of_commit(3, tmp_path / "shallow") == expected


MODULE = """
import pytest
@pytest.mark.parametrize("n", range(25))
def test_quick(n): pass
def test_slow(): pass
@pytest.fixture(scope="module")
def run(): pass
@pytest.fixture(scope="module")
def other(run): pass
@pytest.mark.ranks
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.long)])
def test_named(run, tmp_path, n): pass
@pytest.mark.ranks
def test_same_run(run): pass
@pytest.mark.ranks
def test_other_run(other, tmp_path): pass
@pytest.mark.long
def test_repeated(run): pass
"""
PAGE = "| a capability | `tests/test_module.py::test_named` |\n"
CONFTEST = """
import pytest
from pathlib import Path
from tests.tiers import durations, plugin
plugin._CAPABILITIES = Path(__file__).with_name("page.md")
durations.BUDGETS["check"] = durations.Budget(60, 20)
plugin._LEAST_ROWS = 2
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.duration = {seconds} if item.name == "test_slow" and call.when == "call" else 0.001
    return report
def pytest_configure(config): config.pluginmanager.register(plugin.Tiers(config), "tiers")
def pytest_addoption(parser): plugin.add_options(parser)
"""


def _pytest(folder: Path, *options: str, seconds: float = 0.0) -> tuple[int, str]:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(CONFTEST.format(seconds=seconds))
    (folder / "page.md").write_text(PAGE)
    (folder / "tests/test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("tiers", "tests"),
    [
        ("check", {"test_quick", "test_slow"}),
        ("test", {"test_named", "test_same_run"}),
        ("more", {"test_other_run"}),
        ("long", {"test_named", "test_repeated"}),
        ("more,long", {"test_other_run", "test_named", "test_repeated"}),
    ],
)
def test_a_row_of_the_page_and_its_fixture_bring_functions_into_make_test(
    tmp_path: Path, tiers: str, tests: set[str]
) -> None:
    code, shown = _pytest(tmp_path, "--collect-only", f"--tiers={tiers}")
    assert code == 0
    assert {name.partition("[")[0] for name in re.findall(r"test_module.py::(.*)", shown)} == tests


def test_a_tier_that_is_none_is_refused(tmp_path: Path) -> None:
    assert _pytest(tmp_path, "--tiers=test,short")[0] == pytest.ExitCode.USAGE_ERROR


def test_a_test_that_outgrows_its_budget_fails_the_run(tmp_path: Path) -> None:
    code, shown = _pytest(tmp_path, "--tiers=check,test", seconds=20.6)
    assert code == 1
    assert "test_module.py::test_slow took 20.6 s" in shown
    code, shown = _pytest(tmp_path, "--tiers=check,test")
    assert (code, "OUTGREW" in shown) == (0, False), shown


def test_nothing_starts_after_the_time_for_it_and_what_is_left_is_named(tmp_path: Path) -> None:
    code, shown = _pytest(tmp_path, "--start-until", str(time.time() - 1))
    assert code == 0
    assert "31 skipped" in shown
    assert "31 tests were not started: time limit" in shown
    assert "test_module.py::test_repeated" in shown


def test_a_new_test_that_the_table_does_not_know_is_in_the_first_slice(tmp_path: Path) -> None:
    assert "2 passed" in _pytest(tmp_path, "--tiers=long", "--slice", "1/2")[1]
    assert _pytest(tmp_path, "--tiers=long", "--slice", "2/2")[0] == 5
