"""A configuration with everything that predictions of its time and memory need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import DiskSection, EfficiencySection
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.run import check_plannable
from rlhpc.plan.estimates.hardware import Gpu, named_gpu, read_site
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
