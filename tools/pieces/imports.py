"""Imports modules from the prepared wheels, as far as this machine has their dependencies."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from tools.pieces.target import Target
from tools.pieces.wheels import Wheel

MODULES = {"rlhpc": ("rlhpc.cli.main", "rlhpc.trainer.build"), "megatron-core": ("megatron.core",)}

# Prints one line of JSON at the end: the error of the import and the missing module, if any.
_CODE = """
import importlib, json, sys
folder, module = sys.argv[1:]
sys.path.insert(0, folder)
result = {"error": None, "lacks": None}
try:
    file = importlib.import_module(module).__file__ or ""
    if not file.startswith(folder):
        result["error"] = f"is imported from {file}"
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        result["lacks"] = error.name
print(json.dumps(result))
"""


def check_imports(wheels: Sequence[Wheel], target: Target, folder: Path) -> list[str]:
    """One line per import, checked or not. Raises UserError if an import fails because of the wheels."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if (here, platform.system(), platform.machine()) != (target.python, "Linux", target.machine):
        mine = f"Python {here} on {platform.system()} {platform.machine()}"
        return [f"imports not checked: this is {mine}, the target Python {target.python} on Linux {target.machine}"]
    for wheel in wheels:
        with zipfile.ZipFile(wheel.path) as archive:
            archive.extractall(folder)
    names = {wheel.name for wheel in wheels}
    modules = [module for name, listed in MODULES.items() if name in names for module in listed]
    return [_check(module, target, folder) for module in modules]


def _check(module: str, target: Target, folder: Path) -> str:
    command = [sys.executable, "-c", _CODE, str(folder), module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        result = {"error": f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}", "lacks": None}
    if result["error"] is None:
        return f"import {module}: works"
    missing = (result["lacks"] or "").partition(".")[0]
    if missing and not (folder / missing).exists() and canonicalize_name(missing) in target.packages:
        return f"import {module}: not checked beyond {missing}, which the target has and this machine lacks"
    raise UserError(
        f"cannot be imported from the wheels: {result['error']}",
        where=module,
        remedy="bring the missing module with --bring, or pass --no-import-check",
    )
