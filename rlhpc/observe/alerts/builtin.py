"""The built-in rules, on with the default configuration: rows, and functions of a record."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhpc.config.observe import AlertRuleSection
from rlhpc.core.records import number
from rlhpc.observe.alerts.rules import Lasting, Limit, Record, Rule, Severity, Window, condition

FREE_GIB, CHECKPOINT_GIB, CHECKPOINT_MINUTES = "disk/free_gib", "checkpoint/gib", "checkpoint/age_minutes"
READINGS = (FREE_GIB, CHECKPOINT_GIB, CHECKPOINT_MINUTES)  # taken beside the metrics (rlhpc.observe.alerts.run)
_FINITE = ("loss", "policy_loss", "grad_norm", "reward/mean", "critic/loss", "critic/grad_norm")
_SKIPPED = ("skipped_updates", "critic/skipped_updates")
_FLAT_STEPS, _SLOWER = 10, 1.2
_LEAST_CHANGES = 6.0  # rewards near 0 vary by more than their mean


def _non_finite(record: Record) -> str | None:
    values = {name: value for name in _FINITE if (value := number(record.get(name))) is not None}
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    skipped = sum(number(record.get(name)) or 0 for name in _SKIPPED)
    if skipped:
        wrong.append(f"{skipped:.0f} update(s) skipped, because their gradients are not finite or far too large")
    return "; ".join(wrong)


def _flat_reward(record: Record) -> str | None:
    """Message if no sample has an advantage, all rewards are equal, or dynamic sampling has dropped every group."""
    if record.get("phase") != "rl" or not record.get("step"):  # 0: the first validation
        return None
    most, least = number(record.get("reward/max")), number(record.get("reward/min"))
    if record.get("reward/mean") is None:
        flat = record.get("sampling/kept_groups") == 0 and (number(record.get("sampling/dropped_groups")) or 0) > 0
    else:
        flat = record.get("advantage/zero_fraction") == 1 or (most is not None and most == least)
    if not flat:
        return ""
    return (
        f"no response had an advantage in {_FLAT_STEPS} steps, because rewards do not differ: the policy learns "
        "nothing from them; see docs/reward_does_not_rise.md"
    )


def _straggler(record: Record) -> str | None:
    rank, ratio = number(record.get("perf/straggler_rank")), number(record.get("perf/straggler_ratio"))
    if rank is None or ratio is None:
        return None
    if rank < 0 or ratio <= _SLOWER:
        return ""
    return f"rank {rank:.0f} takes over {_SLOWER:g} times as long per token as the others; see docs/profiles.md"


def _disk(record: Record) -> str | None:
    free, saved = number(record.get(FREE_GIB)), number(record.get(CHECKPOINT_GIB)) or 0.0
    if free is None:
        return None
    needed = max(1.0, 2 * saved)
    if free >= needed:
        return ""
    return f"{free:.2f} GiB are free on the disk of the run folder: less than {needed:.2f}"


def _function(
    name: str, function: Callable[[Record], str | None], window: Window, text: str, severity: Severity = "warning"
) -> Rule:
    return Rule(name, functools.partial(Lasting, function, window), window, severity, text=text)


def _row(name: str, metric: str, text: str = "", severity: Severity = "warning", **limit: Any) -> Rule:
    row = AlertRuleSection(name=name, metric=metric, **limit)
    detector = functools.partial(Limit, row, _LEAST_CHANGES if name == "reward_collapse" else 0.0)
    return Rule(name, detector, Window(row.steps, row.minutes), severity, text=f"`{metric}` is {condition(row)}{text}")


_FLAT_TEXT = "no response of the window had an advantage"
_FINITE_TEXT = "`loss`, `grad_norm`, `reward/mean` or one of `critic/…` is not finite, or an update was skipped"
_SLOW_TEXT = "`perf/straggler_rank` names the same rank in all steps, with a `perf/straggler_ratio` above 1.2"
_DISK_TEXT = "less than 2 times the newest checkpoint, or than 1 GiB, is free on the disk of the run folder"
_FALL = ", by over 6 times its typical change from step to step"
_OTHER = "; not where tokens are drawn from [another distribution](sampling.md) than the trained one"
_EMPTY = ": end tokens alone; only with `rollout.max_response_tokens` above 1"
_LOST = ": an engine was lost, and training goes on without it"
_AGE = ", since the newest checkpoint or the start of the attempt"
_ALL = (
    _function("non_finite", _non_finite, Window(), _FINITE_TEXT, "error"),
    _row("reward_collapse", "reward/mean", _FALL, below=0.7, of="best", steps=5),
    _function("flat_reward", _flat_reward, Window(_FLAT_STEPS), _FLAT_TEXT),
    _row("kl", "kl", above=1.0, steps=3),
    _row("logprob_diff", "logprob_diff_mean", _OTHER, above=0.1, steps=3),
    _row("truncated", "response/truncated_fraction", above=0.95, steps=3),
    _row("empty_responses", "response/length_mean", _EMPTY, below=1.05, steps=3),
    _row("throughput", "perf/tokens_per_second", below=0.5, of="median", steps=10, minutes=10.0),
    _function("straggler", _straggler, Window(5, 3.0), _SLOW_TEXT),
    _row("gpu_memory", "memory/device_share_max", above=0.98, steps=3),
    _row("gpu_throttled", "gpu/throttled_fraction_max", above=0.2, steps=5, minutes=5.0),
    _row("lost_engine", "rollout/lost_engines", _LOST, above=0.0),
    _row("gpu_ecc", "gpu/ecc_uncorrected_max", severity="error", above=0.0),
    _function("disk", _disk, Window(), _DISK_TEXT, "error"),
    _row("checkpoint_age", CHECKPOINT_MINUTES, _AGE, above=240.0),
)
BUILTIN: Mapping[str, Rule] = {rule.name: rule for rule in _ALL}
# When each event of the job happens, and its severity.
JOB_EVENTS: Mapping[str, tuple[str, str]] = {
    "verdict": ("the run has ended: finished (info), or stopped or failed (error)", "info or error"),
    "retry": ("the ranks ended, or the trainers alone, and are started again in the same job", "warning"),
    "requeue": ("the ranks ended, and the job is requeued", "warning"),
    "excluded_node": ("a node is excluded from the next attempts", "warning"),
}
