"""What is recorded of each step: the loop hands every step to the observer of its rank."""

from __future__ import annotations

import logging
import time

from rlhpc.api import RunState
from rlhpc.observe.flat_reward import FlatReward
from rlhpc.observe.gpu_readings import GpuReadings
from rlhpc.observe.memory import memory_in_use
from rlhpc.observe.metrics import MetricsWriter
from rlhpc.observe.prometheus import PrometheusFile
from rlhpc.observe.rank_numbers import RankNumbers
from rlhpc.trainer.run import Run
from rlhpc.trainer.step_histograms import RunHistograms
from rlhpc.trainer.training_samples import TrainingSamples
from rlhpc.trainer.update import Metrics

_log = logging.getLogger(__name__)


class Observer:
    """Records the steps of one rank. Only the first rank writes."""

    def __init__(self, run: Run, state: RunState) -> None:
        self._run, self._flat = run, FlatReward()
        self._numbers = RankNumbers()
        self._numbers.add("the memory in use", memory_in_use)
        info = run.context.info
        self._gpu = GpuReadings.of_rank(run.config.observe.device_seconds, warns=info.local_rank == 0)
        if self._gpu is not None:
            self._numbers.add("readings of the GPU", self._gpu.take, None)
        first, tensorboard = run.context.info.rank == 0, run.config.observe.tensorboard
        self._writer = MetricsWriter(run.context.run, state, tensorboard=tensorboard) if first else None
        self._prometheus = PrometheusFile(run.config.observe, run.config.name, run.context.run)
        self._histograms = RunHistograms(run.config, run.context.run)
        self._samples = TrainingSamples(run.config, run.context, run.texts, state.step)

    def step(self, phase: str, step: int, total: int, metrics: Metrics, began: float) -> None:
        """Records ``step`` of ``total`` in ``phase``, which began at ``time.perf_counter()`` ``began``. Collective."""
        seconds = time.perf_counter() - began
        gathered = self._numbers.gather() if step else None  # step 0 is a validation alone
        if phase == "rl" and (data := self._run.step_data) is not None:
            self._samples.step(step, data.samples, data.estimate.advantages, data.values.get("old_log_probs"))
        if self._writer is None:
            return
        tokens = metrics.pop("tokens", None)
        if tokens is not None:
            metrics["perf/tokens_per_second"] = tokens / seconds
            metrics["perf/step_seconds"] = seconds
        if gathered is not None:
            metrics |= gathered.metrics()
        self._prometheus.write(self._writer.write(phase, step, total, metrics))
        if phase == "rl" and (data := self._run.step_data) is not None and step:
            diffs = self._run.updater.logprob_diffs
            self._histograms.step(step, data.samples, data.estimate.advantages, diffs)
        if warning := self._flat.add({"phase": phase, "step": step, **metrics}):
            _log.warning(warning)

    def close(self) -> None:
        """Closes the files and ends the readings."""
        self._samples.close()
        if self._gpu is not None:
            self._gpu.close()
        if self._writer is not None:
            self._writer.close()
