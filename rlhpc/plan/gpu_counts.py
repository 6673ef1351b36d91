"""Searches the fastest layout on each of several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.back_ends import fitting_layouts
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.remedies import changed_config
from rlhpc.plan.search import Candidate
from rlhpc.sharding.placement import engine_ranks, judge_ranks, training_ranks


@dataclass(frozen=True)
class OnGpus:
    """The fastest layout on ``gpus`` GPUs, or why none fits."""

    gpus: int
    best: Candidate | None
    reason: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second of one GPU; 0 if none fits."""
        return self.best.step.tokens_per_second / self.gpus if self.best is not None and not self.best.lacks else 0.0


def search_counts(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection, counts: Sequence[int]
) -> Iterator[OnGpus]:
    """Yields a result for each number of GPUs, with the configured shares of ranks that generate and judge."""
    for gpus in counts:
        try:
            found = fitting_layouts(_sized(config, gpus), shape, gpu, efficiency, 1)
        except UserError as error:
            yield OnGpus(gpus, None, error.message)
        else:
            yield OnGpus(gpus, found.best[0], "; ".join(lack.text for lack in found.best[0].lacks))


def _sized(config: RunConfig, gpus: int) -> RunConfig:
    """The config on so many GPUs. Raises UserError if they are no whole nodes, or do not divide by the shares."""
    nodes, rest = divmod(gpus, config.resources.ranks_per_node)
    generates, judges = engine_ranks(config) or 0, judge_ranks(config)
    trains = training_ranks(config, config.world_size)
    common = gcd(trains, generates, judges)
    parts = (trains + generates + judges) // common
    if rest or not nodes:
        raise UserError(f"no whole nodes of {config.resources.ranks_per_node} GPUs")
    if not generates:
        return changed_config(config, {"slurm.nodes": nodes})
    if gpus % parts:
        raise UserError(f"the shares of ranks that train and that do not need a multiple of {parts} GPUs")
    split: dict[str, int | None] = {"rollout.ranks": gpus // parts * (generates // common), "rollout.nodes": None}
    if judges:
        split |= {"judges.ranks": gpus // parts * (judges // common), "judges.nodes": None}
    return changed_config(changed_config(config, {"slurm.nodes": nodes}), split)
