"""The rules of a run, from its configuration."""

from __future__ import annotations

import functools
from collections.abc import Collection

from rlhpc.config.observe import AlertRuleSection, AlertsSection
from rlhpc.config.reward import RewardFunctionSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError, did_you_mean
from rlhpc.core.files import shipped
from rlhpc.observe.alerts.builtin import BUILTIN, JOB_EVENTS, READINGS
from rlhpc.observe.alerts.rules import Limit, Rule, Severity, Window, condition

_PREFIXES = ("validation/", "reward/failures/", "staleness/")  # of metrics named by data and code of the run
_OWN = "rlhpc."  # beginning of import paths of functions whose metrics are known


def rules_of(config: RunConfig) -> tuple[Rule, ...]:
    """All rules on metrics. Raises UserError for each row that is not valid."""
    section, faults = config.observe.alerts, Faults()
    own: list[Rule] = []
    builtin: tuple[str, ...] = ()
    with faults.collect():
        builtin = selected_builtins(section)
    for place, row in enumerate(section.rules):
        with faults.collect():
            own.append(_own_rule(config, row, f"observe.alerts.rules.{place}", {rule.name for rule in own}))
    faults.raise_all()
    off = _without_meaning(config) | {rule.name for rule in own}
    return (*(BUILTIN[name] for name in builtin if name in BUILTIN and name not in off), *own)


def selected_builtins(section: AlertsSection) -> tuple[str, ...]:
    """Names of the built-in rules and events of the job that are on."""
    known = (*BUILTIN, *JOB_EVENTS)
    if isinstance(section.builtin, bool):
        return known if section.builtin else ()
    for name in section.builtin:
        _check_builtin(name, known, "observe.alerts.builtin")
    return tuple(section.builtin)


def _own_rule(config: RunConfig, row: AlertRuleSection, where: str, before: Collection[str]) -> Rule:
    if (row.above is None) == (row.below is None):
        raise UserError("needs either above or below", where=where, remedy="give one of the two")
    check_metric_name(row.metric, config, f"{where}.metric")
    severity: Severity = "warning"
    if row.name is not None:
        _check_builtin(row.name, BUILTIN, f"{where}.name")
        if row.name in before:
            raise UserError(f"duplicate name {row.name!r}", where=f"{where}.name", remedy="keep one of them")
        severity = BUILTIN[row.name].severity
    name = row.name or f"{row.metric} {condition(row)}"
    return Rule(name, functools.partial(Limit, row), Window(row.steps, row.minutes), severity, row.action)


def _check_builtin(name: str, known: Collection[str], where: str) -> None:
    if name not in known:
        raise UserError(f"no built-in rule {name!r}", where=where, remedy=did_you_mean(name, known))


def _without_meaning(config: RunConfig) -> set[str]:
    """Built-in rules that this configuration would fire in any case."""
    found = set() if config.rollout.trains_what_it_samples else {"logprob_diff"}
    return found | ({"empty_responses"} if config.rollout.max_response_tokens == 1 else set())


def check_metric_name(name: str, config: RunConfig, where: str) -> None:
    """Refuses a metric that the run cannot have. ``where``: the key that names it."""
    own_names = config.train.step is not None or ":" in config.algorithm.name
    known = (*metric_names(), *READINGS)
    if name in known or own_names or name.startswith(_prefixes(config)):
        return
    raise UserError(f"no metric {name!r}", where=where, remedy=did_you_mean(name, known))


@functools.cache
def metric_names() -> tuple[str, ...]:
    """Names of all metrics, as in docs/metrics.md; ``python -m tools.metric_names`` writes the file."""
    return tuple(shipped("observe/alerts/metric_names.txt").read_text(encoding="utf-8").split())


def _prefixes(config: RunConfig) -> tuple[str, ...]:
    """Beginnings of names that depend on the configuration. A function of one's own may return any part."""
    parts: Collection[str] = [entry.name for entry in config.rewards if entry.name is not None]
    functions = [entry for entry in config.rewards if isinstance(entry, RewardFunctionSection)]
    if any(not entry.function.startswith(_OWN) for entry in functions):
        parts = [""]
    return (*_PREFIXES, *(f"reward/{part}" for part in parts))
