"""Finds lines of the sources that run only on a GPU, without executing anything.

What depends on ``torch.cuda.is_available()``, ``is_cuda``, ``on_gpu`` or ``device.type == "cuda"``, also by way of
names, what calls ``torch.cuda`` itself, and functions and classes that only such code refers to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# Imported by name, by vLLM on GPUs.
GPU_MODULES = ("rlhpc/rollout/vllm_gpu.py",)
_TRUE_NAMES = {"on_gpu", "_on_gpu", "is_cuda"}
_TRUE_CALLS = {"torch.cuda.is_available", "torch.cuda.is_initialized"}
# Work without a device, or are patched on a CPU.
_HARMLESS = {*_TRUE_CALLS, "torch.cuda.device_count"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, order=True)
class Line:
    """A line that only a GPU reaches. ``shared``: a CPU executes another part of it."""

    file: str
    number: int
    text: str
    shared: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


class _Conditions:
    """Expressions of a module whose truth, or falsity, implies a GPU, including names assigned from them."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: set[tuple[str, str]] = set()  # (scope, name): true only on a GPU
        self._scopes: dict[ast.AST, str] = {}
        self._enter(tree, "")
        for _ in range(3):  # names of names
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    self._assign(node)

    def if_true(self, test: ast.expr) -> bool:
        """True if the test being true implies a GPU."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return self.if_false(test.operand)
            case ast.BoolOp(op=ast.And()):
                return any(map(self.if_true, test.values))
            case ast.BoolOp(op=ast.Or()):
                return all(map(self.if_true, test.values))
            case ast.Call():
                return ast.unparse(test.func) in _TRUE_CALLS
            case ast.Name() | ast.Attribute():
                return self._is_true_name(test)
            case ast.Compare(ops=[ast.Eq()]):
                return _is_text(test.comparators[0], "cuda")
            case ast.Compare(ops=[ast.NotEq()]):
                return _is_text(test.comparators[0], "cpu")
            case ast.Compare(ops=[ast.IsNot()]):
                return _is_none(test.comparators[0]) and self._is_true_name(test.left)
        return False

    def if_false(self, test: ast.expr) -> bool:
        """True if the test being false implies a GPU."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return self.if_true(test.operand)
            case ast.BoolOp(op=ast.And()):
                return all(map(self.if_false, test.values))
            case ast.BoolOp(op=ast.Or()):
                return any(map(self.if_false, test.values))
            case ast.Compare(ops=[ast.NotEq()]):
                return _is_text(test.comparators[0], "cuda")
            case ast.Compare(ops=[ast.Eq()]):
                return _is_text(test.comparators[0], "cpu")
            case ast.Compare(ops=[ast.Is()]):
                return _is_none(test.comparators[0]) and self._is_true_name(test.left)
        return False

    def _enter(self, node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                inner = f"{scope}.{getattr(child, 'name', 'lambda')}"
            self._scopes[child] = scope if isinstance(child, (*_FUNCTIONS, ast.ClassDef)) else inner
            self._enter(child, inner)

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        value = node.value
        assert value is not None
        implies = self.if_true(value)
        if isinstance(value, ast.IfExp):  # a value on a GPU, None elsewhere
            implies = (self.if_true(value.test) and _is_nothing(value.orelse)) or (
                self.if_false(value.test) and _is_nothing(value.body)
            )
        if implies:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._names.update(key for target in targets if (key := self._key(target)))

    def _is_true_name(self, node: ast.expr) -> bool:
        last = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return last in _TRUE_NAMES or self._key(node) in self._names

    def _key(self, node: ast.expr) -> tuple[str, str] | None:
        """(function, local name), or (class, attribute of ``self``)."""
        scope = self._scopes.get(node, "")
        if isinstance(node, ast.Name):
            return scope, node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return scope.rpartition(".")[0], node.attr
        return None


class _Module:
    """Nodes of a file that only a GPU reaches: statements, and parts of expressions."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.lines, self.tree = file, source.splitlines(), ast.parse(source)
        self.statements: set[ast.stmt] = set()
        self.parts: set[ast.expr] = set()
        self._reached: set[ast.AST] = set()
        self._conditions = _Conditions(self.tree)
        if file in GPU_MODULES:
            self.add(self.tree.body)
        else:
            self._block(self.tree.body)

    def add(self, body: Sequence[ast.stmt]) -> None:
        """Add these statements and all nested ones."""
        for statement in body:
            for node in ast.walk(statement):
                self._reached.add(node)
                if isinstance(node, ast.stmt) and not _is_docstring(node):
                    self.statements.add(node)

    def __contains__(self, node: ast.AST) -> bool:
        return node in self._reached

    def found(self) -> Iterator[Line]:
        whole = {node.lineno for node in self.statements}
        yield from (self._line(number, False) for number in whole)
        yield from (self._line(number, True) for number in {node.lineno for node in self.parts} - whole)

    def _line(self, number: int, shared: bool) -> Line:
        return Line(self.file, number, self.lines[number - 1].strip(), shared)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for position, statement in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(statement, ast.If | ast.While):
                self._expression(statement.test)
                on_true, on_false = (
                    self._conditions.if_true(statement.test),
                    self._conditions.if_false(statement.test),
                )
                (self.add if on_true else self._block)(statement.body)
                (self.add if on_false else self._block)(statement.orelse)
                if on_false and _always_exits(statement.body):
                    self.add(rest)
                    return
                continue
            for inner in _blocks(statement):
                self._block(inner)
            for value in _expressions(statement):
                self._expression(value)
                self.parts.update(call for call in _cuda_calls(value) if call not in self._reached)

    def _expression(self, value: ast.expr) -> None:
        """Parts of an expression that are evaluated only on a GPU."""
        for node in ast.walk(value):
            only: list[ast.expr] = []
            if isinstance(node, ast.IfExp):
                only += [node.body] if self._conditions.if_true(node.test) else []
                only += [node.orelse] if self._conditions.if_false(node.test) else []
            elif isinstance(node, ast.BoolOp):
                decides = self._conditions.if_true if isinstance(node.op, ast.And) else self._conditions.if_false
                first = next((i for i, operand in enumerate(node.values) if decides(operand)), len(node.values))
                only += node.values[first + 1 :]
            for part in only:
                self._reached.update(ast.walk(part))
                if not _is_none(part):
                    self.parts.add(part)


def gpu_lines(sources: Mapping[str, str]) -> list[Line]:
    """Lines that only a GPU reaches; ``sources``: text by file name."""
    modules = [_Module(file, source) for file, source in sources.items()]
    while _close(modules):
        pass
    return sorted({line for module in modules for line in module.found()})


def _close(modules: Sequence[_Module]) -> bool:
    """Add module-level functions and classes that only GPU code uses; returns whether there were any."""
    references: dict[str, list[bool]] = {}
    for module in modules:
        for owner, node in _references(module.tree):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name != owner:
                references.setdefault(name, []).append(node in module)
    grown = False
    for module in modules:
        for definition in module.tree.body:
            if not isinstance(definition, (*_FUNCTIONS, ast.ClassDef)) or definition.body[-1] in module.statements:
                continue
            found = references.get(definition.name, [])
            if found and all(found):
                module.add(definition.body)
                grown = True
    return grown


def _references(tree: ast.Module) -> Iterator[tuple[str, ast.Name | ast.Attribute]]:
    """(enclosing module-level definition, node) of every name read outside annotations."""
    for statement in tree.body:
        annotations = {
            part
            for node in ast.walk(statement)
            for field in ("annotation", "returns")
            if isinstance(getattr(node, field, None), ast.AST)
            for part in ast.walk(getattr(node, field))
        }
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and node not in annotations:
                yield getattr(statement, "name", ""), node


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """A statement's own expressions, without those of nested statements."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _cuda_calls(value: ast.expr) -> Iterator[ast.Call]:
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("torch.cuda.") and name not in _HARMLESS:
                yield node


def _always_exits(body: Sequence[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.If):
        return bool(last.orelse) and _always_exits(last.body) and _always_exits(last.orelse)
    return isinstance(last, _EXITS)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_nothing(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and not node.value) or (isinstance(node, ast.List) and not node.elts)
