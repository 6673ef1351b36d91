"""parallel/compat.py is the one file that changes the state of Megatron, vLLM and torch: read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "rlhpc" / "parallel" / "compat.py"
# Programs with an interpreter of their own, whose modules are theirs.
PROGRAMS = {ROOT / "rlhpc" / "rewards" / name for name in ("solution_side.py", "tests_side.py")}
FILES = [file for file in sorted((ROOT / "rlhpc").rglob("*.py")) if file not in {COMPAT, *PROGRAMS}]
PATCHED = {"megatron", "vllm", "torch", "builtins", "sys"}
IMPORT = re.compile(rf"\b(?:import|from)\s+(?:{'|'.join(sorted(PATCHED))})\b|^\s*import\b.*,", re.MULTILINE)
# Functions that return what exists already; a class, or any other function, makes a new object.
GETTER = re.compile(r"_?get_(?!megatron_optimizer)\w+")
SETTERS = {
    "megatron": re.compile(r"_?(set|reset|initialize|destroy)_\w+|model_parallel\w*_manual_seed|fork|add"),
    "torch": re.compile(r"set_default_\w+|set_float32_matmul_precision|use_deterministic_algorithms"),
}


class Scan(ast.NodeVisitor):
    """Finds changes of foreign objects: what is imported, and the names that it is bound to, anywhere in the file."""

    def __init__(self, tree: ast.Module) -> None:
        self.roots: dict[str, str] = {}  # name -> package that its object belongs to
        self.getters: set[str] = set()  # functions of the file that return such objects
        self.found: list[tuple[int, str]] = []
        nodes = list(ast.walk(tree))
        while True:  # a name may be bound before the name that it comes from
            known = len(self.roots)
            for node in nodes:
                self._bind(node)
            if len(self.roots) == known:
                break
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                if package in PATCHED:
                    self.roots[alias.asname or package] = package
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            package = node.module.split(".")[0]
            if package in PATCHED:
                self.roots |= {alias.asname or alias.name: package for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None and self._package(inner.value):
                    self.roots[node.name] = self._package(inner.value)
                    self.getters.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value)
        elif isinstance(node, ast.NamedExpr | ast.For):
            self._bind_target(node.target, node.value if isinstance(node, ast.NamedExpr) else node.iter)

    def _bind_target(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind_target(one, other)
        elif isinstance(target, ast.Name) and (package := self._package(value)):
            self.roots[target.id] = package

    def _package(self, value: ast.expr) -> str:
        """The package whose existing object the expression is; empty for none."""
        while True:
            match value:
                case ast.Name(id=name):
                    return self.roots.get(name, "")
                case ast.Call(func=ast.Name(id="getattr"), args=[first, *_]):
                    value = first
                case ast.Call(func=ast.Name(id=name)) if GETTER.fullmatch(name) or name in self.getters:
                    return self.roots.get(name, "")
                case ast.Call(func=ast.Attribute(attr=name) as function) if GETTER.fullmatch(name):
                    value = function
                case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                    value = inner
                case _:
                    return ""

    def _changed(self, target: ast.expr, line: int) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._changed(one, line)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            package, text = self._package(target.value), ast.unparse(target)
            if package not in ("", "sys") or (package and text.startswith("sys.modules[")):
                self.found.append((line, text))

    def visit_Assign(self, node: ast.Assign | ast.Delete) -> None:
        for target in node.targets:
            self._changed(target, node.lineno)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign | ast.AnnAssign) -> None:
        self._changed(node.target, node.lineno)
        self.generic_visit(node)

    visit_AnnAssign, visit_Delete = visit_AugAssign, visit_Assign

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(id="setattr" | "delattr") if node.args and self._package(node.args[0]):
                self.found.append((node.lineno, ast.unparse(node)))
            case ast.Name(id=name):
                self._called(name, self.roots.get(name, ""), node)
            case ast.Attribute(attr=name, value=value):
                self._called(name, self._package(value), node)
        self.generic_visit(node)

    def _called(self, name: str, package: str, node: ast.Call) -> None:
        if package in SETTERS and SETTERS[package].fullmatch(name):
            self.found.append((node.lineno, ast.unparse(node.func)))


def changes(text: str) -> Iterator[str]:
    """Changes of foreign state in a file, each with its line."""
    for line, what in Scan(ast.parse(text)).found:
        yield f"{line}: {what}"


def test_only_compat_changes_foreign_state() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in FILES}
    importing = {file: text for file, text in texts.items() if IMPORT.search(text)}
    assert {str(file.relative_to(ROOT)): found for file, text in importing.items() if (found := [*changes(text)])} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.core import parallel_state\nparallel_state._TENSOR_MODEL_PARALLEL_GROUP = None",
        "from megatron.core import parallel_state as state\nstate.initialize_model_parallel(2)",
        "from megatron.core import parallel_state\nsetattr(parallel_state, name, value)",
        "def f():\n    import megatron.core.optimizer as optimizer\n    optimizer.Adam, optimizer.X = make, False",
        "from megatron.core.tensor_parallel import get_cuda_rng_tracker\nget_cuda_rng_tracker().set_states(states)",
        "from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed\n"
        "model_parallel_cuda_manual_seed(1)",
        "from megatron.core.transformer.moe.router import TopKRouter\nTopKRouter.routing = ours",
        "import megatron.core\ndel megatron.core.parallel_state._GLOBAL",
        "def queue():\n    from vllm.distributed.parallel_state import get_tp_group\n"
        "    return get_tp_group().mq_broadcaster\n"
        "def f():\n    buffer = getattr(queue(), 'buffer', None)\n    buffer.is_creator = False",
        "from vllm.device_allocator import get_mem_allocator_instance\nallocator = get_mem_allocator_instance()\n"
        "del allocator.pointer_to_data[address]",
        "import torch\ntorch.set_num_threads = before",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import torch\ntorch.set_default_dtype(torch.bfloat16)",
        "import sys\nsys.modules['apex'] = None",
    ],
)
def test_a_change_is_found(text: str) -> None:
    assert len(list(changes(text))) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.core.optimizer import OptimizerConfig\noptions = OptimizerConfig()\noptions.bf16 = True",
        "from megatron.core import parallel_state\ngroup = parallel_state.get_data_parallel_group()",
        "from vllm.model_executor.model_loader import register_model_loader\nregister_model_loader('x')(Loader)",
        "import torch\nweights = torch.zeros(2)\nweights[0] = 1",
    ],
)
def test_own_objects_and_extension_points_pass(text: str) -> None:
    assert list(changes(text)) == []
