"""How many microbatches of equal cost are best for a pipeline."""

from __future__ import annotations

from math import sqrt

# What a microbatch costs beside its samples, as so many tokens of each of its ranks: below it, the time of a layer on a
# GPU is that of launching its kernels (site.efficiency.launch_us) and no longer of its products.
MICROBATCH_TOKENS = 256


def best_microbatches(stages: int, virtual_stages: int, work: float, overhead: float) -> float:
    """The number m that makes (m + (stages - 1) / virtual_stages) (work / m + overhead) least: the time of 1F1B, with
    the filling and draining of the pipeline. ``work``: of all microbatches; each also costs ``overhead``."""
    return sqrt((stages - 1) / virtual_stages * work / overhead)
