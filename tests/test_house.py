"""Rules of the sources that no linter knows: sizes, names, and who may know whom."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.test_layers import MODULES, imports_of, room_of, tree_of
from tools.size import SMALL, size_of

MOST_LINES, LONGEST_FUNCTION = 601, 60
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# Files below tools.size.SMALL code lines, by reason. Packages' __init__ and __main__ need none.
SMALL_FILES = {
    "an algorithm": "algo.cispo algo.grpo algo.gspo algo.ppo algo.reinforce_plus_plus algo.remax algo.rloo",
    "a formula of one use per model": "algo.schedule",
    "a family": "models.llama models.mixtral models.qwen2 models.qwen3 models.qwen3_moe",
    "text of others in a terminal, for rooms with and without rich": "core.terminal core.text",
    "a check of one section": "plan.checks.beside plan.checks.generation_order",
}
# Small files are allowed in rooms whose parts are going to be one.
GROWING = ("trainer", "rollout", "rollout.generator", "rollout.schedule")
# Files of the trainer that may name concrete back ends, engines and reward workers: the composition root.
ROOT_FILES = tuple(
    f"rlhpc.trainer.{name}"
    for name in (
        *("build", "models", "parts", "connect", "engine_rank", "judge_rank", "architecture", "engine_proof"),
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


def test_small_files_have_a_reason():
    """A file that few lines fill is part of a neighbour's concept, or has a reason."""
    named = {f"rlhpc.{name}" for names in SMALL_FILES.values() for name in names.split()}
    texts = {module: file.read_text(encoding="utf-8") for module, file in MODULES.items() if file.stem[0] != "_"}
    short = {m: text for m, text in texts.items() if room_of(m) not in GROWING and text.count("\n") < 4 * SMALL}
    assert {module for module, text in short.items() if size_of(text).small} == named


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


def test_a_program_starts_at_the_end_of_its_file():
    """Definitions below the call of its main would be missing."""
    for module in MODULES:
        starts = [i for i, node in enumerate(tree_of(module).body, 1) if "__main__" in ast.unparse(node)[:40]]
        assert not starts or starts == [len(tree_of(module).body)], module


def literal_names(tree: ast.AST) -> list[str]:
    """String literals that index, get, set or delete an environment variable."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))):
                text = ast.unparse(of)
            case ast.Call(func=ast.Attribute(value=of, attr=how), args=[ast.Constant(value=str(name)), *_]):
                text = ast.unparse(of)
                if (text, how) != ("os", "getenv") and how not in ("get", "pop", "setdefault"):
                    continue
            case _:
                continue
        if text in ("os", "environ") or text.endswith(".environ"):
            names.append(name)
    return names


def test_environment_variables_are_named_in_core_env_only():
    assert not {module: names for module in MODULES if (names := literal_names(tree_of(module)))}
    planted = 'import os\nos.environ["A"] = os.environ.get("B", os.getenv("C"))\nos.environ[env.D]'
    assert sorted(literal_names(ast.parse(planted))) == ["A", "B", "C"]
