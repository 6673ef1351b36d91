"""Verdict on the last attempt before this start of the job, which the next attempt goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import reduce

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict, saved_step
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.ended import without_verdict
from rlhpc.launch.supervise.policy import Situation, decide


@dataclass(frozen=True)
class Former:
    """The attempt's folder; the verdict that the next attempt goes by; the verdict to write, if none was left."""

    folder: AttemptFolder
    verdict: Verdict
    unwritten: Verdict | None = None


def former_verdict(run: RunFolder, job: BatchJob, config: RunConfig, seconds_left: float) -> Former | None:
    """The last attempt with its verdict; None before the first. Writes nothing.

    After a stop or in another job, the user has started the run again: failures are counted from zero.
    """
    known = [(folder, attempts.read_attempt(folder)) for folder in attempts.folders(run)]
    begun = [(folder, attempt) for folder, attempt in known if attempt is not None]
    if not begun:
        return None
    folder, attempt = begun[-1]
    unwritten, is_ours = None, attempt.job_id == job.job_id
    verdict = attempts.read_verdict(folder)
    if verdict is None:
        before = attempts.read_verdict(begun[-2][0]) if len(begun) > 1 else None
        before = next(reversed(attempts.restarts(folder)), before)
        situation = Situation(attempt, before, saved_step(run), time.time(), seconds_left)
        verdict = unwritten = decide(without_verdict(attempt, job), config, situation)
        if is_ours:
            return Former(folder, verdict, unwritten)
    if not is_ours or verdict.action == "stop":
        meant = tuple(change for change in verdict.overrides if _still_holds(change, begun[0][0], config))
        return Former(folder, replace(verdict, action="none", failures=0, excluded=(), overrides=meant), unwritten)
    return Former(folder, replace(verdict, action="none"), unwritten)


def _still_holds(override: str, first: AttemptFolder, config: RunConfig) -> bool:
    """Whether a change by recovery still applies: the user has not changed the key since the first attempt."""
    key = override.partition("=")[0].split(".")
    return bool(reduce(getattr, key, config) == reduce(getattr, key, load_config(first.config)))
