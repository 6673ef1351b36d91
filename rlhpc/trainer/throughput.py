"""FLOPs, MFU and tokens per second of a step's phases, from the lengths of its sequences alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from rlhpc.api import Sample
from rlhpc.config.model_settings import critic_settings
from rlhpc.config.schema import RunConfig
from rlhpc.core.shown import ShownOnly
from rlhpc.plan.estimates.hardware import device_tflops
from rlhpc.plan.estimates.workload import (
    PhaseWork,
    Response,
    SequenceLengths,
    forward_work,
    rates,
    rollout_work,
    update_work,
)
from rlhpc.trainer.roles import Models
from rlhpc.trainer.step_data import StepData

Metrics = dict[str, float]


class Throughput:
    """Speed of a run that trains on ``ranks`` of the job's ``job_ranks`` GPUs, named by their driver (None: not
    GPUs)."""

    def __init__(
        self, config: RunConfig, models: Models, ranks: int, device_name: str | None, job_ranks: int | None = None
    ) -> None:
        self._config, self._models, self._device_name = config, models, device_name
        self._ranks, self._job_ranks = ranks, job_ranks or ranks
        self._guard = ShownOnly("the metrics of throughput")

    def metrics(self, metrics: Mapping[str, float], data: StepData | None, supervised: Sequence[int]) -> Metrics:
        """``perf/…`` of a step with these metrics, its seconds among them: an RL step that trained on ``data``, or one
        that trained on ``supervised`` sequences of these lengths."""
        found: Metrics = {}
        with self._guard:
            work = self._supervised(supervised) if data is None else self._phases(metrics, data)
            seconds = {name: metrics.get(f"perf/{name}_seconds", 0.0) for name in work}
            seconds[""] = metrics.get("perf/step_seconds", 0.0)
            found = rates(work, seconds, self._ranks, self._peak)
            if "perf/tokens_per_second" in metrics:
                found["perf/tokens_per_second_per_gpu"] = metrics["perf/tokens_per_second"] / self._job_ranks
        return found

    @cached_property
    def _peak(self) -> float | None:
        """TFLOP/s of one GPU, if they are known."""
        return device_tflops(self._config, self._device_name) if self._device_name is not None else None

    def _supervised(self, lengths: Sequence[int]) -> dict[str, PhaseWork]:
        if not lengths:
            return {}
        shape, memory = self._models.actor.model.shape, self._config.actor.memory
        return {"update": update_work(shape, memory, SequenceLengths.of(lengths))}

    def _phases(self, metrics: Mapping[str, float], data: StepData) -> dict[str, PhaseWork]:
        models, config = self._models, self._config
        lengths = SequenceLengths.of([len(sample.tokens) for sample in data.samples])
        actor = models.actor.model.shape
        found = {}
        if config.placement == "colocated":  # other ranks generate otherwise
            shared = config.rollout.prefix_caching
            found["rollout"] = rollout_work(actor, map(_response, data.generated), shared_prompts=shared)
        if models.reward is not None:
            found["reward_model"] = forward_work(models.reward.model.shape, SequenceLengths.of(data.reward_lengths))
        passes = [actor] * (("old_log_probs" in data.values) + (models.reference is not None))
        updates = []
        if "skipped_updates" in metrics:  # the step has made updates of the actor
            updates.append(update_work(actor, config.actor.memory, lengths, config.train.epochs))
        if models.critic is not None:
            critic, memory = models.critic.model.shape, critic_settings(config).memory
            passes.append(critic)
            updates.append(update_work(critic, memory, lengths, config.train.epochs))
        for name, works in (("log_probs", [forward_work(shape, lengths) for shape in passes]), ("update", updates)):
            if works:
                found[name] = sum(works[1:], works[0])
        return found


def _response(sample: Sample) -> Response:
    return Response(sample.prompt_id, sample.prompt_len, len(sample.tokens), sample.sampled_len)
