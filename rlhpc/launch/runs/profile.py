"""``rlhpc profile``: asks a running job for a profile of coming steps, and waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.profiles import (
    EVERY,
    MOST_RANGES,
    PHASES,
    TOOLS,
    ProfileRequest,
    Selection,
    known,
    new_request,
    parse_ranges,
    parse_steps,
    read_answer,
    write_request,
)
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.status import run_status
from rlhpc.observe.profiles.index import RankProfile, read_profiles
from rlhpc.plan.checks.observe import last_step

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Wanted:
    """Options of the command as given, with commas between names."""

    ranks: str = "0"
    phases: str = ""
    tools: str = "torch"


@dataclass(frozen=True)
class Asked:
    """A request with the ranks of the run, and the times of the profiles that were there before it."""

    run: RunEntry
    request: ProfileRequest
    world_size: int
    before: dict[tuple[int, int], float]


def ask(run: RunEntry, steps: str, wanted: Wanted) -> Asked:
    """Writes a request into the run folder. Raises UserError for one that the run cannot meet."""
    first, last, relative = parse_steps(steps)
    ranks = parse_ranges(wanted.ranks.split(","), "--ranks")
    if len(ranks) > MOST_RANGES:
        remedy = f"give at most {MOST_RANGES} numbers or ranges, such as 0-95:8"
        raise UserError(f"{len(ranks)} numbers and ranges", where="--ranks", remedy=remedy)
    phases = known(_names(wanted.phases), PHASES, "--phases")
    tools = known(_names(wanted.tools) or ["torch"], TOOLS, "--tools")
    attempt = _running(run)
    record = attempts.read_attempt(attempt)
    assert record is not None, "an attempt that runs has its record"
    config = load_config(attempt.config)
    for part in ranks:
        if part != EVERY and part.last >= record.world_size:
            raise UserError(
                f"no rank {part.last}: the run has {record.world_size}",
                where="--ranks",
                remedy=f"use ranks up to {record.world_size - 1}, or all",
            )
    if "nsys" in tools and "nsys" not in config.profile.tools:
        raise UserError(
            "Nsight Systems must start the ranks, and this run was started without",
            where="--tools",
            remedy="name nsys and the ranks in the section profile of its configuration",
        )
    if not relative:
        _check_steps(run, config, first, last)
    request = new_request(Selection(first, last, ranks, tuple(phases), tuple(tools)), relative=relative)
    before = {(one.step, one.rank): one.time for one in read_profiles(run.folder)}
    make_folder(run.folder.profiles)
    write_request(run.folder, request)
    return Asked(run, request, record.world_size, before)


def wait_for_answer(asked: Asked) -> Selection:
    """The steps that will be profiled. Raises UserError if the run refuses, or ends before it answers."""
    while True:
        over, answer = is_over(asked.run), read_answer(asked.run.folder)
        if answer is not None and answer.id == asked.request.id:
            if answer.refused:
                raise UserError(answer.refused, where=asked.run.name)
            return answer.selection
        if over:
            raise UserError("the run ended before it read the request", where=asked.run.name)
        time.sleep(_POLL_SECONDS)


def wait_for_profiles(asked: Asked, selection: Selection) -> list[RankProfile]:
    """All profiles of the selection. Raises UserError if the run ends without them."""
    steps = range(selection.first, selection.last + 1)
    expected = {(step, rank) for step in steps for rank in range(asked.world_size) if selection.covers(step, rank)}
    while True:
        over, known = is_over(asked.run), read_profiles(asked.run.folder)
        new = [one for one in known if asked.before.get((one.step, one.rank)) != one.time]
        made = [one for one in new if (one.step, one.rank) in expected]
        missing = expected - {(one.step, one.rank) for one in made}
        # Those of the first steps may have been deleted for the last.
        if not missing or max(step for step, _ in missing) < min((one.step for one in made), default=0):
            return made
        if over:
            raise UserError(f"the run ended before step {min(missing)[0]} was profiled", where=asked.run.name)
        time.sleep(_POLL_SECONDS)


def is_over(run: RunEntry) -> bool:
    """True if no attempt of the run is active or to come, by its folder."""
    folders = attempts.folders(run.folder)
    verdict = attempts.read_verdict(folders[-1]) if folders else None
    ended = verdict is not None and verdict.action in ("none", "stop")
    return ended or (run.job is None and not is_locked(run.folder))


def _running(run: RunEntry) -> AttemptFolder:
    """The newest attempt of a run that has started and is not over."""
    folders = attempts.folders(run.folder)
    if is_over(run):
        raise UserError(
            "the run is over", where=run.name, remedy="set profile.steps in its configuration, and resume it"
        )
    if not folders:
        raise UserError("the run has not started", where=run.name, remedy="set profile.steps, or ask again later")
    return folders[-1]


def _check_steps(run: RunEntry, config: RunConfig, first: int, last: int) -> None:
    """Refuses steps that have passed, the present one, and those after the last one."""
    status, most = run_status(run, None, asked=False), last_step(config)
    phase = "rl" if config.train.steps else "sft"
    if status.phase == phase or not status.phase:
        done = status.step or 0
        if first <= done + 1:
            state = "is running" if first == done + 1 else "has passed"
            raise UserError(
                f"step {first} {state}", where="STEPS", remedy=f"ask for step {done + 2} or later, or for next"
            )
    if last > most:
        raise UserError(
            f"step {last} is after the last one, {most}", where="STEPS", remedy=f"ask for steps up to {most}"
        )


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
