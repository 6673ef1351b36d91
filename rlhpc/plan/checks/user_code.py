"""Looks for the functions that a configuration names in their files, without running them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError, did_you_mean

_KEYS = ("function", "filter", "family", "step")
_MOST_BYTES = 2 * 2**20
_MAKERS = ("globals", "vars", "setattr", "exec")  # calls that may bind names not visible in the file


def check_own_code(config: RunConfig, workdir: Path) -> list[str]:
    """Refuses names that a module's file does not define; returns warnings for modules that are not found.

    Modules are looked up in ``workdir``, then in this Python's packages unless the job uses another Python.
    """
    here = not config.slurm.other_python
    warnings: list[str] = []
    faults = Faults()
    for key, path in import_paths(config):
        module, _, attribute = path.partition(":")
        file = _in_folder(workdir, module.split(".")) or (_installed(module.split(".")) if here else None)
        if file is not None:
            with faults.collect():
                _check_name(file, attribute.split(".")[0], key)
        elif here and not _known(workdir, module.split(".")[0]):
            where = f"neither in {workdir} nor among the packages of {sys.executable}"
            warnings.append(
                f"{key}: {path}: no module {module!r} {where}; correct it, or make sure that the job finds it"
            )
    faults.raise_all()
    return warnings


def import_paths(config: RunConfig) -> list[tuple[str, str]]:
    """Returns (key, ``package.module:attribute``) of each function, class or value that the configuration names."""
    found = list(_walk(config.model_dump(mode="json", exclude={"slurm"}), ""))
    name = config.algorithm.name
    return found + ([("algorithm.name", name)] if ":" in name else [])


def _walk(node: Any, above: str) -> Iterator[tuple[str, str]]:
    items: Mapping[Any, Any] | Sequence[Any] = node
    for key, value in items.items() if isinstance(items, Mapping) else enumerate(items):
        if key in _KEYS and isinstance(value, str):
            yield above + key, value
        elif key != "arguments" and isinstance(value, (dict, list)):
            yield from _walk(value, f"{above}{key}.")


def _in_folder(folder: Path, parts: Sequence[str]) -> Path | None:
    """Returns the module's file in a folder that contains its top package."""
    places = (folder.joinpath(*parts[:-1], f"{parts[-1]}.py"), folder.joinpath(*parts, "__init__.py"))
    return next((place for place in places if place.is_file()), None)


def _installed(parts: Sequence[str]) -> Path | None:
    """Returns the file of an installed module without importing it; None if it is not written in Python."""
    spec = _spec(parts[0])
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if len(parts) == 1 and spec.origin and spec.origin.endswith(".py") else None
    return next(filter(None, (_in_folder(Path(p).parent, parts) for p in spec.submodule_search_locations)), None)


def _known(workdir: Path, package: str) -> bool:
    return (bool(package) and (workdir / package).is_dir()) or _spec(package) is not None


def _spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except ValueError:  # not a package name
        return None


def _check_name(file: Path, name: str, key: str) -> None:
    """Refuses the name only if nothing in the file could bind it."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return  # such a file is data, and takes its syntax tree minutes and gigabytes
        tree = ast.parse(file.read_bytes(), str(file))
    except (RecursionError, MemoryError):  # the parser's words for it
        raise UserError(f"{file} is nested too deeply", where=key, remedy="correct the file") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not Python ({error})", where=key, remedy="correct the file") from None
    except OSError:
        return  # reported by the job's ranks, if it fails there too
    if not set(_bound(tree)) & {name, "*", "__getattr__", *_MAKERS}:
        public = [other for other in _top(tree) if not other.startswith("_")]
        raise UserError(f"{file} has no {name!r}", where=key, remedy=did_you_mean(name, public))


def _top(tree: ast.Module) -> Iterator[str]:
    """Yields the module's top-level names, without imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _bound(node)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yields names bound anywhere in a module, and calls that may bind others; "*" for a star import."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _MAKERS):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
