"""Text and JSON of ``rlhpc plan search``: the fastest layouts, and the placements compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from rlhpc.cli.output import json_text, seconds_text, table
from rlhpc.cli.plan_time import (
    candidate_json,
    candidate_lines,
    configured_text,
    needed_machine,
    not_fitting,
    search_json,
    search_lines,
)
from rlhpc.config.rollout import AsynchronySection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.back_ends import OnGpus, OtherBackEnd, fitting_layouts, search_counts, search_other_back_end
from rlhpc.plan.checks.placement import separates
from rlhpc.plan.placements import Placements, compare_placements
from rlhpc.plan.scenario import changed_config
from rlhpc.plan.search import SearchResult
from rlhpc.sharding.placement import backend_for, training_ranks


def searched(config: RunConfig, gpu: str | None, *, as_json: bool) -> tuple[list[str], bool]:
    """Lines of text or of JSON, and whether anything fits. Raises UserError if nothing does, in either placement."""
    shape, found_gpu, site = needed_machine(config, gpu, "rlhpc plan search")
    failed: UserError | None = None
    found = SearchResult((), 0, 0, 0)
    try:
        found = fitting_layouts(config, shape, found_gpu, site.efficiency)
    except DoesNotFitError as error:
        failed = error
    placements = compare_placements(config, shape, found_gpu, site.efficiency, found)
    other = placements.colocated if config.placement != "colocated" else placements.separate
    ranks = training_ranks(config, config.world_size)
    back_end = search_other_back_end(config, shape, ranks, found_gpu, site.efficiency)
    if failed is not None and other is None and back_end.best is None:
        raise failed
    fits = other is not None or back_end.best is not None or any(not best.lacks for best in found.best)
    others = [other] if other is not None else []
    if placements.lend is not None and placements.winner is placements.lend and config.placement != "lend":
        others.append(placements.lend)
    if as_json:
        more = [candidate_json(one) for one in (*others, *([back_end.best] if back_end.best is not None else []))]
        return [json_text([*search_json(found), *more])], fits
    # Without ranks of their own, the section only sets what they are compared with.
    asked = config if separates(config) else changed_config(config, {"asynchrony": AsynchronySection()})
    lines = search_lines(config, found_gpu, found, configured_text(asked, gpu))
    head = [f"# {line}" for line in (back_end_line(config, shape, found, back_end), *comparison_lines(placements))]
    if failed is not None:
        head.append(f"# placement {config.placement}: {failed.message}")
    shown = [candidate_lines(one, f"{one.config.placement}: ") for one in others if separates(one.config)]
    if back_end.best is not None:
        shown.append(candidate_lines(back_end.best, f"{back_end.name}: "))
    return [*lines[:2], *head, *lines[2:], *chain.from_iterable(shown)], fits


def compared(config: RunConfig, counts: Sequence[int], gpu: str | None, *, as_json: bool) -> tuple[list[str], bool]:
    """A row for each number of GPUs, and whether a layout fits on any. Speed is relative to the first that fits."""
    shape, found_gpu, site = needed_machine(config, gpu, "rlhpc plan search")
    results = list(search_counts(config, shape, found_gpu, site.efficiency, counts))
    first = next((one.speed for one in results if one.speed), 0.0)
    if as_json:
        return [json_text([_count_json(one, first) for one in results])], first > 0
    rows = [["GPUs", "step", "tokens/s", "of linear", "GPU GiB", "CPU GiB a node", "layout"]]
    return table([*rows, *(_count_row(one, first) for one in results)], left=(0, 6)), first > 0


def _count_json(one: OnGpus, first: float) -> dict[str, Any]:
    if one.best is None:
        return {"gpus": one.gpus, "fits": False, "shortages": [one.reason]}
    speed = {"tokens_per_second": one.best.step.tokens_per_second, "scaling": one.speed / first if first else None}
    return {"gpus": one.gpus, **speed, **candidate_json(one.best)}


def _count_row(one: OnGpus, first: float) -> list[str]:
    gpus = f"{one.gpus:,}"
    if one.best is None:
        return [gpus, *"-----", f"none: {one.reason}"]
    step, memory = one.best.step, one.best.memory
    scaling = f"{one.speed / first:.0%}" if one.speed else "-"
    sizes = [f"{memory.peak / 2**30:,.1f}", f"{memory.cpu.node / 2**30:,.0f}"]
    text = ", ".join([one.best.text, *not_fitting(one.best.lacks)])
    return [gpus, seconds_text(step.seconds), f"{step.tokens_per_second:,.0f}", scaling, *sizes, text]


def back_end_line(config: RunConfig, shape: ModelDescription, found: SearchResult, other: OtherBackEnd) -> str:
    """The faster back end for this model on these GPUs, and the ratio."""
    own = backend_for(config, shape)
    mine = next((one for one in found.best if not one.lacks), None)
    if other.best is None:
        return f"back end: {own}; none with {other.name} ({other.reason})"
    theirs = other.best.step.seconds
    if mine is None:
        return f"back end: {other.name}, because {own} does not fit: {seconds_text(theirs)} a step"
    times = {own: mine.step.seconds, other.name: theirs}
    fast, slow = sorted(times, key=times.__getitem__)
    ratio = times[slow] / times[fast]
    both = f"{seconds_text(times[fast])} and {seconds_text(times[slow])} a step"
    return f"back end: {fast} is {ratio:.2f} x as fast as {slow}, {both} on {mine.layout.world_size:,} GPUs that train"


def comparison_lines(found: Placements) -> list[str]:
    """The faster placement, the ratio, and both sides' idle shares."""
    separate, colocated = found.separate, found.colocated
    if separate is None or separate.step.sides is None:
        return [f"placement: colocated; none with ranks that only generate ({found.reason})"]
    sides, step, speedup = separate.step.sides, separate.step, found.speedup
    split = f"{step.engine_ranks:,} of {step.ranks:,} ranks generate, the best of {found.splits:,} split(s)"
    if colocated is None or speedup is None or found.simulated is None:
        return [f"placement: separate, because colocated does not fit: {seconds_text(step.seconds)} a step, {split}"]
    names = ("separate", "colocated") if speedup > 1 else ("colocated", "separate")
    one, other = found.simulated
    idle = f"trainers idle {other.idle_trainers:.0%}, engines {other.idle_engines:.0%}"
    times = (
        f"simulated: colocated {seconds_text(one.step_seconds)} a step; separate {seconds_text(other.step_seconds)} at "
        f"staleness {sides.max_staleness} ({other.staleness:.1f} in the mean), {idle}"
    )
    formula = f"predicted: colocated {seconds_text(colocated.step.seconds)}, separate {seconds_text(step.seconds)}"
    winner = f"placement: {names[0]} is {max(speedup, 1 / speedup):.2f} x as fast as {names[1]}; {split}"
    return [winner, times, formula, _lend_line(found, names[0])]


def _lend_line(found: Placements, name: str) -> str:
    """Steps with placement lend, beside ``name``, the faster of the others."""
    if found.lend is None or found.lending is None or found.lend_speedup is None:
        return "lend: trainers' ranks have no room for an engine"
    step, faster = found.lending, f"{found.lend_speedup:.2f} x as fast as {name}"
    faster = f"the fastest, {faster}" if found.winner is found.lend else faster
    split = f"{found.lend.step.engine_ranks:,} of {found.lend.step.ranks:,} ranks only generate"
    idle = f"trainers idle {step.idle_trainers:.0%}, engines {step.idle_engines:.0%}"
    return f"lend: {seconds_text(step.step_seconds)} a step, {faster}; {idle}, {split}"
