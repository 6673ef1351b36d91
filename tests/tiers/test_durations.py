"""The table keeps to the budgets, lanes and parts have equal durations, and a run that outgrows its budget fails."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.ci import nearest, part_of_commit, plan, run_part, time_left
from tests.tiers.durations import (
    OWN_LIMITS,
    TIERS,
    Measured,
    Row,
    lane_budget,
    lanes,
    merged,
    named_functions,
    outgrown,
    parts,
    read_table,
    record,
    recorded_work,
    write_table,
)
from tests.tiers.lanes import Lanes, divide
from tests.tiers.test_imports import commit, git

ROOT = Path(__file__).parents[2]


def seconds(rows: list[Row]) -> float:
    return sum(row.seconds for row in rows)


def some_rows(tiers: tuple[str, ...] = ("more", "long")) -> list[Row]:
    random.seed(1)
    kinds = ["", "heavy", "ranks", "ranks+vllm", "slurm"]
    return [
        Row(random.choice(tiers), f"tests/{file % 7}/test_{file}.py::test_{number}", kind, 1, 3 * random.random(), 1.0)
        for file, kind in enumerate(random.choices(kinds, k=200))
        for number in range(random.randrange(1, 12))
    ]


def test_recorded_functions_and_lanes_are_within_their_budgets() -> None:
    rows = [row for row in read_table() if row.tier in ("check", "test")]
    assert not [f"{row.function}: {row.cpu}" for row in rows if row.cpu > row.limit]
    assert max(map(seconds, lanes(rows))) <= lane_budget(len(named_functions()))
    assert recorded_work() > 0


def test_limits_of_single_functions_are_of_functions_in_the_table() -> None:
    assert OWN_LIMITS.keys() <= {row.function for row in read_table()}


def test_only_further_capabilities_raise_the_budget_of_a_lane() -> None:
    assert [lane_budget(named) for named in (100, 132, 133, 142, 1000)] == [650, 650, 656, 710, 850]


def test_lanes_have_equal_durations_and_one_has_all_clusters() -> None:
    rows = some_rows()
    first, second = lanes(rows)
    assert sorted(row.key for row in first + second) == sorted(row.key for row in rows)
    assert not {row.file for row in first} & {row.file for row in second}
    assert "slurm" in {row.resources for row in second} - {row.resources for row in first}
    assert abs(seconds(first) - seconds(second)) < 0.03 * seconds(rows)


def test_every_function_is_in_one_part_and_parts_have_equal_durations() -> None:
    rows = some_rows()
    for limit in (2000.0, 300.0, 100.0):
        found = parts(rows, limit)
        assert sorted(row.key for part in found for row in part) == sorted(row.key for row in rows)
        assert len(found) == -int(-seconds(rows) / 2 // limit)
        assert max(map(seconds, found)) <= 1.1 * seconds(rows) / len(found)
        assert parts(rows[::-1], limit) == found


def test_lanes_have_files_of_the_tiers_and_of_the_page_and_of_functions_without_a_row() -> None:
    table = [row for row in read_table() if (ROOT / row.file).exists()]
    short = {row.file for row in table if row.tier in ("check", "test")}
    named, unknown, other = [row for row in table if row.tier == "more" and row.file not in short][:30:10]
    known = [row for row in table if row.function != unknown.function]
    first, second = divide(known, ("check", "test"), {named.function}, {row.file for row in table})
    assert short | {named.file, unknown.file} <= {*first, *second}
    assert other.file not in {*first, *second}
    assert not {*first} & {*second}


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [Row("test", "t.py::a", "ranks+vllm", 2, 3.0, 4.5), Row("check", "t.py::b", "", 1, 1.0, 0.25)]
    write_table(rows, 1.25, tmp_path / "table.tsv")
    assert {*read_table(tmp_path / "table.tsv")} == {*rows}
    assert recorded_work(tmp_path / "table.tsv") == 1.25


def test_a_run_replaces_rows_of_the_files_that_it_collected(tmp_path: Path) -> None:
    table = [
        *(Row("more", f"t.py::{name}", "ranks", 4, 9.0, 9.0) for name in ("measured", "moved", "skipped", "gone")),
        Row("check", "other.py::a", "", 1, 1.0, 1.0),
    ]
    now = [Row("more", "t.py::measured", "ranks", 3, 4.0, 5.0), Row("check", "t.py::new", "", 1, 0.5, 0.5)]
    skipped = [Row("more", "t.py::skipped", "gpu", 0, 0.0, 0.0), Row("more", "t.py::new_skipped", "gpu", 0, 0.0, 0.0)]
    collected = {*(row.key for row in now + skipped), ("test", "t.py::moved")}
    run = Measured([*now, *skipped], collected, 1.0)
    run.write(tmp_path / "run.json")
    assert Measured.read(tmp_path / "run.json") == run
    assert {*merged(table, [run])} == {
        *now,
        skipped[1],
        Row("test", "t.py::moved", "ranks", 4, 9.0, 9.0),
        *(row for row in table if row.function in ("t.py::skipped", "other.py::a")),
    }


def test_a_run_of_some_files_is_recorded_at_the_speed_of_the_table(tmp_path: Path) -> None:
    files = [f"tests/tiers/test_{name}.py" for name in ("durations", "imports")]
    rows = [Row("check", f"{file}::a", "", 1, 3.0, 4.0) for file in files]
    table = tmp_path / "table.tsv"
    for measured, work, cpu in ((rows[:1], 1.0, [2.0, 4.0]), (rows, 2.0, [4.0, 4.0])):
        write_table(rows, 1.0, table)
        record([Measured(measured, {row.key for row in measured}, 2.0)], table)
        assert recorded_work(table) == work
        assert [row.cpu for row in read_table(table)] == cpu


def test_a_run_is_compared_with_the_table_relative_to_the_machine() -> None:
    table = [Row("test", f"t.py::{number}", "", 1, 1.0, 4.0) for number in range(10)]

    def found(*cpu: float, factor: float = 1.0) -> list[str]:
        rows = [Row("test", f"t.py::{number}", "", 1, 1.0, value) for number, value in enumerate(cpu)]
        return outgrown(table, Measured(rows, {row.key for row in rows}, 1.0), factor)

    assert found(*[4.9] * 10) == found(7.9, *[4.0] * 9) == found(*[9.0] * 10, 0.0, factor=2.0)[1:] == []
    assert found(*[5.1] * 9) == ["all functions took 46 CPU seconds, recorded: 36"]
    assert found(8.1, *[4.0] * 9) == ["t.py::0 took 8.1 CPU seconds, recorded: 4.0"]
    assert not found(8.1, *[4.0] * 9, factor=1.1)
    assert found(*[4.0] * 11) == ["t.py::10 has no row: make durations ARGS='--only t.py'"]


def test_commits_in_a_row_begin_with_every_part_and_a_shallow_clone_with_one(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "whole")
    whole, seen = tmp_path / "whole", []
    for number in range(6):
        (whole / "file").write_text(str(number))
        commit(whole, str(number))
        seen.append(part_of_commit(3, whole))
    assert seen == [1, 2, 0, 1, 2, 0]
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{whole}", "shallow")
    expected = int(git(whole, "rev-parse", "HEAD"), 16) % 3
    assert part_of_commit(3, tmp_path / "shallow") == expected


def test_ci_runs_what_is_near_a_change_and_then_every_part_once(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "file").touch()
    commit(tmp_path, "first")
    rows = some_rows(TIERS)
    near = {row.file: number % 2 for number, row in enumerate(rows[::20])}
    (name, beside), *others = plan(rows, near, tmp_path)
    assert name == "changed"
    assert {row.file for row in beside} <= near.keys()
    assert seconds(beside) <= 0.8 * time_left(rows)
    count = len(others)
    assert [name for name, _ in others] == [f"part-{number % count + 1}-of-{count}" for number in range(1, count + 1)]
    found = [*beside, *(row for _, part in others for row in part)]
    assert sorted(row.key for row in found) == sorted(row.key for row in rows if row.tier in ("more", "long"))


def test_the_nearest_tests_of_a_change_come_first() -> None:
    rows = [Row("more", f"tests/test_{name}.py::test", "", 1, 10.0, 1.0) for name in "abcd"]
    distance = {"tests/test_a.py": 1, "tests/test_b.py": 0, "tests/test_d.py": 1}
    assert nearest(rows, distance, 10.0) == [rows[1], rows[0]]


def test_a_part_that_comes_too_late_is_not_run() -> None:
    assert run_part("late", [Row("more", "t.py::a", "", 7, 1.0, 1.0)], time.time() - 29 * 60) == (0, 7)


MODULE = """
import pytest
@pytest.mark.parametrize("n", range(25))
def test_quick(n): pass
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
from pathlib import Path
from tests.tiers import plugin
plugin.CAPABILITIES = Path(__file__).with_name("page.md")
def pytest_configure(config): config.pluginmanager.register(plugin.Tiers(config), "tiers")
def pytest_addoption(parser): plugin.add_options(parser)
"""


def run_module(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "page.md").write_text(PAGE)
    (folder / "tests/test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("tiers", "tests"),
    [
        ("check", {"test_quick"}),
        ("test", {"test_named", "test_same_run"}),
        ("more", {"test_other_run"}),
        ("long", {"test_named", "test_repeated"}),
        ("more,long", {"test_other_run", "test_named", "test_repeated"}),
    ],
)
def test_a_row_of_the_page_and_its_fixture_bring_functions_into_make_test(
    tmp_path: Path, tiers: str, tests: set[str]
) -> None:
    code, shown = run_module(tmp_path, "--collect-only", f"--tiers={tiers}")
    assert code == 0
    assert {name.partition("[")[0] for name in re.findall(r"test_module.py::(.*)", shown)} == tests


@pytest.mark.heavy
def test_functions_keep_their_tier_without_those_that_decide_it(tmp_path: Path) -> None:
    (tmp_path / "functions").write_text("tests/test_module.py::test_same_run\ntests/test_module.py::test_repeated")
    code, shown = run_module(tmp_path, "--collect-only", f"--functions={tmp_path}/functions", "--tiers=test")
    assert code == 0
    assert re.findall(r"test_module.py::(.*)", shown) == ["test_same_run"]


@pytest.mark.heavy
def test_an_unknown_tier_is_refused(tmp_path: Path) -> None:
    assert run_module(tmp_path, "--tiers=test,short")[0] == pytest.ExitCode.USAGE_ERROR


@pytest.mark.heavy
def test_a_function_without_a_row_fails_a_measured_run_only(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, shown = run_module(tmp_path, "--tiers=check", f"--write-durations={out}")
    assert code == 1
    assert "tests/test_module.py::test_quick has no row" in shown
    (row,) = Measured.read(out).rows
    assert (row.key, row.cases) == (("check", "tests/test_module.py::test_quick"), 25)
    assert run_module(tmp_path, "--tiers=check")[0] == 0


@pytest.mark.heavy
def test_a_run_that_does_not_end_in_time_fails() -> None:
    tests = [["tests/tiers/test_imports.py::test_a_circle_of_imports_comes_to_an_end"], []]
    assert Lanes("late", TIERS[:1], tests, end=time.time()).run() == 1
    in_time = Lanes("in-time", TIERS[:1], tests, end=time.time() + 900)
    assert in_time.run(["--without-budgets"]) == 0
    assert [row.function for row in Measured.read(in_time.file(0)).rows] == tests[0]


@pytest.mark.heavy
def test_nothing_starts_after_the_time_for_it_and_what_is_left_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    late = [f"--start-until={time.time() - 1}", f"--write-durations={out}", "--without-budgets"]
    code, shown = run_module(tmp_path, *late)
    assert code == 0
    assert "30 skipped" in shown
    assert "30 tests were not started: time limit" in shown
    assert "test_module.py::test_repeated" in shown
    assert (Measured.read(out).left, Measured.read(out).rows) == (30, [])
