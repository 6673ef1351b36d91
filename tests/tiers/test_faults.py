"""The planted faults fit today's sources, and the script that plants them finds the test that fails."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tiers.fault import Fault
from tests.tiers.faults import Outcome, Whole, check_imports, checkout, examine, examine_whole, run_tests, table
from tests.tiers.imports import ROOT, read_graph
from tests.tiers.planted import FAULTS
from tests.tiers.test_imports import commit, git

# Folders with files of their own, or whose __init__.py has classes.
ROOMS = {
    file.parent
    for file in (ROOT / "rlhpc").rglob("*.py")
    if file.name != "__init__.py" or "\nclass " in file.read_text(encoding="utf-8")
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_replaces_code_that_is_there_once_by_other_code_that_compiles(fault: Fault) -> None:
    before = (ROOT / fault.file).read_text(encoding="utf-8")
    after = fault.planted(before)
    compile(after, fault.file, "exec")
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


def test_every_room_has_a_fault_and_every_fault_a_name_of_its_own() -> None:
    folders = {(ROOT / fault.file).parent for fault in FAULTS}
    assert {folder for folder in folders if folder.is_relative_to(ROOT / "rlhpc")} == ROOMS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["long: repeats a proof"]\n',
    "conftest.py": (
        "def pytest_addoption(parser):\n"
        '    parser.addoption("--tiers", default="check,test,more,long")\n\n'
        "def pytest_collection_modifyitems(config, items):\n"
        '    tiers = config.getoption("--tiers").split(",")\n'
        '    items[:] = [i for i in items if ("long" if i.get_closest_marker("long") else "check") in tiers]\n'
    ),
    "rlhpc/__init__.py": "",
    "rlhpc/sums.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n",
    "rlhpc/lonely.py": "ANSWER = 42\n",
    "tests/__init__.py": "",
    "tests/test_sums.py": (
        "import os, subprocess, sys\nimport pytest\nfrom rlhpc import sums\n\n"
        '@pytest.mark.parametrize("text", ["1 + 2 - 0"])\n'
        "def test_add(text):\n"
        '    code = "from rlhpc.sums import add; print(add(1, 2))"\n'
        '    out = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True).stdout\n'
        "    assert int(out) == eval(text)\n\n"
        "def test_flaky():\n"
        '    seen = open(os.environ["SEEN"], "a+")\n'
        "    seen.seek(0)\n"
        '    assert seen.read() or not seen.write("x")\n\n'
        "def test_broken(): assert sums is None\n\n"
        "@pytest.mark.long\ndef test_twice(): assert sums.twice(3) == 6\n"
    ),
    "tests/test_other.py": 'def test_other(): assert "a + b" in open("rlhpc/" + "sums.py").read()\n',
}
ADD = Fault("add", "rlhpc/sums.py", "sums", "a + b", "a - b")
TWICE = Fault("twice", "rlhpc/sums.py", "doubles", "2 * a", "3 * a")
LONELY = Fault("lonely", "rlhpc/lonely.py", "the answer", "42", "43")
ADD_TEST, OTHER_TEST = "tests/test_sums.py::test_add[1 + 2 - 0]", "tests/test_other.py::test_other"
FLAKY_TEST, BROKEN_TEST = "tests/test_sums.py::test_flaky", "tests/test_sums.py::test_broken"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a test for each tier, one that fails once, one that always fails, and one out of reach by
    imports."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take longer than these tests
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    for name, text in FILES.items():
        (tmp_path / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "small" / name).write_text(text)
    git(tmp_path / "small", "init", "-q", "-b", "main")
    commit(tmp_path / "small", "first")
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("fault", "tier", "test", "passed_over"),
    [
        (ADD, "make check", ADD_TEST, ()),
        (TWICE, "only make test-all", "tests/test_sums.py::test_twice", (FLAKY_TEST, BROKEN_TEST)),
        (LONELY, "green", "", ()),
    ],
    ids=["test", "long", "green"],
)
@pytest.mark.heavy
def test_the_first_test_that_only_the_fault_fails_is_found(
    small: Path, fault: Fault, tier: str, test: str, passed_over: tuple[str, ...]
) -> None:
    tests = read_graph(small).tests_reached_by([fault.file])
    with checkout(small) as clean:
        check_imports(clean)
        found = examine(fault, tests, clean, small, small / "log")
    assert (found.tier, found.test, found.passed_over) == (tier, test, passed_over)


def test_a_whole_run_names_the_failing_tests_that_imports_do_not_lead_to(small: Path) -> None:
    tests = read_graph(small).tests_reached_by([ADD.file])
    with checkout(small) as clean:
        found = examine_whole(ADD, tests, clean, small, small / "log")
    assert set(found.failed) == {ADD_TEST, OTHER_TEST}
    assert found.unreached == (OTHER_TEST,)


def test_a_run_that_pytest_cannot_finish_has_no_result(small: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4, see "):
        run_tests(small, ["--no-such-option"], small / "log")


def test_an_interrupted_run_leaves_no_worktree(small: Path) -> None:
    with pytest.raises(KeyboardInterrupt), checkout(small) as place:
        raise KeyboardInterrupt
    assert not place.exists()
    assert len(git(small, "worktree", "list").splitlines()) == 1


def test_the_table_is_markdown() -> None:
    found = Outcome(ADD, "make test", "tests/test_sums.py::test_add[a | b]", 3.4, (BROKEN_TEST,))
    lines = table([found], [Whole(ADD, (ADD_TEST, OTHER_TEST), (OTHER_TEST,))]).splitlines()
    assert lines[2] == "| add | `rlhpc/sums.py` | sums | make test | `tests/test_sums.py::test_add[a \\| b]` | 3 |"
    assert lines[6] == f"| add | 2 | `{OTHER_TEST}` |"
    assert lines[-1] == f"- `{BROKEN_TEST}`"
