"""The architecture, read from the imports: each room uses only rooms of layers below it, and torch stays out of plans.

A room is a folder's own Python files. ``python -m tests.test_layers`` prints the rooms (``make layers``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Rooms of one layer never import each other.
LAYERS = (
    ("core",),
    ("config", "models"),
    ("sharding", "algo", "observe.alerts", "rollout.schedule"),
    ("api", "checkpoint.formats"),
    ("plan.estimates", "parallel", "backends.kernels"),
    ("plan.checks", "data", "rewards", "observe", "observe.trackers"),
    ("backends.megatron", "backends.fsdp", "rollout", "reshard", "checkpoint"),
    ("reshard.staged",),
    ("rollout.generator",),
    ("trainer", "convert", "plan"),
    ("launch", "launch.slurm", "observe.page"),
    ("launch.worker",),
    ("launch.supervise",),
    ("launch.runs",),
    ("launch.studies",),
    ("cli",),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
# Rooms whose files, and files of other rooms that, are imported where there is no torch: on a login node, in a plan.
TORCH_FREE = (
    "core",
    "config",
    "models",
    "sharding",
    "checkpoint.formats",
    "plan",
    "plan.checks",
    "plan.estimates",
    "observe.alerts",
    "rollout.schedule",
    "launch",
    "launch.slurm",
    "launch.worker",
    "launch.supervise",
    "launch.runs",
    "launch.studies",
    "cli",
    "convert",
    "data.files",
    "data.packing",
    "observe.engine_activity",
    "observe.notes",
    "observe.page",
    "observe.progress",
    "observe.training_samples",
    "observe.trackers",
    "reshard.checksum_plan",
    "reshard.plan",
    "reshard.sides",
    "reshard.staged.plan",
    "trainer.sampling_plan",
)
# In rooms that are free of it otherwise.
WITH_TORCH = ("checkpoint.formats.safetensors_reader", "convert.logprobs", "convert.torch_dist_files")
HEAVY = {"torch", "vllm", "transformers", "megatron"}
MOST_FOLDERS, LARGEST_ROOM = 20, 0.10  # at the top of the package; share of its lines
FILES = sorted((ROOT / "rlhpc").rglob("*.py"))
# Parts of a package that hold no files of their own but the docstring.
PARENTS = ("", "backends")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}
PACKAGES = {module_of(file) for file in FILES if file.name == "__init__.py"}


def room_of(module: str) -> str:
    """``rlhpc.core.env`` is in ``core``, as is ``rlhpc.core`` itself."""
    if module not in PACKAGES and f"{module}.x".rpartition(".")[0] not in PACKAGES:
        module = module.rpartition(".")[0]
    return module.removeprefix("rlhpc").removeprefix(".")


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of one of our modules."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import of one of our modules."""
    return tuple(imports(tree_of(module)))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else str(node.module)


def is_free(module: str) -> bool:
    """Whether torch must not be imported with it."""
    names = {module.removeprefix("rlhpc."), room_of(module)}
    return bool(names & set(TORCH_FREE)) and not names & set(WITH_TORCH)


def at_once(module: str) -> set[str]:
    """Modules that are imported with it: by statements of its own, and the packages that it is in."""
    statements = [node for node in tree_of(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
    parents = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
    return parents | {name for _, name in imports(ast.Module(statements, []))}


@cache
def loading_torch() -> frozenset[str]:
    """Modules of ours that import something heavy, by themselves or through another one."""
    graph = {module: at_once(module) for module in MODULES}
    found = {module for module, names in graph.items() if any(name.split(".")[0] in HEAVY for name in names)}
    while more := {module for module, names in graph.items() if names & found} - found:
        found |= more
    return frozenset(found)


def breaches(module: str, tree: ast.Module) -> list[str]:
    """Imports that ``module`` must not have."""
    room, found = room_of(module), []
    layer, early = LAYER_OF.get(room, 0), {node.lineno for node in tree.body}
    for line, name in imports(tree):
        if is_free(module) and (name.split(".")[0] in HEAVY or (name in loading_torch() and line in early)):
            found.append(f"{module}:{line} imports {name}: torch comes with it")
        if name.split(".")[0] != "rlhpc":
            continue
        other = room_of(name)
        if other in LAYER_OF and other != room and LAYER_OF[other] >= layer:
            found.append(f"{module}:{line} imports {name}: layer {LAYER_OF[other]} from {layer}")
    return found


def lines_of_rooms() -> dict[str, int]:
    """Lines of Python in each room."""
    found: dict[str, int] = {}
    for module, file in MODULES.items():
        room = room_of(module)
        found[room] = found.get(room, 0) + len(file.read_text(encoding="utf-8").splitlines())
    return found


def table() -> str:
    """Every room with its lines, its share of them and the rooms that it imports, from the top layer down."""
    lines, used = lines_of_rooms(), {}
    for module in MODULES:
        names = {room_of(name) for _, name in imports_of(module) if name.startswith("rlhpc.")}
        used[room_of(module)] = used.get(room_of(module), set()) | names
    rows = [f"{'layer':>5}  {'room':<24}{'lines':>6} {'share':>6}  uses"]
    for number, rooms in reversed(list(enumerate(LAYERS))):
        for room in rooms:
            share, uses = lines[room] / sum(lines.values()), " ".join(sorted(used[room] - {room, ""}))
            rows.append(f"{number:>5}  {room:<24}{lines[room]:>6} {share:>6.1%}  {uses}")
    return "\n".join(rows)


def test_a_file_imports_only_layers_below():
    assert not [breach for module in MODULES for breach in breaches(module, tree_of(module))]


def test_the_package_imports_nothing_of_the_checkout_around_it():
    outside = {"bench", "tests", "tools"}
    assert not [name for module in MODULES for _, name in imports_of(module) if name.split(".")[0] in outside]


def test_every_room_has_a_layer():
    print(table())
    assert {room_of(module) for module in MODULES} - set(PARENTS) == set(LAYER_OF)


def test_no_room_is_a_hall():
    lines = lines_of_rooms()
    large = {room: count for room, count in lines.items() if count > LARGEST_ROOM * sum(lines.values())}
    assert not large
    folders = {file.relative_to(ROOT / "rlhpc").parts[0] for file in FILES} - {"__init__.py"}
    assert len(folders) <= MOST_FOLDERS, sorted(folders)


def test_torch_free_files_exist():
    rooms = {room_of(module) for module in MODULES}
    for name in (*TORCH_FREE, *WITH_TORCH):
        assert name in rooms or f"rlhpc.{name}" in MODULES, name


def test_no_torch_free_file_loads_torch():
    assert not [module for module in MODULES if is_free(module) and module in loading_torch()]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("rlhpc.core.files", "from rlhpc.config import schema"),
        ("rlhpc.config.load", "from rlhpc import models"),
        ("rlhpc.plan.checks.run", "def f():\n    import torch"),
        ("rlhpc.plan.checks.run", "from rlhpc.plan.search import Searched"),
        ("rlhpc.plan.search", "from rlhpc.reshard.manager import ReshardManager"),
        ("rlhpc.launch.supervise.local", "import torch.distributed as dist"),
        ("rlhpc.launch.supervise.local", "from rlhpc.cli.main import main"),
        ("rlhpc.observe.page.document", "def f():\n    import torch"),
        ("rlhpc.reshard.plan", "from rlhpc.reshard.executor import Executor"),
        ("rlhpc.launch.slurm.queue", "from rlhpc.launch.machine import gpu_count"),
    ],
)
def test_a_breach_is_seen(module, text):
    assert len(breaches(module, ast.parse(text))) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("rlhpc.algo.losses", "import torch"),
        ("rlhpc.cli.main", "from rlhpc.launch.runs.run import run_here\nfrom rlhpc import __version__"),
        ("rlhpc.backends.megatron.model", "from rlhpc.backends.megatron.layers import x"),
        ("rlhpc.plan.search", "from rlhpc.reshard.plan import plan_reshard"),
        ("rlhpc.cli.convert", "def f():\n    from rlhpc.convert.logprobs import compare"),
    ],
)
def test_what_is_allowed_passes(module, text):
    assert not breaches(module, ast.parse(text))


if __name__ == "__main__":
    print(table())
