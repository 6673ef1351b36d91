"""Proof, in the first minute of a job, that the FSDP back end computes the run's models as transformers does."""

from __future__ import annotations

import torch.distributed as dist

from rlhpc.config.schema import RunConfig
from rlhpc.core.heartbeat import enter
from rlhpc.plan.checks.architecture import ProbeResult, check_results, probed_folders


def check_architecture(config: RunConfig) -> None:
    """Raises UserError on every rank for a model that cannot be trained. To be called before engine and models are
    built. Collective over the ranks of this one's world."""
    folders = probed_folders(config)
    if not folders:
        return
    enter("checking the architecture")
    found: list[dict[str, ProbeResult]] = [{}]
    if dist.get_rank() == 0:
        from rlhpc.backends.fsdp.probe import probe

        found = [{key: probe(folder) for key, folder in folders.items()}]
    dist.broadcast_object_list(found, src=0)
    check_results(config, found[0])
