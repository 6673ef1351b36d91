"""Finds the files that a change can reach, by imports, module names and file names in the sources.

Executes nothing. An edge is an import anywhere in a file, or a string that names a module of the repository
(entry points such as ``rlhpc.trainer.main:run_rank``) or a file or folder of it (``configs``, ``demo.yaml``).
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TOPS = ("rlhpc", "tests", "tools", "bench")
_MODULE = re.compile(rf"\b(?:{'|'.join(_TOPS)})(?:\.\w+)+")
# Changes of these can reach every test.
EVERYTHING = ("pyproject.toml", "requirements/", "tests/conftest.py", "tests/tiers/")
# Preloads modules that tests import themselves; reads a page that names many modules.
_WITHOUT_EDGES = ("tests/helpers/warm.py", "tests/tiers/plugin.py")
_DAY = 86_400
_TEXTS = (".yaml", ".yml", ".md", ".sbatch", ".jsonl")


@dataclass(frozen=True)
class Graph:
    """Graph of files. ``uses``: files that a file imports or names, by path relative to the root."""

    uses: Mapping[str, frozenset[str]]

    def reached_by(self, changed: Iterable[str]) -> dict[str, int]:
        """Every file that a change of ``changed`` can reach, with its distance in edges."""
        users: dict[str, list[str]] = {}
        for file, used in self.uses.items():
            for other in used:
                users.setdefault(other, []).append(file)
        distance = dict.fromkeys(changed, 0)
        if any(file.startswith(EVERYTHING) for file in distance):
            distance |= {file: 1 for file in self.uses if file not in distance}
        queue = deque(distance)
        while queue:
            file = queue.popleft()
            for user in users.get(file, ()):
                if user not in distance:
                    distance[user] = distance[file] + 1
                    queue.append(user)
        return distance

    def near(self, changed: Iterable[str]) -> dict[str, int]:
        """Test files that a change of ``changed`` reaches by one edge, or that are in the folder of its tests, with
        their distance. Files that every test depends on do not count."""
        changed = [file for file in changed if not file.startswith(EVERYTHING)]
        folders = {Path("tests", *Path(file).parts[1:-1]) for file in changed if file.startswith("rlhpc/")}
        found = {file: far for file, far in self.reached_by(changed).items() if is_test_file(file)}
        return {file: far for file, far in found.items() if far <= 1 or Path(file).parent in folders}

    def tests_reached_by(self, changed: Iterable[str]) -> list[str]:
        """Test files that the change can reach, nearest first."""
        found = {file: far for file, far in self.reached_by(changed).items() if is_test_file(file)}
        return sorted(found, key=lambda file: (found[file], file))


def is_test_file(path: str) -> bool:
    """Whether pytest collects tests from it."""
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def tracked_files(root: Path = ROOT) -> list[str]:
    """Files that git tracks, and untracked ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [file for file in listed if (root / file).is_file()]


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from the merge base with ``base``, including uncommitted ones."""
    ancestor = subprocess.run(
        ["git", "merge-base", base, "HEAD"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    commands = (["git", "diff", "--name-only", ancestor], ["git", "ls-files", "--others", "--exclude-standard"])
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        found.update(done.stdout.splitlines())
    return sorted(found)


def changed_within_a_day(root: Path = ROOT) -> list[str] | None:
    """Files of the commits of the day before the newest one's date; None in a shallow clone, whose history is cut."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "true":
        return None
    since = int(git("log", "-1", "--format=%ct")) - _DAY
    return sorted(set(git("log", f"--since={since}", "--format=", "--name-only").splitlines()))


def read_graph(root: Path = ROOT) -> Graph:
    """Graph of the repository's working tree."""
    files = tracked_files(root)
    modules = {_module_of(file): file for file in files if file.endswith(".py") and file.startswith(_TOPS)}
    named = _by_name(file for file in files if not file.endswith(".py"))
    uses = {}
    for module, file in modules.items():
        nodes = list(ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))))
        found = set(_imported(nodes, modules)) | set(_mentioned(nodes, modules, named))
        found |= set(_packages(module, modules)) | set(_conftests(file, files))
        uses[file] = frozenset(found - {file}) if file not in _WITHOUT_EDGES else frozenset()
    for file in files:
        if file.endswith(_TEXTS):  # for example a config or a page that names a reward function
            text = (root / file).read_text(encoding="utf-8")
            uses[file] = frozenset(used for match in _MODULE.finditer(text) for used in _resolve(match[0], modules))
    return Graph(uses)


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _packages(module: str, modules: Mapping[str, str]) -> Iterator[str]:
    """``__init__`` files executed before the module."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        if (package := modules.get(".".join(parts[:count]))) is not None:
            yield package


def _resolve(name: str, modules: Mapping[str, str]) -> Iterator[str]:
    """File of the longest prefix of a dotted name that is a module, and those of its packages."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if module in modules:
            yield modules[module]
            yield from _packages(module, modules)
            return


def _imported(nodes: Iterable[ast.AST], modules: Mapping[str, str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _resolve(alias.name, modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield from _resolve(f"{node.module}.{alias.name}", modules)


def _mentioned(nodes: Iterable[ast.AST], modules: Mapping[str, str], named: Mapping[str, list[str]]) -> Iterator[str]:
    """Modules and files named in strings other than docstrings."""
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in documentation:
            continue
        for match in _MODULE.finditer(node.value):
            yield from _resolve(match[0], modules)
        for part in re.split(r"[/\s:]", node.value) if len(node.value) < 1000 else ():
            yield from named.get(part, ())


def _by_name(files: Iterable[str]) -> dict[str, list[str]]:
    """Files by name and by the names of their folders."""
    found: dict[str, list[str]] = {}
    for file in files:
        for part in {*Path(file).parts} - {*_TOPS, "docs"} if "/" in file else {file}:
            found.setdefault(part, []).append(file)
    return found


def _conftests(file: str, files: Iterable[str]) -> Iterator[str]:
    """conftest files that pytest loads for a test file."""
    if is_test_file(file):
        for folder in Path(file).parents:
            conftest = (folder / "conftest.py").as_posix()
            if conftest in files:
                yield conftest
