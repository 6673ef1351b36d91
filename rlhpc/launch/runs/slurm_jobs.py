"""The Slurm jobs of a run: that of the trainers, and rollout jobs, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.launch.roles import outlives_nodes
from rlhpc.launch.slurm.job_spec import JobSpec, make_spec

ROLLOUT_JOB = "rlhpc.launch.supervise.rollout_jobs:run_rollout_job"


def trainers_part(config: RunConfig) -> RunConfig:
    """The configuration of the trainers' job by what it asks of Slurm: the nodes that are not those of rollout jobs."""
    others = config.all_rollout_job_nodes
    return _with_slurm(config, nodes=config.slurm.least_nodes - others) if others else config


def rollout_part(config: RunConfig) -> RunConfig:
    """That of a rollout job, likewise."""
    jobs, slurm = config.slurm.rollout_jobs, config.slurm
    assert jobs is not None, "there are rollout jobs"
    own = {name: value for name, value in jobs if name not in ("count", "nodes") and value is not None}
    options = {name: value for name, value in slurm.sbatch_options.items() if name.lstrip("-") != "dependency"}
    changed = _with_slurm(config, nodes=config.rollout_job_nodes, sbatch_options=options, **own)
    return changed.model_copy(update={"name": f"{config.name}-rollout"})


def trainers_spec(config: RunConfig, workdir: Path, python: str, conda: str, submission: Path) -> JobSpec:
    """The job that trains."""
    part = trainers_part(config)
    return make_spec(part, workdir, python, conda, submission, outlives_nodes=outlives_nodes(config))


def rollout_spec(config: RunConfig, workdir: Path, python: str, conda: str, submission: Path) -> JobSpec:
    """A rollout job; its dependency on the trainers' job is added when that has its id."""
    return make_spec(rollout_part(config), workdir, python, conda, submission)


def after(job_id: str, spec: JobSpec) -> JobSpec:
    """The job, not to be started before another one, which may have ended by then."""
    return replace(spec, options=(*spec.options, ("dependency", f"after:{job_id}")))


def _with_slurm(config: RunConfig, **changes: Any) -> RunConfig:
    update: Mapping[str, Any] = {**changes, "rollout_jobs": None}
    return config.model_copy(update={"slurm": config.slurm.model_copy(update=dict(update))})
