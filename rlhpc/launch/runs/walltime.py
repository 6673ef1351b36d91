"""Compares the predicted time of a run with the time limit of its job."""

from __future__ import annotations

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.launch.slurm.commands import seconds_of
from rlhpc.plan.checks.run import check_nodes
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.run_time import check_walltime, predict_run
from rlhpc.plan.estimates.step_time import predict_step


def walltime_warnings(config: RunConfig) -> list[str]:
    """Warnings; none if no GPU is named, the job has no limit, or the model's files are not there yet. Raises
    UserError."""
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
