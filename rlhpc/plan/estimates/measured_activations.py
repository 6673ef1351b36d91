"""Activations of an architecture as its modules store them, measured once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.models import read_config

_FORMAT = 1
_PACKAGES = ("torch", "transformers")
# Fields of a config.json that change no module.
_IRRELEVANT = frozenset(("_name_or_path", "torch_dtype", "dtype", "transformers_version", "architectures", "use_cache"))


@dataclass(frozen=True)
class MeasuredActivations:
    """Bytes per token on one rank, of all layers together except ``largest_layer``; ``constant``: of any number of
    tokens, per layer. With fused attention.

    ``queries``, ``keys_values``, ``outputs``, ``sums``: of attention's kernels. ``mlp``, ``moe``, ``shared_experts``:
    what recomputation of these parts saves.
    """

    layers: float
    outside: float
    largest_layer: float
    constant: float
    queries: float
    keys_values: float
    outputs: float
    sums: float
    mlp: float = 0.0
    moe: float = 0.0
    shared_experts: float = 0.0

    @classmethod
    def from_json(cls, value: Any) -> MeasuredActivations:
        """Inverse of ``asdict``. Raises ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError("not measured activations")
        if not all(isinstance(number, int | float) and 0 <= number < 1e12 for number in value.values()):
            raise ValueError("not measured activations")
        return cls(**value)


def find_measured(folder: Path, dtype: str) -> MeasuredActivations | None:
    """Returns what was measured of the model in ``folder`` with the installed versions; with any where they are not
    installed. None without."""
    try:
        file = _file(folder, dtype)
        status = file.stat()
        return _read(file, (status.st_mtime_ns, status.st_size))
    except (OSError, UserError):
        return None


@lru_cache(maxsize=16)
def _read(file: Path, stamp: object) -> MeasuredActivations | None:
    """Cached, because a search asks for it with each layout; ``stamp`` changes with the file."""
    try:
        found, installed = json.loads(file.read_text(encoding="utf-8")), package_versions()
        if found["format"] != _FORMAT or (installed and found["versions"] != installed):
            return None
        return MeasuredActivations.from_json(found["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_measured(folder: Path, dtype: str, measured: MeasuredActivations) -> Path:
    """Keeps it in the cache; returns the file. Raises OSError."""
    file = _file(folder, dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"format": _FORMAT, "versions": package_versions(), "measured": asdict(measured)})
    return file


def package_versions() -> dict[str, str]:
    """Versions of the packages that compute; empty where one is not installed."""
    try:
        return {name: version(name) for name in _PACKAGES}
    except PackageNotFoundError:
        return {}


def _file(folder: Path, dtype: str) -> Path:
    base = os.environ.get(env.XDG_CACHE_HOME) or ""
    cache = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return cache / "rlhpc" / "activations" / f"{_digest(read_config(folder))}-{dtype}.json"


def _digest(config: Mapping[str, Any]) -> str:
    relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:24]
