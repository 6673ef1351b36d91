"""Measures activations of a run's architectures, in a process of its own: this one imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.described import is_known, resolve_model
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError, one_line
from rlhpc.plan.estimates.fsdp_activations import MeasuredActivations, keep_measured

_SECONDS = 600.0  # a model of hundreds of layers on a slow disk
_NEEDED = ("torch", "transformers")
_WHERE = "rlhpc plan measure"
_REASON = 300  # letters


@dataclass(frozen=True)
class Measurement:
    """``measured`` None: a known family, which is counted by itself. ``file``: where it is kept."""

    key: str
    folder: Path
    layers: int
    measured: MeasuredActivations | None = None
    file: Path | None = None


def measure_run(config: RunConfig) -> list[Measurement]:
    """Measures the architectures of a run's models and keeps the results. Raises UserError."""
    found = []
    for key, folder in _folders(config).items():
        model = resolve_model(config, None if key == "model.path" else folder, classifier=key != "model.path")
        if is_known(model):
            found.append(Measurement(key, folder, model.num_layers))
            continue
        measured = measure_folder(folder, config.model.dtype, trusted=config.model.trust_remote_code)
        file = _kept(folder, config.model.dtype, measured)
        found.append(Measurement(key, folder, model.num_layers, measured, file))
    return found


def _kept(folder: Path, dtype: str, measured: MeasuredActivations) -> Path:
    try:
        return keep_measured(folder, dtype, measured)
    except OSError as error:
        raise UserError(
            f"the result cannot be kept ({error})", where=_WHERE, remedy=f"set {env.XDG_CACHE_HOME}"
        ) from None


def measure_folder(folder: Path, dtype: str, *, trusted: bool = False) -> MeasuredActivations:
    """Measures the model in ``folder``. Raises UserError if it cannot be. ``trusted``: its code may be executed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed", where=_WHERE, remedy="measure where a job runs")
    settings = {env.CUDA_VISIBLE_DEVICES: "", env.HF_HUB_OFFLINE: "1", env.OMP_NUM_THREADS: "1"}
    command = [sys.executable, "-m", "rlhpc.backends.fsdp.saved_activations", str(folder), dtype]
    command += ["--trusted"] if trusted else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"no result within {_SECONDS:,.0f} s", where=_WHERE) from None
    try:
        result: Any = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = one_line(done.stderr)[-_REASON:]
        raise UserError(f"the process ended with {done.returncode}: {tail}", where=_WHERE) from None
    if "error" in result:
        raise UserError(str(result["error"]), where=_WHERE, remedy="plan without: a bound takes its place")
    return MeasuredActivations.from_json(result)


def _folders(config: RunConfig) -> dict[str, Path]:
    """Returns the folders of the run's models by their keys."""
    folders = {"model.path": config.model.path}
    if config.algorithm.name in WITH_CRITIC and config.critic.path is not None:
        folders["critic.path"] = config.critic.path
    if config.reward_model is not None:
        folders[f"{config.reward_model_key}.model"] = config.reward_model.model
    return folders
