"""Text and JSON of ranks that train and ranks that generate in ``rlhpc plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhpc.cli.tables import labelled, seconds_text, table
from rlhpc.config.schema import RunConfig
from rlhpc.core.text import duration
from rlhpc.plan.estimates.checkpoint_interval import CheckpointInterval
from rlhpc.plan.estimates.engine_loss import engine_loss
from rlhpc.plan.estimates.run_time import RunTime
from rlhpc.plan.estimates.separate import LIMIT_TEXTS, SeparateStep
from rlhpc.plan.estimates.step_time import StepTime
from rlhpc.plan.scenario import Scenario
from rlhpc.plan.simulation import simulate
from rlhpc.rollout.schedule.generation_load import Simulated


def side_lines(case: Scenario, step: StepTime) -> list[str]:
    """Both sides of a placement with ranks that only generate: their times, what limits the step, idle shares,
    staleness, traffic. With placement lend the idle shares are simulated."""
    sides, sync = step.sides, step.sync
    if sides is None or sync is None:
        return []
    found = simulate(case.config, case.shape, step, case.gpu, case.efficiency)
    idle = (found.idle_trainers, found.idle_engines) if sides.lenders else (sides.idle_trainers, sides.idle_engines)
    rollout = sides.makespan + sides.replacing
    chain = f"({seconds_text(rollout)} + {seconds_text(sides.trainers)} + {seconds_text(sides.sync)})"
    rows = [
        ["side", "ranks", "work", "idle"],
        ["trainers", f"{step.training_ranks:,}", seconds_text(sides.trainers), f"{idle[0]:.0%}"],
        ["engines", f"{step.engine_ranks:,}", seconds_text(sides.engines_helped), f"{idle[1]:.0%}"],
    ]
    if step.judge_ranks:
        rows.insert(2, ["judges", f"{step.judge_ranks:,}", seconds_text(step.judging), f"{_idle_judges(step):.0%}"])
    facts = [
        ("limit", f"{LIMIT_TEXTS[sides.limit]}"),
        (
            "bound",
            f"(rollout + trainers + weight sync) / {sides.max_staleness + 1} = {chain} / "
            f"{sides.max_staleness + 1} = {seconds_text(sides.bounds['staleness'])}",
        ),
        ("staleness", f"{sides.staleness:.1f} steps in the mean, at most {sides.max_staleness}"),
        (
            "sync",
            f"trainers wait {seconds_text(sync.stage)}, engines {seconds_text(sync.write)}; "
            f"{sync.sent_across / 1e9:,.1f} GB over the network",
        ),
    ]
    if sides.lenders:
        facts.append(("lend", _lend_text(sides, found)))
    shares = f"trainers idle {found.idle_trainers:.0%}, engines {found.idle_engines:.0%}"
    text = f"{seconds_text(found.step_seconds)} a step, {shares}, staleness {found.staleness:.1f} in the mean"
    return [*table(rows), "", *labelled([*facts, ("simulated", text)]), ""]


def _lend_text(sides: SeparateStep, found: Simulated) -> str:
    """How long trainers' ranks generate in a step, beside what they do for it."""
    if not found.lend_seconds:
        return "trainers wait too little: their ranks never generate; placement separate is as fast"
    overhead = f"after a weight sync of {seconds_text(sides.lend_overhead)}"
    text = f"trainers' ranks generate up to {seconds_text(found.lend_seconds)} of a step, {overhead}"
    if sides.engines_helped < sides.engines:
        text += f"; without them engines would work {seconds_text(sides.engines)}"
    return text


def sides_json(step: StepTime) -> dict[str, Any]:
    """Both sides of a separate placement, in seconds and bytes; empty without one."""
    sides, sync = step.sides, step.sync
    if sides is None or sync is None:
        return {}
    found = {
        "limit": sides.limit,
        "trainers": {"ranks": step.training_ranks, "seconds": sides.trainers, "idle": sides.idle_trainers},
        "engines": {"ranks": step.engine_ranks, "seconds": sides.engines_helped, "idle": sides.idle_engines},
        "makespan": sides.makespan,
        "bounds": dict(sides.bounds),
        "staleness": {"mean": sides.staleness, "max": sides.max_staleness},
        "sync": asdict(sync),
    }
    if step.judge_ranks:
        found["judges"] = {"ranks": step.judge_ranks, "seconds": step.judging, "idle": _idle_judges(step)}
    return {"sides": found}


def _idle_judges(step: StepTime) -> float:
    """Share of a step in which judges have nothing to do."""
    return max(0.0, 1 - step.judging / step.seconds)


def simulated_json(case: Scenario, step: StepTime) -> dict[str, Any]:
    """Simulated steps of a separate placement; empty without one."""
    if step.sides is None:
        return {}
    return {"simulated": asdict(simulate(case.config, case.shape, step, case.gpu, case.efficiency))}


def loss_lines(config: RunConfig, run: RunTime, interval: CheckpointInterval) -> list[str]:
    """What the loss of an engine costs, where it is no restart."""
    found = engine_loss(config, run.start, interval)
    if found is None:
        return []
    return [
        f"losses    an engine that is killed is back after {duration(found.away)} (planning.start_seconds): until then "
        f"1/{found.engines} of generation is missing, {found.share:.2%} of all with a failure in "
        f"{found.between / 3600:,.0f} hours",
        f"          trainers wait at most {duration(found.silent)} for one that does not respond "
        f"(recovery.engine_timeout_seconds), {duration(found.slow)} a step for one that is slow "
        "(recovery.slow_engine_seconds)",
        f"          with recovery.lost_engines restart, each loss would cost all ranks {duration(found.restart)}",
    ]


def rollout_job_lines(config: RunConfig, step: StepTime) -> list[str]:
    """Steps while some of the rollout jobs are not there."""
    rows = [
        f"{'rollout' if not place else '':10}without {absent} of the rollout jobs a step takes at most "
        f"{found.seconds / step.seconds:.2f} x as long, trainers idle {found.idle_trainers:.0%}"
        for place, (absent, found) in enumerate(_with_absent_jobs(config, step))
    ]
    return [*rows, ""] if rows else []


def rollout_job_json(config: RunConfig, step: StepTime) -> dict[str, Any]:
    """The same; empty without rollout jobs."""
    found = [
        {"absent": absent, "seconds": sides.seconds, "idle_trainers": sides.idle_trainers}
        for absent, sides in _with_absent_jobs(config, step)
    ]
    return {"rollout_jobs": found} if found else {}


def _with_absent_jobs(config: RunConfig, step: StepTime) -> list[tuple[int, SeparateStep]]:
    """A step without one of the rollout jobs, without half of them, and with as few engines as generate at all."""
    jobs, sides = config.slurm.rollout_jobs, step.sides
    if jobs is None or sides is None or not config.rollout_job_nodes:
        return []
    ranks = config.rollout_job_nodes * config.resources.ranks_per_node
    most = min(jobs.count, -(-step.engine_ranks // ranks) - 1)
    absent = sorted({1, jobs.count // 2, most} & {*range(1, most + 1)})
    return [(number, sides.with_share(1 - number * ranks / step.engine_ranks)) for number in absent]


def loss_json(config: RunConfig, run: RunTime, interval: CheckpointInterval) -> dict[str, Any]:
    """The same in seconds; empty where the loss of an engine is a restart."""
    found = engine_loss(config, run.start, interval)
    return {} if found is None else {"engine_loss": {**asdict(found), "share": found.share}}
