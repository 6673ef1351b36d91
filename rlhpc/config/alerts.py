"""Alerts: rules on metrics and what happens when one fires."""

from __future__ import annotations

from typing import Literal

from rlhpc.config.section import NonNegativeFloat, PositiveInt, PositiveSeconds, Section


class AlertWindowSection(Section):
    """Newest steps whose median is compared: at least so many, over at least so many minutes. The condition must be
    false for as long before the rule can fire again."""

    steps: PositiveInt = 1
    """Minimum number of steps."""
    minutes: NonNegativeFloat = 0.0
    """Minimum time, in minutes."""


class AlertRuleSection(Section):
    """A rule of your own, with metric and condition, or changes to a built-in one, with builtin."""

    metric: str | None = None
    """Name of the metric in metrics.jsonl."""
    condition: str | None = None
    """Condition on the median of the window: "> 0.5", "< 0.7 of best" (or of first, of median), or "non-finite"."""
    builtin: str | None = None
    """Name of the built-in rule that this entry changes."""
    limit: float | None = None
    """Limit of a built-in rule in place of its own (docs/watch.md)."""
    window: AlertWindowSection | None = None
    """Window; default: that of the built-in rule, or one step."""
    action: Literal["warn", "save", "stop"] = "warn"
    """Action besides the warning: none, a checkpoint after the step, or a checkpoint and the end of the run."""
    command: str | None = None
    """Shell command for this rule; default: as for observe.alerts.command."""
    webhook: str | None = None
    """URL for this rule; default: as for observe.alerts.webhook."""


class AlertsSection(Section):
    builtin: bool | list[str] = True
    """Built-in rules and events of the job: all (true), none (false), or those of these names (docs/watch.md)."""
    rules: list[AlertRuleSection] = []
    """Rules of your own, and changes to built-in ones."""
    command: str | None = None
    """Shell command run for each alert, with variables RLHPC_ALERT_… and the alert as JSON on its standard input."""
    webhook: str | None = None
    """URL that each alert is sent to as JSON with POST; treated as a secret."""
    timeout_seconds: PositiveSeconds = 10.0
    """Time limit of a command or request, in seconds, also for those of the end of a run."""
