"""Files that a change reaches, in this repository and in a small one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tiers.changed import main
from tests.tiers.imports import ROOT, Graph, changed_files, read_graph

FILES = {
    "rlhpc/__init__.py": "",
    "rlhpc/core.py": '"""Used by rlhpc.trainer."""\n',
    "rlhpc/plan/__init__.py": "",
    "rlhpc/plan/layout.py": "def f():\n    from rlhpc import core\n",
    "rlhpc/launch.py": 'TRAINER = "rlhpc.trainer:run_rank"\n',
    "rlhpc/trainer.py": "from rlhpc.plan import layout\n",
    "rlhpc/rules.py": "",
    "configs/demo.yaml": "reward: {function: 'rlhpc.rules:maths'}\n",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/test_layout.py": "from rlhpc.plan.layout import f\n",
    "tests/test_launch.py": "import rlhpc.launch\n",
    "tests/test_configs.py": 'FILES = ROOT / "configs"\n',
    "tests/test_alone.py": "",
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, title: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", title)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("rlhpc/plan/layout.py", ["tests/test_layout.py", "tests/test_launch.py"]),  # nearest first
        ("rlhpc/core.py", ["tests/test_layout.py", "tests/test_launch.py"]),  # imported within a function
        ("rlhpc/trainer.py", ["tests/test_launch.py"]),  # named in a string
        ("rlhpc/rules.py", ["tests/test_configs.py"]),  # named in a configuration
        ("configs/demo.yaml", ["tests/test_configs.py"]),
        ("rlhpc/plan/__init__.py", ["tests/test_layout.py", "tests/test_launch.py"]),
        ("tests/test_alone.py", ["tests/test_alone.py"]),
        ("README.md", []),
    ],
)
def test_a_change_reaches_what_uses_it(small: Path, changed: str, tests: list[str]) -> None:
    assert read_graph(small).tests_reached_by([changed]) == tests


def test_tests_near_a_change_import_it_or_are_in_the_folder_of_its_tests(small: Path) -> None:
    (small / "tests/plan").mkdir()
    (small / "tests/plan/test_plans.py").write_text("import rlhpc.launch\n")
    graph = read_graph(small)
    near = graph.near(["rlhpc/plan/layout.py", "pyproject.toml"])
    assert near == {"tests/test_layout.py": 1, "tests/plan/test_plans.py": 3}
    assert graph.near(["tests/test_alone.py"]) == {"tests/test_alone.py": 0}


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py"])
def test_a_change_of_the_surroundings_reaches_every_test(small: Path, changed: str) -> None:
    assert len(read_graph(small).tests_reached_by([changed])) == 4


def test_a_circle_of_imports_comes_to_an_end() -> None:
    graph = Graph({"a": frozenset("b"), "b": frozenset("a"), "tests/test_c.py": frozenset("a")})
    assert graph.tests_reached_by(["b"]) == ["tests/test_c.py"]


def test_the_change_is_what_differs_from_the_common_ancestor(small: Path) -> None:
    git(small, "checkout", "-qb", "mine")
    (small / "rlhpc/core.py").write_text("committed = 1\n")
    commit(small, "mine")
    (small / "rlhpc/rules.py").write_text("modified = 1\n")
    (small / "rlhpc/new.py").write_text("")
    git(small, "checkout", "-q", "main")
    (small / "rlhpc/launch.py").write_text("theirs = 1\n")
    git(small, "commit", "-qm", "theirs", "rlhpc/launch.py")
    git(small, "checkout", "-q", "mine")
    assert changed_files("main", small) == ["rlhpc/core.py", "rlhpc/new.py", "rlhpc/rules.py"]


@pytest.mark.heavy
def test_in_this_repository_tests_beside_a_module_are_near_and_some_are_out_of_reach() -> None:
    graph = read_graph(ROOT)
    for changed, near, far in (
        ("rlhpc/sharding/layout.py", "tests/sharding/test_layout.py", "tests/core/test_exits.py"),
        ("rlhpc/observe/report.py", "tests/observe/test_report.py", "tests/algo/test_losses.py"),
        ("rlhpc/backends/megatron/adamw.py", "tests/backends/test_optimizer.py", "tests/core/test_heartbeat.py"),
        ("rlhpc/rewards/sandbox.py", "tests/rewards/test_sandbox.py", "tests/sharding/test_layout.py"),
    ):
        found = graph.tests_reached_by([changed])
        assert near in found, changed
        assert far not in found, changed
    assert "tests/trainer/test_resume.py" in graph.tests_reached_by(["rlhpc/backends/megatron/adamw.py"])


@pytest.mark.heavy
def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "rlhpc/observe/report.py"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "tests/observe/test_report.py"
    assert shown.err.startswith("1 changed files reach ")
