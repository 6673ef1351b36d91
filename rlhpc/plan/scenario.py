"""A configuration with everything that predictions of its time and memory need, what it lacks, and its changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import DiskSection, EfficiencySection
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.limits import cache_key, cache_remedy, holds_sequence
from rlhpc.plan.checks.run import check_plannable
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit, named_gpu, read_site
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, engine_memory, predict_memory, sequence_tokens
from rlhpc.plan.estimates.roofline import RLHPC, KernelCounts, MachineSpeed
from rlhpc.plan.estimates.run_time import CheckpointInterval, RunTime, predict_run, recommend_interval
from rlhpc.plan.estimates.step_time import StepTime, predict_step_on
from rlhpc.sharding.layout import ParallelLayout


@dataclass(frozen=True)
class Scenario:
    """A run on the most nodes that the configuration allows."""

    config: RunConfig
    shape: ModelDescription
    layout: ParallelLayout
    gpu: Gpu
    efficiency: EfficiencySection
    disk: DiskSection
    kernels: KernelCounts = RLHPC

    @property
    def machine(self) -> MachineSpeed:
        return MachineSpeed(self.gpu, self.efficiency, self.config.resources.ranks_per_node, self.kernels)

    def memory(self) -> MemoryPlan:
        return predict_memory(self.config, self.shape, self.layout, self.gpu.memory_gib, self.gpu.reserves)

    def lacks(self, memory: MemoryPlan) -> list[Shortage]:
        """Returns what the run lacks of ``memory``, the predicted."""
        return shortages(self.config, self.shape, memory, self.gpu)

    def step(self) -> StepTime:
        return predict_step_on(self.config, self.shape, self.layout, self.machine)

    def run(self, step: StepTime) -> RunTime:
        """Returns the time of all of its steps, each as long as ``step``."""
        return predict_run(self.config, self.shape, self.layout, self.machine, self.disk, step)

    def checkpoint_interval(self, run: RunTime, measured: Sequence[float] = ()) -> CheckpointInterval:
        """Returns the interval that loses least. ``measured``: seconds of saves of earlier attempts."""
        nodes = max(1, self.layout.world_size // self.config.resources.ranks_per_node)
        return recommend_interval(self.config, nodes, run.step, save=run.save, write=run.write, measured=measured)


def make_scenario(config: RunConfig, gpu: str | None = None) -> Scenario | None:
    """Returns the scenario on the named GPU, else on the configured one; None without either."""
    site = read_site(config)
    found = named_gpu(config, site, gpu)
    if found is None:
        return None
    shape = resolve_model(config)
    layout = check_plannable(config, shape)
    return Scenario(config, shape, layout, found, site.efficiency, site.disk)


@dataclass(frozen=True)
class Shortage:
    """``what``: a phase, "KV cache" or "CPU memory". ``needed`` and ``limit`` in bytes; of a cache in tokens."""

    what: str
    needed: float
    limit: float
    where: str = ""  # the key that sets the limit
    remedy: str = ""

    @property
    def text(self) -> str:
        """In a few words, for a table."""
        if self.what == "KV cache":
            return f"KV cache: {self.limit:,.0f} of {self.needed:,.0f} tokens"
        return f"{self.what}: {self.needed / GIB:,.1f} of {self.limit / GIB:,.1f} GiB"


def shortages(config: RunConfig, shape: ModelDescription, memory: MemoryPlan, gpu: Gpu | None) -> list[Shortage]:
    """Returns what the run lacks on this GPU; without one, only what the config itself limits."""
    found = []
    if gpu is not None:
        size = gpu.memory_bytes
        found += [Shortage(phase.name, phase.total, size) for phase in memory.phases if phase.total > size]
    gib = gpu.memory_gib if gpu is not None else None
    if not holds_sequence(config, shape, gib):
        engine = engine_memory(config, shape, None if gib is None else int(gib * GIB))
        where, remedy = f"rollout.{cache_key(config.rollout)}", cache_remedy(config, shape, gib)
        found.append(Shortage("KV cache", sequence_tokens(config), max(0, engine.tokens), where, remedy))
    limit = cpu_memory_limit(config, gpu)
    if limit is not None and memory.cpu.node > limit[1]:
        found.append(Shortage("CPU memory", memory.cpu.node, limit[1], limit[0]))
    return found


def changed_config(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the config with ``changes`` applied."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: Any, names: list[str], value: Any) -> Any:
    assert isinstance(section, BaseModel)
    own = value if len(names) == 1 else _changed(getattr(section, names[0]), names[1:], value)
    return section.model_copy(update={names[0]: own})


def differences(before: BaseModel, after: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of ``after`` that differ, with their values."""
    for name in type(before).model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            yield from differences(old, new, f"{above}{name}.")
        elif old != new:
            yield f"{above}{name}", new
