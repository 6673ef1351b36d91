"""Checks of a run before it starts: its models' architectures, ground truths, and the time limit of its job.

An architecture is proved in a process of its own: this one imports no torch. The ranks check all ground truths again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rlhpc
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.files import write_json
from rlhpc.core.imports import import_attribute
from rlhpc.core.storage import NONE, StorageError
from rlhpc.data.files import read_column
from rlhpc.launch.slurm.commands import seconds_of
from rlhpc.models import ModelShape
from rlhpc.plan.checks.architecture import ProbeResult, check_results, check_served, has_own_code, probed_folders
from rlhpc.plan.checks.run import check_nodes
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.run_time import check_walltime, predict_run
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.rewards.calls import unusable

_PROBE_SECONDS = 180.0  # most of it for imports from a slow disk
_NEEDED = ("torch", "transformers")
_SERVED = {"native": "by a model of its own", "transformers": "by its Transformers back end"}
_SOURCES = ("backends/fsdp", "backends/kernels")  # that decide the result
_FILES_SECONDS = 3.0  # for all files: the ranks check the rest
_BUILT_IN = "rlhpc.rewards."


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
    """Row of a summary on the installed vLLM's support of the actor's model; none for a known family, or without vLLM.
    Raises UserError if it does not serve the model."""
    generates = config.train.steps > 0 or bool(config.data.validation)
    if not generates or not config.model.path.is_dir():
        return []
    model = resolve_model(config)
    if isinstance(model, ModelShape):
        return []
    found = check_served(model.architecture, "model.path")
    return [] if found is None else [("engine", f"vLLM serves {model.architecture} {_SERVED[found]}")]


def probe_architecture(folder: Path, prove: Callable[[Path], ProbeResult | None] | None = None) -> ProbeResult | None:
    """Proof for the HuggingFace model in ``folder``, from the user's cache if it is there; None where torch or
    transformers is not installed, or ``prove``, by default a process, fails."""
    if any(find_spec(name) is None for name in _NEEDED):
        return None
    file = cache_file(folder)
    with suppress(OSError, ValueError):
        return ProbeResult.from_json(json.loads(file.read_text(encoding="utf-8")))
    result = (prove or _started)(folder)
    if result is not None:
        with suppress(OSError, StorageError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, result.as_json(), NONE)
    return result


def cache_file(folder: Path) -> Path:
    """File of the result, named by config.json, versions, and rlhpc's sources, which change under development."""
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
    """Result of the probe in a process without GPUs and network."""
    settings = {env.CUDA_VISIBLE_DEVICES: "", env.HF_HUB_OFFLINE: "1", env.OMP_NUM_THREADS: "1"}
    command = [sys.executable, "-m", "rlhpc.backends.fsdp.probe", str(folder)]
    with suppress(OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=_PROBE_SECONDS, check=False
        )
        return ProbeResult.from_json(json.loads(done.stdout.splitlines()[-1]))
    return None


def check_ground_truths(configs: Sequence[RunConfig], seconds: float = _FILES_SECONDS) -> Iterator[str]:
    """Refuses the first row whose ground truth a built-in function cannot use, and warns of it if
    reward_workers.on_failure is not error.

    A user's functions run in the job only, and so does data.filter: training files with one are left to the ranks.
    """
    deadline = time.monotonic() + seconds
    known = []
    for config in configs:  # an array of runs often has the same files
        inputs = (
            config.data,
            config.validation,
            config.rewards,
            config.reward_workers.on_failure,
            config.train.steps > 0,
        )
        if inputs not in known:
            known.append(inputs)
            yield from _check(config, deadline)


def _check(config: RunConfig, deadline: float) -> Iterator[str]:
    checks = dict(_checks(config))
    for place, value in _truths(config) if checks else ():
        for path, check in tuple(checks.items()):
            try:
                if value is not None:  # else the ranks refuse the row
                    check(data_source="", ground_truth=value)
            except (ValueError, RecursionError) as error:
                refused = unusable(value, path, str(error), place)
                if config.reward_workers.on_failure == "error":
                    raise refused from None
                del checks[path]
                yield f"{place}: {refused.message}; others are not shown"
        if not checks or time.monotonic() > deadline:
            return


def _checks(config: RunConfig) -> Iterator[tuple[str, Callable[..., None]]]:
    """Quick checks of built-in functions, by their import paths."""
    for key, entry in config.reward_functions.items():
        if entry.function.startswith(_BUILT_IN):
            check = getattr(import_attribute(entry.function, f"{key}.function"), "quick_check", None)
            if check is not None:
                yield entry.function, check


def _truths(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """(place, ground truth or None) of rows that the run uses."""
    sets: dict[str, int] = {}
    if config.train.steps and config.data.filter is None:
        for index, file in enumerate(config.data.train):
            yield from _of_file(file.path, f"data.train.{index}", None)
    most = config.validation.max_prompts
    for index, file in enumerate(config.data.validation):
        name = file.name or ""
        left = None if most is None else max(0, most - sets.get(name, 0))
        for found in _of_file(file.path, f"data.validation.{index}", left):
            sets[name] = sets.get(name, 0) + 1
            yield found


def _of_file(path: Path, where: str, most: int | None) -> Iterator[tuple[str, Any]]:
    if not path.is_file():  # config.prepare makes it
        return
    try:
        for place, column in itertools.islice(read_column(path, where, "reward_model"), most):
            truth = column.get("ground_truth") if isinstance(column, dict) else None
            yield place, truth
    except ImportError:  # a login node may lack pyarrow
        return


def walltime_warnings(config: RunConfig) -> list[str]:
    """Warnings of a predicted time above the job's limit; none if no GPU is named, the job has no limit, or the model's
    files are absent. Raises UserError."""
    site = read_site(config)
    gpu = named_gpu(config, site)
    if gpu is None or config.slurm.time is None or not config.train.steps or not config.model.path.exists():
        return []
    shape = resolve_model(config)
    if not is_plannable(shape):
        return []
    layout = check_nodes(config, config.slurm.least_nodes, shape)
    nodes = config.slurm.model_copy(update={"nodes": config.slurm.least_nodes})
    least = config.model_copy(update={"slurm": nodes})
    machine = MachineSpeed(gpu, site.efficiency, config.resources.ranks_per_node)
    step = predict_step(least, shape, layout, gpu, site.efficiency)
    run = predict_run(least, shape, layout, machine, site.disk, step)
    return list(check_walltime(run, seconds_of(config.slurm.time)))
