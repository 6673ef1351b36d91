"""Finds Slurm options that hide some of a node's GPUs from a task. Pure.

Every rank takes the GPU of its local rank, and vLLM asserts that it sees that many (v1/worker/gpu_worker.py:
``local_rank < device_count``), so each rank has to see all GPUs that the job has on its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError

WHAT_WORKS = "--gpus-per-node=N or --gres=gpu:N, with --gpu-bind=none"
_BIND, _TRES_BIND = "gpu-bind", "tres-bind"
# Options that bind tasks unless --gpu-bind is given (srun(1), --gpus-per-task and --ntasks-per-gpu).
_IMPLIES_BINDING = ("gpus-per-task", "ntasks-per-gpu", "tres-per-task")
# Variables that sbatch sets from these options and srun reads.
_VARIABLES = {
    _BIND: env.SLURM_GPU_BIND,
    _TRES_BIND: env.SLURM_TRES_BIND,
    "gpus-per-task": env.SLURM_GPUS_PER_TASK,
    "ntasks-per-gpu": env.SLURM_NTASKS_PER_GPU,
    "tres-per-task": env.SLURM_TRES_PER_TASK,
}


def check_config_binding(config: RunConfig, sbatch: Mapping[str, object]) -> None:
    """Raises UserError if ranks would not see all GPUs of their node. ``sbatch``: ``slurm.sbatch_options`` by sbatch's
    names."""
    own = {name: (str(value), f"slurm.sbatch_options.{name}") for name, value in sbatch.items()}
    _check(config, own)


def check_job_binding(config: RunConfig, environ: Mapping[str, str]) -> None:
    """The same for the job of a plain sbatch script, from the environment of its batch step."""
    groups = range(int(environ.get(env.SLURM_HET_SIZE, "1")))
    own = {}
    for option, variable in _VARIABLES.items():
        names = [variable, *(env.of_het_group(variable, group) for group in groups)]
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is not None:
            own[option] = (value, f"--{option}")
    _check(config, own)


def _check(config: RunConfig, job: Mapping[str, tuple[str, str]]) -> None:
    """``job``: value and place of each option of the job. Those of its srun take precedence."""
    ranks = config.resources.ranks_per_node
    if ranks == 1 or config.slurm.gpus_per_node == 0:
        return
    step = {name: (value, "slurm.srun_options") for name, value in parse(config.slurm.srun_options).items()}
    options = {**job, **step}
    name = binding_option({name: value for name, (value, _) in options.items()})
    if name is None:
        return
    value, where = options[name]
    shown = value if where.endswith(name) else f"--{name}={value}"
    raise UserError(
        f"{shown} binds each of the {ranks} ranks of a node to some of its GPUs, but vLLM needs every rank to see all",
        where=where,
        remedy=f"submit with {WHAT_WORKS}" if where.startswith("--") else f"leave it out, or use {WHAT_WORKS}",
    )


def binding_option(options: Mapping[str, str]) -> str | None:
    """Long name of the option that binds tasks to some of the GPUs; None if they see all of them."""
    bind = options.get(_BIND)
    if bind is not None:
        return None if _is_none(bind) else _BIND
    by_tres = [part for part in options.get(_TRES_BIND, "").split("+") if "gpu" in part]
    if by_tres:
        return None if all(_is_none(part.partition("gpu")[2].lstrip(":")) for part in by_tres) else _TRES_BIND
    return next((name for name in _IMPLIES_BINDING if _asks_for_gpus(name, options.get(name, ""))), None)


def _asks_for_gpus(name: str, value: str) -> bool:
    return "gpu" in value if name == "tres-per-task" else value not in ("", "0")


def _is_none(binding: str) -> bool:
    """Whether the binding is none, after an optional ``verbose,`` or ``v,``."""
    kinds = [
        kind for kind in binding.lower().replace(":", ",").split(",") if kind not in ("v", "verbose", "q", "quiet")
    ]
    return kinds in ([], ["none"])


def parse(words: Sequence[str]) -> dict[str, str]:
    """Long options of a command line by name, without --: ``--name=value`` or ``--name value``."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            found[name] = value if given or following.startswith("-") else following
    return found
