"""Proof of a model's architecture before a run, in a process of its own: this one imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import rlhpc
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.files import write_json
from rlhpc.core.storage import NONE, StorageError
from rlhpc.models import ModelShape
from rlhpc.plan.checks.architecture import ProbeResult, check_results, has_own_code, probed_folders
from rlhpc.plan.checks.served import check_served

_SECONDS = 180.0  # of which imports from a slow disk take most
_NEEDED = ("torch", "transformers")
_SERVED = {"native": "by a model of its own", "transformers": "by its Transformers back end"}
_SOURCES = ("backends/fsdp", "backends/kernels")  # that decide the result


def check_architectures(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Refuses models that the FSDP back end cannot train; warns of those that only the job can prove."""
    results: dict[Path, ProbeResult | None] = {}
    for config in configs:
        for key, folder in probed_folders(config).items():
            if folder not in results:
                results[folder] = probe_architecture(folder)
            if (result := results[folder]) is not None:
                check_results(config, {key: result})
            else:
                needed = " and ".join(_NEEDED)
                yield f"{key}: no proof without {needed} here: the job's first minute decides whether it can be trained"
        if config.model.path.is_dir() and has_own_code(config, config.model.path):
            yield "model.trust_remote_code: nothing proves that the folder's own code trains as it computes"


def serving(config: RunConfig) -> list[tuple[str, str]]:
    """How the installed vLLM serves the actor's model, as a row of a summary; no row for a known family, or where vLLM
    is not installed. Raises UserError if it does not serve the model."""
    generates = config.train.steps > 0 or bool(config.data.validation)
    if not generates or not config.model.path.is_dir():
        return []
    model = resolve_model(config)
    if isinstance(model, ModelShape):
        return []
    found = check_served(model.architecture, "model.path")
    return [] if found is None else [("engine", f"vLLM serves {model.architecture} {_SERVED[found]}")]


def probe_architecture(folder: Path) -> ProbeResult | None:
    """Proof for the HuggingFace model in ``folder``, from the user's cache if it is there; None where torch or
    transformers is not installed, or the process fails."""
    if any(find_spec(name) is None for name in _NEEDED):
        return None
    file = cache_file(folder)
    with suppress(OSError, ValueError):
        return ProbeResult.from_json(json.loads(file.read_text(encoding="utf-8")))
    result = _started(folder)
    if result is not None:
        with suppress(OSError, StorageError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, result.as_json(), NONE)
    return result


def cache_file(folder: Path) -> Path:
    """Where the result is kept: by config.json, versions, and rlhpc's sources, which change under development."""
    base = os.environ.get(env.XDG_CACHE_HOME) or ""
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(repr([(name, _version(name)) for name in ("rlhpc", *_NEEDED)]).encode())
    for sources in _SOURCES:
        for source in sorted((Path(rlhpc.__file__).parent / sources).glob("*.py")):
            digest.update(source.read_bytes())
    return root / "rlhpc" / "architectures" / f"{digest.hexdigest()[:32]}.json"


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "none"


def _started(folder: Path) -> ProbeResult | None:
    """Result of a process, without GPUs and network."""
    settings = {env.CUDA_VISIBLE_DEVICES: "", env.HF_HUB_OFFLINE: "1", env.OMP_NUM_THREADS: "1"}
    command = [sys.executable, "-m", "rlhpc.backends.fsdp.probe", str(folder)]
    with suppress(OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=_SECONDS, check=False
        )
        return ProbeResult.from_json(json.loads(done.stdout.splitlines()[-1]))
    return None
