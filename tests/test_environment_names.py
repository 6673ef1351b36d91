"""Environment variables are read and written by the names in rlhpc/core/env.py only."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rlhpc"


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ") or ast.unparse(node).endswith(".environ")


def _literal_names(tree: ast.AST) -> list[str]:
    """String literals that index, get, set or delete an environment variable."""
    names = []
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            reads = _is_environ(node.func.value) and node.func.attr in ("get", "pop", "setdefault")
            if reads or ast.unparse(node.func) == "os.getenv":
                key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            names.append(key.value)
    return names


def test_no_file_but_env_names_a_variable() -> None:
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if (names := _literal_names(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert not found, f"name these in rlhpc/core/env.py: {found}"


def test_the_reader_sees_a_planted_literal() -> None:
    planted = 'import os\nos.environ["A"] = os.environ.get("B", os.getenv("C"))\nos.environ[env.D]'
    assert sorted(_literal_names(ast.parse(planted))) == ["A", "B", "C"]
