"""Number of ranks per node of a configuration that does not set it: one per GPU."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig

RANKS_KEY, GPUS_KEY = "resources.ranks_per_node", "slurm.gpus_per_node"


def ranks_are_set(config: RunConfig) -> bool:
    """Whether the configuration itself says how many ranks a node has."""
    return "ranks_per_node" in config.resources.model_fields_set


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """The configuration with this number of ranks per node."""
    return config.model_copy(update={"resources": config.resources.model_copy(update={"ranks_per_node": ranks})})


def with_job_ranks(config: RunConfig) -> RunConfig | None:
    """The configuration with as many ranks as ``slurm.gpus_per_node`` GPUs, or one on CPUs, if it sets no number of
    ranks; None if it sets neither."""
    gpus = config.slurm.gpus_per_node
    if ranks_are_set(config):
        return config
    return None if gpus is None else with_ranks(config, max(1, gpus))
