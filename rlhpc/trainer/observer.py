"""Records of each step, which the loop hands to the observer of its rank."""

from __future__ import annotations

import time

import torch

from rlhpc.api import RunState
from rlhpc.core import spans
from rlhpc.core.process import observing
from rlhpc.core.records import MetricsFile
from rlhpc.core.shown import ShownOnly
from rlhpc.core.spans import StepTimeline
from rlhpc.observe.alerts.run import RunAlerts
from rlhpc.observe.cost import CostMeter
from rlhpc.observe.gpu_readings import GpuReadings
from rlhpc.observe.metrics import MetricsWriter, TimelineFile
from rlhpc.observe.phases import Stragglers, load_numbers, loads_of, span_numbers, spans_of, wait_numbers, work_numbers
from rlhpc.observe.rank_numbers import Gathered, OwnCost, RankNumbers, memory_in_use, own_cost_metrics
from rlhpc.parallel.waits import measure_waits
from rlhpc.sharding.placement import placement_of
from rlhpc.trainer.run import Run
from rlhpc.trainer.step_data import StepData
from rlhpc.trainer.step_histograms import RunHistograms
from rlhpc.trainer.throughput import Throughput
from rlhpc.trainer.training_samples import TrainingSamples
from rlhpc.trainer.update import Metrics


class Observer:
    """Records the steps of one rank. Only the first rank writes."""

    def __init__(self, run: Run, state: RunState) -> None:
        self._run = run
        measure_waits()
        spans.take()
        self._spans, self._began = spans.StepSpans(), time.perf_counter()
        info = run.context.info
        self._numbers = RankNumbers()
        self._numbers.add("the memory in use", memory_in_use)
        self._gpu = GpuReadings.of_rank(warns=info.local_rank == 0)
        if self._gpu is not None:
            self._numbers.add("readings of the GPU", self._gpu.take, None)
        if run.rl is not None:
            self._numbers.add("statistics of the engine", run.rl.statistics, None)
        self._numbers.add("the waits", lambda: wait_numbers(self._spans))
        self._numbers.add("the busy times", lambda: work_numbers(self._spans))
        self._numbers.add("the timeline", lambda: span_numbers(self._spans, self._began), ())
        self._numbers.add("the straggler", lambda: load_numbers(self._spans), ())
        self._numbers.add("the cost of observers", OwnCost(), ())
        with observing():
            self._first = _FirstRank(run, state) if info.rank == 0 else None

    def begin(self) -> None:
        """Begins a step."""
        self._began = time.perf_counter()

    def step(self, phase: str, step: int, total: int, metrics: Metrics, began: float) -> None:
        """Records ``step`` of ``total`` in ``phase``. Its time counts from ``began``, by ``time.perf_counter()``: after
        ``begin`` by the time of a validation. Collective."""
        with observing():
            seconds = time.perf_counter() - began
            self._spans = spans.take()
            gathered = self._numbers.gather() if step else None  # step 0 is a validation alone
            if self._first is None:
                return
            tokens = metrics.pop("tokens", None)
            if tokens is not None:
                metrics["perf/tokens_per_second"] = tokens / seconds
                metrics["perf/step_seconds"] = seconds
            absent = metrics.pop("engines/absent_seconds", 0.0)
            for name in ("trainers/idle", "trainers/lent"):
                part = metrics.pop(f"{name}_seconds", None)
                if part is not None:
                    metrics[f"{name}_fraction"] = min(1.0, part / seconds)
            if gathered is not None:
                metrics |= gathered.metrics() | self._first.metrics(gathered, metrics, seconds, tokens or 0.0, absent)
                metrics |= self._first.throughput(phase, metrics)
            self._first.write(phase, step, total, metrics)
            if gathered is not None:
                self._first.draw(phase, step)
            if step and phase == "rl" and self._run.step_data is not None:
                self._first.keep(step, self._run.step_data)

    def close(self) -> None:
        """Closes the files and ends the readings."""
        if self._gpu is not None:
            self._gpu.close()
        if self._first is not None:
            self._first.close()


class _FirstRank:
    """Records of all ranks, which the first rank computes and writes."""

    def __init__(self, run: Run, state: RunState) -> None:
        section, layout, folder = run.config.observe, run.models.actor.layout, run.context.run
        stages = [layout.coord(rank)["pp"] for rank in range(layout.world_size)]
        self._run = run
        self._writer = MetricsWriter(folder, state)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._throughput = Throughput(run.config, run.models, layout.world_size, device, run.context.info.job_size)
        self._histograms = RunHistograms(run.config, folder)
        self._samples = TrainingSamples(run.config, run.context, run.texts, state.step)
        self._alerts = RunAlerts(folder, run.config, run.context.stop, MetricsFile(folder.metrics).steps())
        self._spans: tuple[tuple[spans.Span, ...], ...] = ()  # of each rank in the present step
        self._stragglers = Stragglers(stages, 60 * section.straggler_minutes)
        self._guard, self._timeline = ShownOnly("the timeline"), None
        with self._guard:
            self._timeline = TimelineFile(folder.timeline, state)
        self._engines_guard = ShownOnly("the activity of engines")
        self._cost_guard, self._cost = ShownOnly("the cost of the run"), None
        with self._cost_guard:
            self._cost = CostMeter(run.context.attempt, run.context.info.job_size)

    def metrics(self, gathered: Gathered, known: Metrics, seconds: float, tokens: float, absent: float) -> Metrics:
        """Metrics that follow from the numbers of all ranks in a step of ``seconds``, and from its ``known`` ones.
        ``absent``: seconds of engines whose rollout jobs were not there."""
        found, self._spans = own_cost_metrics(gathered), spans_of(gathered)
        with self._cost_guard:
            if self._cost is not None:
                away = absent * self._run.config.rollout.tp
                found |= self._cost.add(self._idle_seconds(known, seconds), tokens, away).metrics()
        straggler = self._stragglers.add(loads_of(gathered), seconds)
        found["perf/straggler_rank"] = float(straggler.rank if straggler is not None else -1)
        found["perf/straggler_ratio"] = straggler.ratio if straggler is not None else 1.0
        return found

    def _idle_seconds(self, known: Metrics, seconds: float) -> float:
        """Seconds that all ranks have waited in a step, with engines on ranks of their own, too."""
        trainers = known.get("trainers/idle_fraction")
        waits = [span.wait for rank in self._spans for span in rank if trainers is None or span.phase != "rollout"]
        if trainers is None:
            return sum(waits)
        placement = placement_of(self._run.config, self._run.context.info.job_size)
        present = known.get("rollout/engines", float(placement.num_engines)) * placement.tp
        engines = known.get("engines/idle_fraction_mean", 0.0) * present
        return sum(waits) + seconds * (trainers * placement.trainers.size + engines)

    def throughput(self, phase: str, metrics: Metrics) -> Metrics:
        """FLOPs, MFU and tokens per second of a step with these metrics."""
        data = self._run.step_data if phase == "rl" else None
        supervised = self._run.updater.supervised_lengths if phase == "sft" else ()
        return self._throughput.metrics(metrics, data, supervised)

    def write(self, phase: str, step: int, total: int, metrics: Metrics) -> None:
        """Writes a record, and warns of what is wrong in it."""
        record = self._writer.write(phase, step, total, metrics)
        if self._run.engines is not None and phase == "rl":
            with self._engines_guard:
                self._run.engines.write_activity(self._run.context.attempt, step, record)
        self._alerts.step(record)

    def draw(self, phase: str, step: int) -> None:
        """Writes the timeline of the step that ``metrics`` was called for."""
        with self._guard:
            if self._timeline is not None:
                self._timeline.add(StepTimeline(phase, step, time.time(), self._spans))

    def keep(self, step: int, data: StepData) -> None:
        """Writes histograms and samples of an RL step."""
        advantages = data.estimate.advantages
        self._histograms.step(step, data.samples, advantages, self._run.updater.logprob_diffs)
        self._samples.step(step, data.samples, advantages, data.values.get("old_log_probs"))

    def close(self) -> None:
        """Closes the files."""
        self._samples.close()
        self._alerts.close()
        with self._guard:
            if self._timeline is not None:
                self._timeline.write()
        with self._cost_guard:
            if self._cost is not None:
                self._cost.write()
