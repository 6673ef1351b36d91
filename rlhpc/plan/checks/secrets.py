"""Checks for secrets in keys whose values others can read."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig
from rlhpc.core.redaction import hide, leaves

# Keys of the slurm section by who reads them.
_COMMAND_LINE = "on srun's command line, which everyone on the nodes can read"
_READERS = {
    "comment": "in the queue, which everyone on the cluster can read",
    "srun_options": _COMMAND_LINE,
    "container": _COMMAND_LINE,
    "sbatch_options": "in the job script, of which Slurm keeps copies",
    "setup": "in the job script, of which Slurm keeps copies",
}


def secret_warnings(config: RunConfig) -> list[str]:
    """Returns one warning for each key with a secret that slurm.environment would hide."""
    slurm = config.slurm.model_dump(mode="json")
    found = []
    for section, where in _READERS.items():
        _, secrets = hide(slurm[section], section)
        for key, _ in leaves(secrets, f"slurm.{section}") if secrets is not None else ():
            found.append(f"{key}: has a secret {where}; put it into slurm.environment")
    return found
