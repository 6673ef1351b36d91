"""Remedies for a plan that does not fit."""

from __future__ import annotations

import io
import re

import pytest

from rlhpc.config.load import load_config
from rlhpc.plan.checks.limits import holds_sequence
from rlhpc.plan.estimates.memory import (
    GIB,
    predict_memory,
)
from rlhpc.plan.remedies import changed_config, find_remedies
from rlhpc.sharding.layout import make_layout
from tests.plan.estimates.test_memory import READY, SMALL, parts


def test_what_does_not_fit_is_named_and_what_is_said_to_help_does() -> None:
    config, shape, layout = parts(SMALL, "train.tokens_per_microbatch=65536", "rollout.gpu_memory_utilization=0.3")
    plan = predict_memory(config, shape, layout, 80.0)
    assert plan.first_too_large is not None
    assert plan.first_too_large.name == "forward and backward"
    remedies = find_remedies(config, shape, layout, plan)
    assert len(remedies) == 3
    assert {len(remedy.changes) for remedy in remedies} == {1}, "each helps alone"
    for remedy in remedies:
        changed = changed_config(config, dict(remedy.changes))
        again = predict_memory(changed, shape, make_layout(changed.actor.parallel, changed.world_size), 80.0)
        assert again == remedy.plan
        assert again.first_too_large is None
        load_config(READY / SMALL, remedy.text.split())  # can be pasted
    assert find_remedies(config, shape, layout, remedies[0].plan) == []


def test_the_picture_says_what_the_plan_says() -> None:
    from rich.console import Console

    from rlhpc.cli.plan_run import render_memory

    config, shape, layout = parts(SMALL, "train.tokens_per_microbatch=65536", "rollout.gpu_memory_utilization=0.3")
    plan = predict_memory(config, shape, layout, 80.0)
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_memory(plan, 80.0, find_remedies(config, shape, layout, plan)))
    text = capture.get()
    too_large = next(line for line in text.splitlines() if line.startswith("forward and backward"))
    assert f"{plan.peak / GIB:,.1f}" in too_large
    bar = re.search(r"  ([\w.]+)\|([\w.]+)  ", too_large)
    assert bar
    assert "A" in bar[2], "what crosses the line is to be seen"
    assert len(bar[1] + bar[2]) == 40
    assert len(bar[1]) == pytest.approx(40 * 80 / (plan.peak / GIB), abs=1)
    others = [line for line in text.splitlines() if "|" in line and line != too_large]
    assert {line.index("|") for line in others} == {too_large.index("|")}, "one line for all phases"
    assert "DOES NOT FIT: forward and backward" in text
    assert text.count("fits with") == 3


@pytest.mark.parametrize("gib", [28.0, 36.0])
def test_several_changes_that_help_together_are_all_needed(gib: float) -> None:
    """An actor that no single change but another cut makes room for beside its engine."""
    config, shape, layout = parts(SMALL)
    remedies = find_remedies(config, shape, layout, predict_memory(config, shape, layout, gib))
    together = [remedy for remedy in remedies if len(remedy.changes) > 1]
    assert together
    for remedy in together:
        assert remedy.fits
        for left_out in remedy.changes:
            less = changed_config(config, dict(change for change in remedy.changes if change != left_out))
            cut = make_layout(less.actor.parallel, less.world_size)
            too_large = predict_memory(less, shape, cut, gib).first_too_large
            assert too_large is not None or not holds_sequence(less, shape, gib), left_out


def test_remedies_that_help_together_differ_in_the_dearest_and_what_helps_a_little_comes_last() -> None:
    config, shape, layout = parts(SMALL, "rollout.tp=2")
    plan = predict_memory(config, shape, layout, 24.0)
    remedies = find_remedies(config, shape, layout, plan)
    assert [remedy.fits for remedy in remedies] == [True, True, False]
    first, second, partly = remedies
    assert first.changes[-1][0] not in dict(second.changes)
    names = [phase.name for phase in plan.phases]
    before, after = (each.first_too_large for each in (plan, partly.plan))
    assert before is not None
    assert after is not None
    assert (len(partly.changes), names.index(after.name) > names.index(before.name)) == (1, True)


@pytest.mark.parametrize("gib", [20.0, 24.0, 28.0, 32.0])
def test_no_remedy_leaves_the_cache_without_room_for_a_sequence(gib: float) -> None:
    """The weights of 7B alone are 14 GiB, on GPUs of which the engine gets 9 to 14."""
    config, shape, layout = parts(SMALL)
    remedies = find_remedies(config, shape, layout, predict_memory(config, shape, layout, gib))
    assert remedies
    for remedy in remedies:
        changed = changed_config(config, dict(remedy.changes))
        assert holds_sequence(changed, shape, gib) == remedy.holds_sequence
        assert not remedy.fits or remedy.holds_sequence
