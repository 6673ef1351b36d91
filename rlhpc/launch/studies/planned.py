"""What the planner says of a trial before it costs a job; nothing without a GPU in the configuration."""

from __future__ import annotations

from rlhpc.config.ranks import with_job_ranks
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import DoesNotFitError
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.scenario import Scenario, make_scenario
from rlhpc.plan.shortages import shortages

_HOUR = 3600.0


def check_fits(config: RunConfig) -> None:
    """Raises DoesNotFitError if a run does not fit into the memory of its GPUs, or nodes, by the plan."""
    case = _scenario(config)
    if case is None:
        return
    memory = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
    lacks = shortages(case.config, case.shape, memory, case.gpu)
    if lacks:
        raise DoesNotFitError(f"does not fit, by the plan: {lacks[0].text}", where=lacks[0].where or "memory")


def planned_hours(config: RunConfig) -> float | None:
    """Hours of all ranks of a run, by the plan."""
    case = _scenario(config)
    if case is None or not config.train.steps or not (step := case.step()).engine_fits:
        return None
    return case.run(step).seconds * case.config.world_size / _HOUR


def _scenario(config: RunConfig) -> Scenario | None:
    if not config.model.path.exists():  # a function of the run prepares it
        return None
    return make_scenario(with_job_ranks(config) or config)
