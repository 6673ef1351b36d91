"""The built-in rules: what fires with the default configuration, with thresholds and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhpc.core.records import number
from rlhpc.observe.alerts.rules import (
    Collapse,
    Detector,
    MetricCondition,
    Record,
    Severity,
    Threshold,
    Window,
    WindowValues,
)

FREE_GIB, CHECKPOINT_GIB, CHECKPOINT_MINUTES = "disk/free_gib", "checkpoint/gib", "checkpoint/age_minutes"
READINGS = (FREE_GIB, CHECKPOINT_GIB, CHECKPOINT_MINUTES)  # taken beside the metrics (rlhpc.observe.alerts.run)
_FIRST_STEPS, _REWARD_SHARE = 10, 0.8  # what the entropy is compared with; above this share of the reward it may fall
_RISE, _LEAST_RISEN = 5.0, 0.02  # a log-prob difference that has risen by this factor, to this
_LEAST_GIB, _CHECKPOINTS = 1.0, 2.0  # free on a disk: this, and so many checkpoints
_FINITE = ("loss", "policy_loss", "grad_norm", "reward/mean", "critic/loss", "critic/grad_norm")
_SKIPPED = ("skipped_updates", "critic/skipped_updates")


@dataclass(frozen=True)
class Builtin:
    """``make`` makes a detector from a limit and a window; ``text``: when it fires, with {limit}."""

    name: str
    text: str
    limit: float | None
    window: Window
    make: Callable[[float, Window], Detector]
    severity: Severity = "warning"


class NonFinite:
    """Checks whether losses, gradients and rewards are finite, and no update was skipped."""

    def add(self, record: Record) -> str | None:
        values = {name: value for name in _FINITE if (value := number(record.get(name))) is not None}
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        skipped = sum(number(record.get(name)) or 0 for name in _SKIPPED)
        if skipped:
            wrong.append(f"{skipped:.0f} update(s) skipped, because their gradients are not finite or far too large")
        return "; ".join(wrong)


class FlatReward:
    """Checks whether any response of the newest RL steps had an advantage."""

    def __init__(self, window: Window) -> None:
        self._window, self._steps = window, 0

    def add(self, record: Record) -> str | None:
        if record.get("phase") != "rl" or not record.get("step"):  # 0: the first validation
            return None
        self._steps = self._steps + 1 if _is_flat(record) else 0
        if self._steps < self._window.steps:
            return ""
        return (
            f"no response had an advantage in {self._window}, because rewards do not differ: the policy learns "
            "nothing from them; see docs/reward_does_not_rise.md"
        )


def _is_flat(record: Record) -> bool:
    """True if no sample has an advantage, all rewards are equal, or dynamic sampling has dropped every group."""
    if record.get("reward/mean") is None:
        return record.get("sampling/kept_groups") == 0 and (number(record.get("sampling/dropped_groups")) or 0) > 0
    most, least = number(record.get("reward/max")), number(record.get("reward/min"))
    return record.get("advantage/zero_fraction") == 1 or (most is not None and most == least)


class EntropyCollapse:
    """Checks whether the entropy has collapsed while the reward is below its best. Alone it falls in healthy runs."""

    def __init__(self, share: float, window: Window) -> None:
        self._share, self._window = share, window
        self._first, self._values = WindowValues(Window(_FIRST_STEPS)), WindowValues(window)
        self._reward = Collapse("reward/mean", _REWARD_SHARE, window)

    def add(self, record: Record) -> str | None:
        fallen, value = self._reward.add(record), number(record.get("entropy"))
        if value is None or not math.isfinite(value):
            return None
        if not self._first.full:
            self._first.add(record["time"], value)
        self._values.add(record["time"], value)
        if not self._first.full or not self._values.full:
            return None
        now, before = self._values.median, self._first.median
        if now >= self._share * before or not fallen:
            return ""
        return (
            f"entropy is {now:.3g} in the last {self._window}: below {self._share:g} of its first {_FIRST_STEPS} steps "
            f"({before:.3g}); {fallen}"
        )


class LogprobDifference:
    """Checks whether engine and trainer differ by more than a limit, or much more than at first."""

    def __init__(self, limit: float, window: Window) -> None:
        self._limit, self._window = limit, window
        self._values, self._first = WindowValues(window), math.inf

    def add(self, record: Record) -> str | None:
        value = number(record.get("logprob_diff_mean"))
        if value is None or math.isnan(value):
            return None
        self._values.add(record["time"], value)
        if not self._values.full:
            return None
        now = self._values.median
        self._first = now if self._first == math.inf else self._first
        if now > self._limit:
            return f"logprob_diff_mean is {now:.3g} in the last {self._window}: > {self._limit:g}"
        if now > _LEAST_RISEN and now > _RISE * self._first:
            return (
                f"logprob_diff_mean is {now:.3g} in the last {self._window}: > {_RISE:g} of its first "
                f"({self._first:.3g})"
            )
        return ""


class StragglingRank:
    """Checks whether one rank is named as slower than the others in all steps of the window."""

    def __init__(self, limit: float, window: Window) -> None:
        self._limit, self._window = limit, window
        self._rank, self._steps, self._since = -1, 0, 0.0

    def add(self, record: Record) -> str | None:
        rank, ratio = number(record.get("perf/straggler_rank")), number(record.get("perf/straggler_ratio"))
        if rank is None or ratio is None:
            return None
        if rank < 0 or ratio <= self._limit:
            self._rank = -1
            return ""
        if rank != self._rank:
            self._rank, self._steps, self._since = int(rank), 0, record["time"]
        self._steps += 1
        if self._steps < self._window.steps or record["time"] - self._since < 60 * self._window.minutes:
            return ""
        return f"rank {self._rank} takes {ratio:.2f} times as long per token as the others; see docs/profiles.md"


class Disk:
    """Checks whether the disk of the run folder has room for the next checkpoints."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def add(self, record: Record) -> str | None:
        free, saved = number(record.get(FREE_GIB)), number(record.get(CHECKPOINT_GIB)) or 0.0
        if free is None:
            return None
        needed = max(_LEAST_GIB, self._limit * saved)
        if free >= needed:
            return ""
        return f"{free:.2f} GiB are free on the disk of the run folder: less than {needed:.2f}"


def _compared(metric: str, compare: str, of: str = "") -> Callable[[float, Window], Detector]:
    return lambda limit, window: Threshold(metric, MetricCondition(compare, limit, of), window)  # type: ignore[arg-type]


_ALL = (
    Builtin(
        "non_finite",
        "`loss`, `grad_norm`, `reward/mean` or one of `critic/…` is not finite, or an update was skipped",
        None,
        Window(1),
        lambda _limit, _window: NonFinite(),
        "error",
    ),
    Builtin(
        "reward_collapse",
        "`reward/mean` is below {limit} of its best, by over 6 times its typical change from step to step",
        0.7,
        Window(5),
        lambda limit, window: Collapse("reward/mean", limit, window),
    ),
    Builtin(
        "entropy_collapse",
        "`entropy` is below {limit} of its first 10 steps, and `reward/mean` below 0.8 of its best",
        0.1,
        Window(5),
        EntropyCollapse,
    ),
    Builtin(
        "flat_reward",
        "no response of the window had an advantage",
        None,
        Window(10),
        lambda _limit, window: FlatReward(window),
    ),
    Builtin("kl", "`kl` is above {limit}", 1.0, Window(3), _compared("kl", ">")),
    Builtin(
        "logprob_diff",
        "`logprob_diff_mean` is above {limit}, or above 0.02 and 5 times its first; not where tokens are drawn from "
        "[another distribution](sampling.md) than the trained one",
        0.1,
        Window(3),
        LogprobDifference,
    ),
    Builtin(
        "truncated",
        "`response/truncated_fraction` is at least {limit}",
        0.95,
        Window(3),
        _compared("response/truncated_fraction", ">="),
    ),
    Builtin(
        "empty_responses",
        "`response/length_mean` is at most {limit}: end tokens alone; only with `rollout.max_response_tokens` above 1",
        1.05,
        Window(3),
        _compared("response/length_mean", "<="),
    ),
    Builtin(
        "throughput",
        "`perf/tokens_per_second` is below {limit} of its median over the 256 steps or parts of the window before",
        0.5,
        Window(10, 10.0),
        _compared("perf/tokens_per_second", "<", "median"),
    ),
    Builtin(
        "straggler",
        "`perf/straggler_rank` names the same rank in all steps, with a `perf/straggler_ratio` above {limit}",
        1.2,
        Window(5, 3.0),
        StragglingRank,
    ),
    Builtin(
        "gpu_memory",
        "`memory/device_share_max` is above {limit}",
        0.98,
        Window(3),
        _compared("memory/device_share_max", ">"),
    ),
    Builtin(
        "gpu_throttled",
        "`gpu/throttled_fraction_max` is above {limit}",
        0.2,
        Window(5, 5.0),
        _compared("gpu/throttled_fraction_max", ">"),
    ),
    Builtin(
        "lost_engine",
        "`rollout/lost_engines` is above {limit}: an engine was lost, and training goes on without it",
        0.0,
        Window(1),
        _compared("rollout/lost_engines", ">"),
    ),
    Builtin(
        "gpu_ecc",
        "`gpu/ecc_uncorrected_max` is above {limit}",
        0.0,
        Window(1),
        _compared("gpu/ecc_uncorrected_max", ">"),
        "error",
    ),
    Builtin(
        "disk",
        "less than {limit} times the newest checkpoint, or than 1 GiB, is free on the disk of the run folder",
        2.0,
        Window(1),
        lambda limit, _window: Disk(limit),
        "error",
    ),
    Builtin(
        "checkpoint_age",
        "the newest checkpoint, or the start of the attempt, is over {limit} minutes old",
        240.0,
        Window(1),
        _compared(CHECKPOINT_MINUTES, ">"),
    ),
)
BUILTIN: Mapping[str, Builtin] = {rule.name: rule for rule in _ALL}
# When each event of the job happens, and its severity.
JOB_EVENTS: Mapping[str, tuple[str, str]] = {
    "verdict": ("the run has ended: finished (info), or stopped or failed (error)", "info or error"),
    "retry": ("the ranks ended, or the trainers alone, and are started again in the same job", "warning"),
    "requeue": ("the ranks ended, and the job is requeued", "warning"),
    "excluded_node": ("a node is excluded from the next attempts", "warning"),
}
