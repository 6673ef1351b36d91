"""Decision on a job whose ranks have ended, by the config's policy. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlhpc.config.jobs import RecoverySection
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Action, Attempt, Cause, Verdict
from rlhpc.launch.roles import roles_of
from rlhpc.launch.supervise.diagnosis import Diagnosis

# Causes that are not failures: the run continues when Slurm gives it time again.
_PAUSES: tuple[Cause, ...] = ("time_limit", "preempted", "requeued", "ended")
# Never counted: the run is done, a user's wish, or the allocation is no longer this start's.
_NOT_FAILURES: tuple[Cause, ...] = ("finished", "stopped", "allocation_lost")
NO_REQUEUE = "Slurm does not requeue this job; `rlhpc resume` continues the run"
_FACTOR = 2.0
_REQUEUE_SECONDS = 60.0  # of the job's time, kept for a requeue after a pause
_BACK_OFF: tuple[Cause, ...] = ("network", "disk_full", "storage")
_STORE = re.compile(r"the job's store at ([\w.-]+):\d+")
_HOPELESS: tuple[Cause, ...] = ("user", "data")
_WITH_KEY: tuple[Cause, ...] = ("network", "non_finite", "bad_node", "hang", "disk_full", "storage")


@dataclass(frozen=True)
class Situation:
    """State of job and run. ``attempt``: the one that ended; ``before``: verdict on the one before; ``saved_step``: of
    the newest checkpoint now; ``usable_without``: nodes the job could use without the failed one; ``partition``: all of
    its nodes, empty if unknown; ``no_requeue``: reason why a requeue is impossible, with the remedy; ``may_retry``:
    true if another attempt may follow."""

    attempt: Attempt
    before: Verdict | None
    saved_step: int
    now: float
    seconds_left: float
    usable_without: int = 0
    partition: tuple[str, ...] = ()
    no_requeue: str = ""
    may_retry: bool = True


def decide(diagnosis: Diagnosis, config: RunConfig, situation: Situation) -> Verdict:
    """Verdict: cause, action, and changes for the next attempt."""
    attempt, policy = situation.attempt, config.recovery
    diagnosis = _suspect_node(_suspect_store(diagnosis, situation), situation)
    cause = diagnosis.cause
    if cause == "requeued" and situation.no_requeue:
        cause = "ended"

    def verdict(action: Action, message: str = "", **changes: Any) -> Verdict:
        if action in ("retry", "requeue") and not situation.may_retry:
            action, changes = "stop", {}
        if action == "requeue" and situation.no_requeue:
            action, message = "stop", f"{message or diagnosis.message}; {situation.no_requeue}"
            changes.pop("excluded", None)
        known: dict[str, Any] = {
            "overrides": attempt.overrides,
            "excluded": attempt.excluded,
            "failures": failures,
            **changes,
        }
        place = diagnosis.rank, diagnosis.node, diagnosis.detail
        return Verdict(situation.now, cause, message or diagnosis.message, action, *place, **known)

    former = situation.before.failures if situation.before is not None else 0
    progressed = situation.saved_step > attempt.saved_step
    failures = 0 if progressed else former
    if cause in _NOT_FAILURES:
        return verdict("stop" if diagnosis.stopped == "alert" else "none")
    failures += 0 if cause in _PAUSES and progressed else 1
    if cause in _HOPELESS:
        return verdict("stop")
    if failures > policy.retries:
        return verdict("stop", f"{diagnosis.message} ({failures} attempts in a row without a newer checkpoint)")
    if cause in _PAUSES:
        return verdict("none" if cause == "ended" else "requeue")
    wanted = _policy_of(cause, config)
    if wanted == "stop":
        return verdict("stop")
    wait = policy.wait_seconds * (_FACTOR ** (failures - 1) if cause in _BACK_OFF else 1.0)
    action: Action = "retry"
    if situation.seconds_left <= wait:
        action, wait = "requeue", 0.0
    if wanted == "shrink":
        if (smaller := shrink(config, diagnosis, attempt.world_size)) is None:
            return verdict("stop", f"{diagnosis.message} (cannot be halved further)")
        return verdict(action, overrides=_merged(attempt.overrides, smaller), wait_seconds=wait)
    if wanted == "exclude" and diagnosis.node:
        excluded = tuple(sorted({*attempt.excluded, diagnosis.node}))
        fewest = config.slurm.least_nodes - config.all_rollout_job_nodes
        if situation.partition and len({*situation.partition} - {*excluded}) < fewest:
            pause = min(policy.wait_seconds * _FACTOR ** (failures - 1), situation.seconds_left - _REQUEUE_SECONDS)
            message = f"{diagnosis.message} (no other node can replace it)"
            return verdict("requeue", message, wait_seconds=max(0.0, pause))
        if diagnosis.node == attempt.nodes[0] or not situation.usable_without:
            action, wait = "requeue", 0.0  # the supervisor runs on the first node
        return verdict(action, excluded=excluded, wait_seconds=wait)
    return verdict(action, wait_seconds=wait)


def storage_patience(policy: RecoverySection) -> float:
    """Time in seconds that a supervisor waits for the file system. No verdict can be read or written without it, so the
    wait replaces retries and lasts as long as all their pauses."""
    if policy.storage == "stop":
        return policy.storage_wait_seconds
    return policy.storage_wait_seconds + policy.wait_seconds * (_FACTOR**policy.retries - 1) / (_FACTOR - 1)


def shrink(config: RunConfig, diagnosis: Diagnosis, world_size: int) -> str | None:
    """Override (KEY=VALUE) that halves the memory's consumer; None if it cannot be halved further."""
    roles = roles_of(config, world_size)
    only_generates = roles is not None and diagnosis.rank in roles.engines.ranks
    in_engine = only_generates or ("vllm" in diagnosis.detail and diagnosis.cause == "gpu_memory")
    if in_engine:
        running = config.rollout.sequences // 2
        return f"rollout.max_num_seqs={running}" if running else None
    tokens = config.train.tokens_per_microbatch
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return f"train.tokens_per_microbatch={max(tokens // 2, longest)}" if tokens > longest else None


def _policy_of(cause: Cause, config: RunConfig) -> str:
    if cause == "stranger":  # it has refused several starts in a row by then: another attempt would meet it too
        return "stop"
    if cause in ("gpu_memory", "cpu_memory"):
        return config.recovery.out_of_memory
    return str(getattr(config.recovery, cause if cause in _WITH_KEY else "crash"))


def _suspect_store(diagnosis: Diagnosis, situation: Situation) -> Diagnosis:
    """The diagnosis, turned into a failure of the first node if two other nodes in a row could not reach its store."""
    before = situation.before
    if before is None or diagnosis.cause != "bad_node" or before.node not in situation.attempt.excluded:
        return diagnosis
    found, former = _STORE.search(diagnosis.message), _STORE.search(before.message)
    first = situation.attempt.nodes[0]
    same = found is not None and former is not None and found[1] == former[1]
    if not same or diagnosis.node == first:
        return diagnosis
    message = f"{before.node} and {diagnosis.node} cannot reach {first}: {diagnosis.message}"
    return Diagnosis("bad_node", message, -1, first, diagnosis.detail)


def _suspect_node(diagnosis: Diagnosis, situation: Situation) -> Diagnosis:
    """The diagnosis, turned into a failure of the node if ranks died on it twice in a row."""
    before = situation.before
    again = (
        before is not None
        and diagnosis.cause in ("crash", "hang")
        and before.cause in ("crash", "hang")
        and diagnosis.node
        and before.node == diagnosis.node
    )
    if not again or len(situation.attempt.nodes) == 1:
        return diagnosis
    return Diagnosis(
        "bad_node", f"{diagnosis.message} (again on {diagnosis.node})", diagnosis.rank, diagnosis.node, diagnosis.detail
    )


def _merged(overrides: tuple[str, ...], new: str) -> tuple[str, ...]:
    key = new.partition("=")[0]
    return (*(old for old in overrides if old.partition("=")[0] != key), new)
