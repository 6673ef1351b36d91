"""The rules of a run, from its configuration."""

from __future__ import annotations

import functools
from collections.abc import Collection

from rlhpc.config.observe import AlertRuleSection, AlertsSection, AlertWindowSection
from rlhpc.config.reward import RewardFunctionSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError, did_you_mean
from rlhpc.core.files import shipped
from rlhpc.observe.alerts.builtin import BUILTIN, JOB_EVENTS, READINGS
from rlhpc.observe.alerts.rules import Rule, Threshold, Window, parse_condition

_PREFIXES = ("validation/", "reward/failures/", "staleness/")  # of metrics named by data and code of the run
_OWN = "rlhpc."  # beginning of import paths of functions whose metrics are known


def rules_of(config: RunConfig) -> tuple[Rule, ...]:
    """All rules on metrics. Raises UserError for each entry that is not valid."""
    section, faults = config.observe.alerts, Faults()
    with faults.collect():
        selected = selected_builtins(section)
    changes: dict[str, AlertRuleSection] = {}
    own: list[Rule] = []
    for number, entry in enumerate(section.rules):
        where = f"observe.alerts.rules.{number}"
        with faults.collect():
            if entry.builtin is None:
                own.append(_own_rule(config, entry, where))
            else:
                changes[_changed(entry, where)] = entry
    faults.raise_all()
    skipped = _without_meaning(config) | set(JOB_EVENTS)
    names = [name for name in dict.fromkeys((*selected, *changes)) if name not in skipped]
    return (*(_builtin_rule(name, changes.get(name), section) for name in names), *own)


def selected_builtins(section: AlertsSection) -> tuple[str, ...]:
    """Names of the built-in rules and events of the job that are on."""
    known = (*BUILTIN, *JOB_EVENTS)
    if isinstance(section.builtin, bool):
        return known if section.builtin else ()
    for name in section.builtin:
        if name not in known:
            remedy = did_you_mean(name, known)
            raise UserError(f"no built-in rule {name!r}", where="observe.alerts.builtin", remedy=remedy)
    return tuple(section.builtin)


def event_rule(name: str, section: AlertsSection) -> Rule | None:
    """Rule of an event of the job; None if it is off."""
    entry = next((entry for entry in section.rules if entry.builtin == name), None)
    if entry is None and name not in selected_builtins(section):
        return None
    command, webhook = _destinations(entry, section)
    return Rule(name, functools.partial(_never, name), Window(), command=command, webhook=webhook)


def _never(name: str) -> Threshold:
    raise AssertionError(f"{name} is an event, not a rule on metrics")


def _builtin_rule(name: str, entry: AlertRuleSection | None, section: AlertsSection) -> Rule:
    rule = BUILTIN[name]
    limit = entry.limit if entry is not None and entry.limit is not None else rule.limit
    window = _window(entry.window) if entry is not None and entry.window is not None else rule.window
    command, webhook = _destinations(entry, section)
    make = functools.partial(rule.make, 0.0 if limit is None else limit, window)
    return Rule(name, make, window, rule.severity, entry.action if entry else "warn", command, webhook)


def _own_rule(config: RunConfig, entry: AlertRuleSection, where: str) -> Rule:
    if entry.metric is None or entry.condition is None:
        missing = "condition" if entry.condition is None else "metric"
        remedy = "give metric and condition, or the name of a built-in rule as builtin"
        raise UserError("missing", where=f"{where}.{missing}", remedy=remedy)
    if entry.limit is not None:
        raise UserError("is of built-in rules", where=f"{where}.limit", remedy="put the number into condition")
    condition = parse_condition(entry.condition, f"{where}.condition")
    check_metric_name(entry.metric, config, f"{where}.metric")
    window = _window(entry.window) if entry.window is not None else Window()
    command, webhook = _destinations(entry, config.observe.alerts)
    name = f"{entry.metric} {condition}"
    make = functools.partial(Threshold, entry.metric, condition, window)
    return Rule(name, make, window, "warning", entry.action, command, webhook)


def _changed(entry: AlertRuleSection, where: str) -> str:
    """Name of the built-in rule that an entry changes."""
    known, name = (*BUILTIN, *JOB_EVENTS), entry.builtin or ""
    if name not in known:
        raise UserError(f"no built-in rule {name!r}", where=f"{where}.builtin", remedy=did_you_mean(name, known))
    event, unlimited = name in JOB_EVENTS, name in BUILTIN and BUILTIN[name].limit is None
    wrong = {
        "metric": entry.metric is not None,
        "condition": entry.condition is not None,
        "limit": entry.limit is not None and (event or unlimited),
        "window": entry.window is not None and event,
        "action": entry.action != "warn" and event,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"the built-in rule {name} has none", where=f"{where}.{key}", remedy="remove it")
    return name


def _destinations(entry: AlertRuleSection | None, section: AlertsSection) -> tuple[str | None, str | None]:
    """Command and webhook of a rule."""
    command = entry.command if entry is not None and entry.command is not None else section.command
    webhook = entry.webhook if entry is not None and entry.webhook is not None else section.webhook
    return command, webhook


def _window(section: AlertWindowSection) -> Window:
    return Window(section.steps, section.minutes)


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
