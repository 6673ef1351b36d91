"""Prints what the project's budget counts: ``python -m tools.size`` (a part of ``make layers``).

Code lines have a token that is neither a comment nor part of a docstring; statements are those of the syntax tree.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.config.schema import RunConfig
from tests.tiers.durations import read_table
from tools.config_table import keys

ROOT = Path(__file__).parents[1]
SMALL = 30  # code lines: a shorter file needs a reason (tests/test_house.py)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Size:
    """Sums over Python files. ``small``: files with fewer than SMALL code lines."""

    lines: int = 0
    statements: int = 0
    files: int = 0
    small: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.lines + other.lines,
            self.statements + other.statements,
            self.files + other.files,
            self.small + other.small,
        )


def size_of(text: str) -> Size:
    """Size of one file."""
    tree = ast.parse(text)
    lines, documentation = code_lines(text, tree), sum(1 for _ in docstrings(tree))
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - documentation
    return Size(lines, statements, 1, int(lines < SMALL))


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    documentation = {line for node in docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - documentation)


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Docstrings of modules, classes, functions and fields: statements that are a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def size_below(folder: Path) -> Size:
    """Size of all Python files below a folder."""
    return sum((size_of(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))), Size())


def private_accesses(tree: ast.Module) -> int:
    """Attributes and imports of private names, but for an object's own."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += _private(node.attr) and not own
        elif isinstance(node, ast.ImportFrom):
            found += sum(_private(alias.name) for alias in node.names)
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def replaced_attributes(tree: ast.Module) -> int:
    """Calls of ``monkeypatch.setattr``."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(isinstance(function, ast.Attribute) and function.attr == "setattr" for function in calls)


def words(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def report() -> str:
    rows = [f"{'':<22}{'code lines':>10} {'statements':>10} {'files':>6} {f'below {SMALL}':>9}"]
    sizes = {top: size_below(ROOT / top) for top in ("rlhpc", "bench", "tools", "tests")}
    sizes["rlhpc, bench and tools"] = sizes["rlhpc"] + sizes["bench"] + sizes["tools"]
    for name, size in sizes.items():
        rows.append(f"{name:<22}{size.lines:>10} {size.statements:>10} {size.files:>6} {size.small:>9}")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "tests").rglob("*.py"))]
    pages, measurements = sorted((ROOT / "docs").glob("*.md")), sorted((ROOT / "docs" / "measurements").glob("*.md"))
    counts = {
        "configuration keys": sum(1 for _ in keys(RunConfig.model_json_schema())),
        "private names that tests use": sum(map(private_accesses, trees)),
        "attributes that tests replace": sum(map(replaced_attributes, trees)),
        "pages": len(pages),
        "words of pages": words(pages),
        "words of measurements": words(measurements),
        "lines of README": len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
    }
    rows += [f"{name}: {count}" for name, count in counts.items()]
    seconds: dict[str, float] = {}
    for row in read_table():
        seconds[row.tier] = seconds.get(row.tier, 0.0) + row.seconds
    rows += [f"seconds of {tier}: {total:.0f}" for tier, total in seconds.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(report())
