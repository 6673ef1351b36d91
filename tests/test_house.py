"""Rules of the sources that no linter knows: sizes, names, and who may know whom."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.test_layers import MODULES, imports_of, room_of, tree_of

MOST_LINES, LONGEST_FUNCTION = 601, 60
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# Files of the trainer that may name concrete back ends, engines and reward workers: the composition root.
ROOT_FILES = tuple(
    f"rlhpc.trainer.{name}"
    for name in (
        *("build", "models", "parts", "connect", "engine_rank", "judge_rank", "architecture"),
        *("backends", "fsdp_models", "megatron_models"),
    )
)
CONCRETE = ("rlhpc.backends", "rlhpc.rollout.vllm", "rlhpc.rewards.reward_workers")
KNOWS_RUN = {f"rlhpc.trainer.{name}" for name in ("run", "build", "loop", "observer", "step")}


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def new_without_init(tree: ast.AST) -> list[int]:
    """Lines with ``object.__new__``, which makes an object that no constructor has checked."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [node.lineno for node in nodes if node.attr == "__new__"]


def public_classes() -> Iterator[tuple[str, str]]:
    """(class, room) of every public class of the package."""
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, room_of(module)


def test_files_are_short():
    lines = {module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in MODULES.items()}
    assert not {module: count for module, count in lines.items() if count >= MOST_LINES}


def test_functions_are_short():
    found = [(module, name, lines) for module in MODULES for name, lines in functions(tree_of(module))]
    assert not [each for each in found if each[2] >= LONGEST_FUNCTION]


def test_a_long_function_is_seen():
    text = "def f():\n" + "    g()\n" * LONGEST_FUNCTION
    assert list(functions(ast.parse(text))) == [("f", LONGEST_FUNCTION + 1)]


def test_no_object_is_made_without_its_constructor():
    found = {module: new_without_init(tree_of(module)) for module in MODULES}
    assert not {module: lines for module, lines in found.items() if lines}
    assert new_without_init(ast.parse("copy = object.__new__(Mover)")) == [1]


def test_no_two_rooms_have_a_public_class_of_one_name():
    rooms: dict[str, list[str]] = {}
    for name, room in public_classes():
        rooms.setdefault(name, []).append(room)
    assert not {name: found for name, found in rooms.items() if len(found) > 1}


def test_no_two_files_of_a_room_and_its_neighbours_share_a_name():
    """``plan/estimates/x.py`` and ``plan/x.py`` would leave open which is meant."""
    files = Counter((room_of(module).split(".")[0], module.rpartition(".")[2]) for module in MODULES)
    known = {room_of(module).rpartition(".")[2] for module in MODULES} | {"__main__"}
    assert not [name for name, count in files.items() if count > 1 and name[1] not in known]


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) == "trainer" and m not in ROOT_FILES])
def test_the_trainer_knows_back_end_engine_and_rewards_by_their_protocols(module):
    assert not [name for _, name in imports_of(module) if name.startswith(CONCRETE)]


def test_only_the_loop_its_step_and_its_observer_know_the_run():
    """What they call takes what it uses of it."""
    found = {module for module in MODULES for _, name in imports_of(module) if name == "rlhpc.trainer.run"}
    assert found | {"rlhpc.trainer.run"} == KNOWS_RUN
