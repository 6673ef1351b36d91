"""Functions that a configuration names by import path, looked for in their files: nothing of them is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean

_KEYS = ("function", "filter", "family", "step")
_MAKERS = ("globals", "vars", "setattr", "exec")  # what may bind names that the file does not show


def check_own_code(config: RunConfig, workdir: Path) -> list[str]:
    """Refuse a name that a module's file does not have; a warning for a module that is not found.

    Modules are looked for in ``workdir``, then among the packages of this Python, unless the job has another one.
    """
    here = config.slurm.conda is None and config.slurm.container is None
    warnings = []
    for key, path in import_paths(config):
        module, _, attribute = path.partition(":")
        file = _in_folder(workdir, module.split(".")) or (_installed(module.split(".")) if here else None)
        if file is not None:
            _check_name(file, attribute.split(".")[0], key)
        elif here and not _known(workdir, module.split(".")[0]):
            where = f"neither in {workdir} nor among the packages of {sys.executable}"
            warnings.append(f"{key}: {path}: no module {module!r} {where}; correct it, or see that the job finds it")
    return warnings


def import_paths(config: RunConfig) -> list[tuple[str, str]]:
    """(key, ``package.module:attribute``) of every function, class or value of its own that the configuration names."""
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
    """The module's file below a folder that its first package is in."""
    places = (folder.joinpath(*parts[:-1], f"{parts[-1]}.py"), folder.joinpath(*parts, "__init__.py"))
    return next((place for place in places if place.is_file()), None)


def _installed(parts: Sequence[str]) -> Path | None:
    """Its first package is found without being imported; None too for what is not written in Python."""
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
    except ValueError:  # no name of a package
        return None


def _check_name(file: Path, name: str, key: str) -> None:
    """Refused only if nothing in the file could bind the name."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is no Python ({error})", where=key, remedy="correct the file") from None
    except OSError:
        return  # the job's ranks will say what they find
    if not set(_bound(tree)) & {name, "*", "__getattr__", *_MAKERS}:
        public = [other for other in _top(tree) if not other.startswith("_")]
        raise UserError(f"{file} has no {name!r}", where=key, remedy=did_you_mean(name, public))


def _top(tree: ast.Module) -> Iterator[str]:
    """Names of the module's own, without those of functions and imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _bound(node)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Names that anything in a module binds, and those it uses to bind others; "*" for an import of all."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _MAKERS):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
