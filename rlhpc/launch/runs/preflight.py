"""Checks of a run before it starts: its models' architectures, ground truths, and the time limit of its job.

The ranks check all ground truths again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.imports import import_attribute
from rlhpc.data.files import read_column
from rlhpc.launch.slurm.commands import seconds_of
from rlhpc.models import ModelShape
from rlhpc.plan.checks.architecture import (
    ENGINE,
    TRAINER,
    ProbeResult,
    Proof,
    check_results,
    check_served,
    has_own_code,
    probed_folders,
    served_folders,
)
from rlhpc.plan.checks.run import check_nodes
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.run_time import check_walltime, predict_run
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.rewards.calls import unusable

_SERVED = {"native": "by a model of its own", "transformers": "by its Transformers back end"}
_FILES_SECONDS = 3.0  # for all files: the ranks check the rest
_BUILT_IN = "rlhpc.rewards."


def check_architectures(configs: Sequence[RunConfig], *, engine: bool = False) -> Iterator[str]:
    """Refuses models that the FSDP back end cannot train or that vLLM computes otherwise; warns of those that only the
    job can prove. ``engine``: prove what vLLM computes here, where no result is kept."""
    results: dict[tuple[Proof, Path], ProbeResult | None] = {}
    for config in configs:
        for proof, folders in ((TRAINER, probed_folders(config)), (ENGINE, served_folders(config))):
            for key, folder in folders.items():
                starts = engine or proof is TRAINER
                if (proof, folder) not in results:
                    results[proof, folder] = proof.result(folder) if starts else proof.kept(folder)
                if (result := results[proof, folder]) is not None:
                    check_results(config, {key: result}, proof)
                elif starts:
                    yield f"{key}: no proof here that {proof.claim}: {proof.otherwise}"
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
