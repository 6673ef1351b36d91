"""Seconds of a whole run: starts, steps, validations, checkpoints, lost engines; the best interval of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from pathlib import Path
from statistics import median

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.checkpoint.formats.model_folder import count_rows
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import DiskSection
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.step_time import StepTime, predict_validation
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import backend_for, ranks_with
from rlhpc.sharding.shards import num_parameters

_STATE = 12  # bytes per parameter of master weight and moments


def checkpoint_bytes(config: RunConfig, shape: ModelDescription) -> int:
    """Returns the bytes of one checkpoint: weights, master weights and moments of all trained models."""
    # With FSDP2 the master weights are the weights. Its other optimizers have smaller moments.
    each = _STATE + (ITEMSIZE[config.model.dtype] if backend_for(config, shape) == "megatron" else 0)
    critic = config.train.steps > 0 and config.algorithm.name in WITH_CRITIC
    reference = config.sft is not None and config.train.steps > 0 and config.algorithm.kl.coefficient > 0
    return num_parameters(shape) * (each * (1 + critic) + ITEMSIZE[config.model.dtype] * reference)


def export_bytes(config: RunConfig, shape: ModelDescription) -> int:
    """Returns the bytes of the actor as a HuggingFace folder; 0 without checkpoint.export."""
    return num_parameters(shape) * ITEMSIZE[config.model.dtype] if config.checkpoint.export == "hf" else 0


def kept_exports(config: RunConfig) -> int:
    """Returns the most exports on disk at once, with the one being written."""
    section = config.checkpoint
    if section.export == "none":
        return 0
    return {"last": 1, "best": 2, "all": section.keep + (section.keep_best is not None) + 1}[section.export_at]


@dataclass(frozen=True)
class CheckpointInterval:
    """Seconds. ``best``: the interval that loses least; ``save``: for which training waits, ``measured`` or predicted;
    ``mtbf``: mean time between failures of all nodes; ``configured``: the interval as configured, None without any."""

    best: float
    save: float
    measured: bool
    mtbf: float
    configured: float | None

    def loss(self, interval: float) -> float:
        """Returns the share of the time that saves take and failures repeat, half an interval each on average."""
        return self.save / interval + interval / (2 * self.mtbf)


def recommend_interval(
    config: RunConfig, nodes: int, step: float, *, save: float, write: float, measured: Sequence[float] = ()
) -> CheckpointInterval:
    """Returns the best interval for ``planning.node_mtbf_hours``.

    ``step``, ``save`` and ``write``: predicted seconds of a step, of a save for which training waits, and until it is
    written; ``measured``: seconds of saves until they were written, of earlier attempts.
    """
    mtbf = 3600 * config.planning.node_mtbf_hours / nodes
    taken = bool(measured) and not config.checkpoint.asynchronous
    cost = median(measured) if taken else save
    shortest = write if config.checkpoint.asynchronous else 0.0  # the next one waits for the one before
    every = steps_between(config, step)
    return CheckpointInterval(max(sqrt(2 * cost * mtbf), shortest), cost, taken, mtbf, every * step if every else None)


def steps_between(config: RunConfig, step: float) -> int:
    """Returns the steps from one checkpoint to the next, by number or by time; 0 for none."""
    every, minutes = config.checkpoint.every, config.checkpoint.every_minutes
    if minutes is None or not step or not isfinite(step):
        return every
    by_time = max(1, ceil(60 * minutes / step))
    return min(every, by_time) if every else by_time


# A run stops before its time limit if a step and a save, each times its factor, no longer fit.
_STEP_RESERVE, _SAVE_RESERVE = 1.5, 2.0


@dataclass(frozen=True)
class RunTime:
    """Counts, and seconds of each. Warm-up steps are not included."""

    steps: int
    step: float
    start: float  # of a job, to its first step
    resume: float  # in addition in later jobs: reading the checkpoint
    validations: int
    validation: float | None  # None: number of prompts unknown
    saves: int
    save: float  # during which training waits
    writes: int  # blocking saves: the last one, and one that measures its duration
    write: float
    read_bytes: float  # at the start
    saved_bytes: float  # per checkpoint
    read_rate: float  # bytes/s of all nodes together
    write_rate: float
    exports: int = 0  # HuggingFace folders that training waits for
    export: float = 0.0
    exported_bytes: float = 0.0  # per export

    @property
    def seconds(self) -> float:
        """Seconds in one job."""
        return (
            self.start
            + self.steps * self.step
            + self._validating
            + self.saves * self.save
            + self.writes * self.write
            + self.exports * self.export
        )

    @property
    def _validating(self) -> float:
        return self.validations * (self.validation or 0.0)

    @property
    def first(self) -> float:
        """Seconds until the first step is saved."""
        return self.start + (self.validation or 0.0) + self.step + self.write

    def jobs(self, limit: float) -> int:
        """Returns the number of jobs of ``limit`` seconds; each makes at least one step."""
        if self.seconds <= limit:
            return 1
        each = self.step + (self._validating + self.saves * self.save + self.exports * self.export) / self.steps
        reserve = _STEP_RESERVE * self.step + _SAVE_RESERVE * self.write
        done = jobs = 0
        for begin in (self.start + (self.validation or 0.0), self.start + self.resume):
            mine = 1 + max(0, int((limit - begin - self.write - reserve) // each))
            count = 1 if not jobs else -(-max(0, self.steps - done) // mine)
            done, jobs = done + count * mine, jobs + count
        return max(2, jobs)


def predict_run(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    machine: MachineSpeed,
    disk: DiskSection,
    step: StepTime,
) -> RunTime:
    """Returns the time of all RL steps of ``config``, each as long as ``step``."""
    nodes = max(1, layout.world_size // config.resources.ranks_per_node)
    reading = min(nodes * disk.node_read_gbps, disk.read_gbps) * 1e9
    writing = min(nodes * disk.node_write_gbps, disk.write_gbps) * 1e9
    own, others = _read_bytes(config, shape, layout, nodes), _read_others(config, layout, nodes)
    saved, exported = checkpoint_bytes(config, shape), export_bytes(config, shape)
    copying = machine.to_cpu(saved / layout.world_size)
    whole = _weights(config, shape)
    steps, every = config.train.steps, steps_between(config, step.seconds)
    write = copying + saved / writing
    save = copying + max(0.0, saved / writing - every * step.seconds) if config.checkpoint.asynchronous else write
    total = steps + (config.sft.steps if config.sft is not None else 0)
    ends_saved = bool(every) and total % every == 0
    prompts = validation_prompts(config)
    saves = (total // every if every else 0) - ends_saved + _best_saves(config, every)
    writes = 1 + (config.slurm.time is not None and every != 1)
    round_of = predict_validation(config, shape, layout, machine.gpu, machine.efficiency, prompts) if prompts else []
    return RunTime(
        steps=steps,
        step=step.seconds,
        start=config.planning.start_seconds + (own + others) / reading,
        resume=(saved + own - whole) / reading,
        validations=1 + -(-steps // config.validation.every) if config.data.validation else 0,
        validation=None if prompts is None else sum(phase.seconds for phase in round_of),
        saves=saves,
        save=save,
        writes=writes,
        write=write,
        read_bytes=own + others,
        saved_bytes=saved,
        read_rate=reading,
        write_rate=writing,
        exports=_exports(config, saves + writes),
        export=exported / (min(disk.node_write_gbps, disk.write_gbps) * 1e9),
        exported_bytes=exported,
    )


def _exports(config: RunConfig, saves: int) -> int:
    """Returns the most exports: after the last step, after each new best value, or of all ``saves``."""
    if config.checkpoint.export == "none":
        return 0
    validated = (config.train.steps - 1) // config.validation.every if config.data.validation else 0
    return {"last": 1, "best": 1 + validated, "all": saves}[config.checkpoint.export_at]


def _best_saves(config: RunConfig, every: int) -> int:
    """Returns the most saves that checkpoint.keep_best adds: one after each validation, where none is due."""
    if config.checkpoint.keep_best is None or not config.data.validation:
        return 0
    steps, warmup = config.train.steps, config.sft.steps if config.sft else 0
    validated = range(config.validation.every, steps, config.validation.every)
    return sum(not every or (warmup + step) % every != 0 for step in validated)


def validation_prompts(config: RunConfig) -> int | None:
    """Returns the prompts of one validation over all sets; None if a file to count does not exist."""
    sets: dict[str, int] = {}
    most = config.validation.max_prompts
    for file in config.data.validation:
        rows = count_rows(file.path)
        if rows is None and most is None:
            return None
        name = file.name or ""
        sets[name] = sets.get(name, 0) + (rows if rows is not None else most or 0)
    return sum(rows if most is None else min(rows, most) for rows in sets.values())


def check_walltime(run: RunTime, limit_seconds: int | None) -> Iterator[str]:
    """Warns about jobs' time limits that the run exceeds. Raises UserError if no step fits."""
    if limit_seconds is None or not run.steps:
        return
    if run.step > limit_seconds:
        raise UserError(
            f"a step is predicted to take {run.step:,.0f} s, the job has {limit_seconds:,} s",
            where="slurm.time",
            remedy="raise it, take more nodes, or lower train.prompts_per_step or rollout.samples_per_prompt",
        )
    if run.first > limit_seconds:
        yield (
            f"slurm.time: the first step is predicted to be saved after {run.first:,.0f} s "
            f"(start {run.start:,.0f} s, "
            f"step {run.step:,.0f} s, checkpoint {run.write:,.0f} s), the job has {limit_seconds:,} s: a run that ends "
            "before makes no progress; raise it, take more nodes or correct site.disk and planning.start_seconds"
        )
    elif run.seconds > limit_seconds:
        parts = [f"{run.steps} steps of {run.step:,.0f} s", f"a start of {run.start:,.0f} s"]
        parts += [
            f"{count} {what}(s) of {seconds:,.0f} s"
            for what, count, seconds in (
                ("validation", run.validations if run.validation else 0, run.validation),
                ("checkpoint", run.saves, run.save),
            )
            if count
        ]
        jobs, hours = run.jobs(limit_seconds), run.seconds / 3600
        yield (
            f"slurm.time: {', '.join(parts[:-1])} and {parts[-1]} are predicted to take {hours:,.1f} hours, {jobs} "
            "jobs of the limit: the run checkpoints before it and is requeued"
        )


def _weights(config: RunConfig, shape: ModelDescription) -> float:
    return ITEMSIZE[config.model.dtype] * num_parameters(shape)


def _read_bytes(config: RunConfig, shape: ModelDescription, layout: ParallelLayout, nodes: int) -> float:
    """Returns the bytes of a model read by all nodes: each reads what its ranks hold once, also for the reference."""
    if backend_for(config, shape) == "fsdp":  # of each copy of the weights once
        return config.actor.parallel.dp_replicate * _weights(config, shape)
    ranks = config.resources.ranks_per_node * max(part.count for part in stage_parameters(shape, layout))
    return nodes * min(_weights(config, shape), ITEMSIZE[config.model.dtype] * ranks)


def _read_others(config: RunConfig, layout: ParallelLayout, nodes: int) -> float:
    """Returns the bytes read of a critic's own model and of a reward model."""
    models: list[tuple[Path, ParallelSection | None, str]] = []
    if config.algorithm.name in WITH_CRITIC and config.critic.path is not None:
        models.append((config.critic.path, config.critic.parallel, config.critic.on))
    if config.reward_model is not None:
        models.append((config.reward_model.model, config.reward_model.parallel, config.reward_model.on))
    found = 0.0
    for path, parallel, on in models:
        ranks = ranks_with(config, on, layout.world_size)
        cut = make_layout(parallel or config.actor.parallel, ranks)
        found += _read_bytes(
            config, resolve_value_model(config, path), cut, min(nodes, -(-ranks // config.resources.ranks_per_node))
        )
    return found
