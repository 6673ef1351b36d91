"""Text and JSON of times in ``rlhpc plan``: a step, both sides of a placement, a search, a calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.cli.output import labelled, seconds_text, table
from rlhpc.config import yaml12
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.text import duration
from rlhpc.models import ModelDescription
from rlhpc.plan.calibrate import Calibration, OutsideSteps, calibrate, calibrate_times, read_attempts, read_run
from rlhpc.plan.checks.backend import layout_text
from rlhpc.plan.checks.run import check_node_range, check_plannable, check_planned_lengths, check_shape_files
from rlhpc.plan.estimates.hardware import Gpu, Site, cpu_memory_limit, named_gpu, read_site
from rlhpc.plan.estimates.roofline import LIMITS
from rlhpc.plan.estimates.run_time import CheckpointInterval, RunTime
from rlhpc.plan.estimates.separate import LIMIT_TEXTS, SeparateStep
from rlhpc.plan.estimates.step_time import StepTime
from rlhpc.plan.scenario import Scenario, Shortage
from rlhpc.plan.search import Candidate, SearchResult
from rlhpc.plan.simulation import simulate
from rlhpc.rollout.schedule.generation_load import Simulated
from rlhpc.sharding.placement import backend_for


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
    """Time in which trainers' ranks generate in a step, and their work for it."""
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


def needed_machine(config: RunConfig, gpu: str | None, where: str) -> tuple[ModelDescription, Gpu, Site]:
    """Model, GPU and site for the command ``where``, for any layout. Raises UserError without a GPU or RL steps."""
    site = read_site(config)
    found = named_gpu(config, site, gpu)
    if found is None:
        raise UserError("no GPU is named", where=where, remedy="name one with --gpu or in planning.gpu, such as h200")
    if not config.train.steps:
        raise UserError("there are no RL steps to predict", where=where, remedy="set train.steps to 1 or more")
    check_node_range(config)
    check_planned_lengths(config)
    check_shape_files(config)
    return resolve_model(config), found, site


def needed_case(config: RunConfig, gpu: str | None, where: str) -> Scenario:
    """The same with the layout, which must be valid."""
    shape, found, site = needed_machine(config, gpu, where)
    layout = check_plannable(config, shape)
    return Scenario(config, shape, layout, found, site.efficiency, site.disk)


def step_lines(case: Scenario, step: StepTime) -> list[str]:
    """The time of a step in a line, and a table of its phases."""
    work = step.work
    if not step.engine_fits:
        cut = "the engines' weights leave no memory for one response"
        return [f"time      of a step cannot be predicted: {cut}"]
    head = (
        f"time      {seconds_text(step.seconds)} a step on {step.ranks} x {case.gpu.name}, "
        f"{step.tokens_per_second:,.0f} tokens/s, MFU of updates {step.mfu:.2f}; most of it {LIMITS[step.limit]}"
    )
    assumed = (
        f"          for {work.samples:,} samples of {work.prompt:,.0f} + {work.response:,.0f} tokens "
        f"(planning.prompt_tokens, planning.response_tokens), {work.updates} update(s)"
    )
    run = case.run(step)
    generating = step.phase("rollout").notes
    slots = f"          {generating['at once']:,.0f} of at most {generating['max_num_seqs']:,.0f} sequences at once "
    rows = [["phase", "time", "share", "PFLOP", "GB sent", "most of it"]]
    for phase in step.phases:
        pflop = f"{phase.flops / 1e15:,.1f}" if phase.flops else ""
        sent = f"{phase.sent / 1e9:,.1f}" if phase.sent else ""
        share = f"{step.share(phase.name):.0%}" if step.sides is None else ""
        rows.append([phase.name, seconds_text(phase.seconds), share, pflop, sent, LIMITS[phase.limit]])
    return [
        head,
        assumed,
        f"{slots}on an engine (rollout.max_num_seqs)",
        "",
        *table(rows, left=(0, 5)),
        "",
        *side_lines(case, step),
        *_run_lines(run),
        *_interval_lines(_checkpoint_interval(case, run)),
    ]


def _checkpoint_interval(case: Scenario, run: RunTime) -> CheckpointInterval:
    saves = [seconds for times in read_attempts(case.config.folder) for seconds in times.saves]
    return case.checkpoint_interval(run, saves)


def _interval_lines(found: CheckpointInterval) -> list[str]:
    """The interval between checkpoints that loses least, beside the configured one."""
    if not found.save:
        return []
    minutes = max(1, round(found.best / 60))
    how = "measured" if found.measured else "predicted"
    own = "none but the last is configured"
    if found.configured is not None:
        own = f"as configured, {duration(found.configured)}: {found.loss(found.configured):.1%}"
    return [
        f"interval  {duration(found.best)} between checkpoints lose least (checkpoint.every_minutes={minutes}): "
        f"{found.loss(found.best):.1%} of the time; {own}",
        f"          for a checkpoint of {seconds_text(found.save)} ({how}) and a failure in {found.mtbf / 3600:,.0f} "
        "hours (planning.node_mtbf_hours / nodes)",
    ]


def _run_lines(run: RunTime) -> list[str]:
    """Time outside of steps, and the total."""
    rows = [["outside of steps", "each", "times", "GB"]]
    rows.append(["start", seconds_text(run.start), "1", f"{run.read_bytes / 1e9:,.1f}"])
    if run.validation is not None and run.validations:
        rows.append(["validation", seconds_text(run.validation), f"{run.validations:,}", ""])
    saved = f"{run.saved_bytes / 1e9:,.1f}"
    if run.saves:
        rows.append(["checkpoint", seconds_text(run.save), f"{run.saves:,}", saved])
    rows.append(["save at once", seconds_text(run.write), f"{run.writes:,}", saved])
    if run.exports:
        rows.append(["export", seconds_text(run.export), f"{run.exports:,}", f"{run.exported_bytes / 1e9:,.1f}"])
    known = "" if run.validation is not None else "; validations are not counted: their files cannot be read here"
    time = f"{run.seconds / 3600:,.1f} hours" if run.seconds >= 3600 else f"{run.seconds / 60:,.1f} minutes"
    whole = f"run       {time} for {run.steps:,} step(s) of RL"
    return [*table(rows), "", f"{whole} (site.disk, planning.start_seconds){known}"]


def run_json(case: Scenario, step: StepTime) -> dict[str, Any]:
    """The same in seconds and bytes."""
    run = case.run(step)
    return {
        "seconds": run.seconds,
        **asdict(run),
        "checkpoint_interval": asdict(_checkpoint_interval(case, run)),
    }


def step_json(step: StepTime) -> dict[str, Any]:
    """The same in seconds and bytes."""
    phases = {
        phase.name: {
            "seconds": phase.seconds,
            "limit": phase.limit,
            "parts": dict(phase.parts),
            "flops": phase.flops,
            "bytes_sent": phase.sent,
            **{name.replace(" ", "_"): value for name, value in phase.notes.items()},
        }
        for phase in step.phases
    }
    return {
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "limit": step.limit,
        "engine_fits": step.engine_fits,
        "phases": phases,
        **sides_json(step),
    }


def configured_text(config: RunConfig, gpu: str | None) -> str:
    """Time and layout of the configuration as it is, which need not be able to run."""
    try:
        case = needed_case(config, gpu, "rlhpc plan search")
    except UserError as error:
        return f"cannot run ({error.where}: {error.message})"
    step = case.step()
    words = [f"{seconds_text(step.seconds)} a step"] if step.engine_fits else []
    text = layout_text(
        backend_for(case.config, case.shape), case.config.actor.parallel, case.layout.world_size, case.shape
    )
    return ", ".join([*words, text, *not_fitting(case.lacks(case.memory()))])


def not_fitting(lacks: Sequence[Shortage]) -> list[str]:
    return [f"DOES NOT FIT ({'; '.join(lack.text for lack in lacks)})"] if lacks else []


def search_lines(config: RunConfig, gpu: Gpu, found: SearchResult, asked: str) -> list[str]:
    """The best layouts as YAML, with time and memory of each in comments."""
    lines = [
        f"# {found.layouts:,} valid layouts; time predicted for {found.timed:,} ways to run them",
        f"# as configured: {asked}",
        f"# merge one into the sections of {config.name}, or append its line of KEY=VALUE to the command",
    ]
    limit = cpu_memory_limit(config, gpu)
    of_node = f" of {limit[1] / 2**30:,.0f}" if limit else ""
    for number, best in enumerate(found.best, 1):
        lines += candidate_lines(best, f"{number}: ", of_node)
    return lines


def candidate_lines(best: Candidate, title: str, of_node: str = "") -> list[str]:
    """A layout as YAML, with its time and memory in comments."""
    memory = f"{best.memory.peak / 2**30:,.1f} GiB of {(best.memory.gpu_bytes or 0) / 2**30:g}"
    cpu = f"{best.memory.cpu.node / 2**30:,.0f} GiB of CPU memory a node{of_node}"
    words = [f"{seconds_text(best.step.seconds)} a step", memory, cpu, best.text]
    keys = [f"# {_overrides(best.fragment)}", *yaml12.dump(best.fragment).splitlines()]
    return [
        "---",
        f"# {title}{', '.join(words)}",
        *(f"# {text}" for text in not_fitting(best.lacks)),
        *(keys if best.fragment else ["# as configured"]),
    ]


def _overrides(fragment: Mapping[str, Any], above: str = "") -> str:
    """KEY.SUB=VALUE for each value, as the command line takes them."""
    words = []
    for key, value in fragment.items():
        if isinstance(value, Mapping):
            words.append(_overrides(value, f"{above}{key}."))
        else:
            words.append(f"{above}{key}={json.dumps(value)}")
    return " ".join(words)


def search_json(found: SearchResult) -> list[dict[str, Any]]:
    """The results in seconds and bytes, each with the keys to change."""
    return [candidate_json(best) for best in found.best]


def candidate_json(best: Candidate) -> dict[str, Any]:
    """One result, with its placement."""
    return {
        "seconds": best.step.seconds,
        "peak_bytes": best.memory.peak,
        "cpu_bytes_per_node": best.memory.cpu.node,
        "fits": not best.lacks,
        "shortages": [lack.text for lack in best.lacks],
        "placement": best.config.placement,
        "backend": best.backend,
        "layout": best.layout.axes,
        **best.fragment,
    }


@dataclass(frozen=True)
class Calibrated:
    """Both calibrations by a run: of its steps, and of what is outside of them."""

    steps: Calibration
    outside: OutsideSteps

    @property
    def planning(self) -> dict[str, float]:
        """For the section ``planning`` of the run's config."""
        return {**self.steps.measured.lengths, **self.outside.planning}

    @property
    def site(self) -> dict[str, dict[str, Any]]:
        """Sections of a site file."""
        sections: dict[str, dict[str, Any]] = {"efficiency": {"phases": dict(self.steps.phases)}}
        return {**sections, "disk": dict(self.outside.disk)} if self.outside.disk else sections


def calibrated(case: Scenario, run: Path) -> Calibrated:
    """Calibration by the run in that folder. Raises UserError if it has no RL step."""
    steps = calibrate(case.config, case.shape, case.layout, case.gpu, case.efficiency, read_run(run))
    return Calibrated(steps, calibrate_times(case, read_attempts(run)))


def calibrate_lines(found: Calibrated) -> list[str]:
    """Sections of a site file; in comments, times before and after, and what belongs into the run's config."""
    planning = " ".join(f"planning.{name}={value:.10g}" for name, value in found.planning.items())
    comments = [*_calibration(found), "", f"of this run, for its config: {planning}"]
    return [*(f"# {line}".rstrip() for line in comments), *yaml12.dump(found.site).splitlines()]


def calibrate_json(found: Calibrated) -> dict[str, Any]:
    """The same, in seconds."""
    parts = (found.steps.measured.seconds, found.steps.before, found.steps.after)
    outside = (found.outside.measured, found.outside.before, found.outside.after)
    names = ("measured", "before", "after")
    seconds = {name: {**own, **more} for name, own, more in zip(names, parts, outside, strict=True)}
    return {**found.site, "planning": found.planning, "steps": found.steps.measured.steps, "seconds": seconds}


def _calibration(found: Calibrated) -> list[str]:
    steps, outside, measured = found.steps, found.outside, found.steps.measured
    lengths = f"{measured.prompt_tokens:,.0f} + {measured.response_tokens:,.0f} tokens"
    rows = [["phase", "measured", "before", "with this"]]
    for name, seconds in measured.seconds.items():
        rows.append([name, *map(seconds_text, (seconds, steps.before[name], steps.after[name]))])
    for name, seconds in outside.measured.items():
        rows.append([name, *map(seconds_text, (seconds, outside.before[name], outside.after[name]))])
    return [f"fitted to {measured.steps} step(s) of samples of {lengths}", *table(rows)]
