"""Rules in the configuration: what is refused, and with which line; the page and the names that are generated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.observe.alerts.builtin import BUILTIN, JOB_EVENTS
from rlhpc.observe.alerts.configured import event_rule, rules_of
from rlhpc.plan.checks.observe import check_alerts
from tests.docs.pages import blocks
from tests.observe.alerts.series import fired, healthy
from tools import alerts_table, metric_names
from tools.markers import between

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


def config(*rules: str, **keys: str) -> RunConfig:
    changed = [f"observe.alerts.{key}={value}" for key, value in keys.items()]
    return load_config(DEMO, [f"observe.alerts.rules=[{', '.join(rules)}]", *changed])


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (
            '{metric: rewards/mean, condition: "> 0.5"}',
            "observe.alerts.rules.0.metric: no metric 'rewards/mean'; did you mean 'reward/mean'",
        ),
        ('{metric: kl, condition: "over 3"}', "observe.alerts.rules.0.condition: 'over 3' is not a condition; write"),
        ('{metric: kl, condition: "> 3 of bist"}', "observe.alerts.rules.0.condition: 'bist' is not a reference"),
        ("{metric: kl}", "observe.alerts.rules.0.condition: missing; give metric and condition"),
        ('{condition: "> 1"}', "observe.alerts.rules.0.metric: missing; give metric and condition"),
        ('{metric: kl, condition: "> 3", limit: 3}', "observe.alerts.rules.0.limit: is of built-in rules; put the"),
        ("{builtin: throughputs}", "no built-in rule 'throughputs'; did you mean 'throughput'"),
        ("{builtin: kl, metric: kl}", "observe.alerts.rules.0.metric: the built-in rule kl has none; remove it"),
        ("{builtin: non_finite, limit: 1}", "observe.alerts.rules.0.limit: the built-in rule non_finite has none"),
        ("{builtin: requeue, action: stop}", "observe.alerts.rules.0.action: the built-in rule requeue has none"),
        (
            '{metric: kl, condition: "> 3", webhook: "ftp://x/y"}',
            "rules.0.webhook: not the URL of a web server",
        ),
        ('{metric: kl, condition: "> 3", window: {steps: -3}}', "observe.alerts.rules.0.window.steps: -3 is not"),
        ('{metric: kl, condition: "> 3", window: {minutes: -1}}', "observe.alerts.rules.0.window.minutes: -1 is not"),
        ('{metric: kl, condition: "> 3", window: {minutes: .inf}}', "observe.alerts.rules.0.window.minutes: "),
        ('{metric: kl, condition: "> 3", action: page}', "observe.alerts.rules.0.action: 'page' is not"),
    ],
)
def test_a_wrong_rule_is_one_line(rule: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check_alerts(config(rule))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_each_wrong_rule_is_named() -> None:
    with pytest.raises(UserError) as error:
        check_alerts(
            config("{builtin: x}", '{metric: y, condition: "> 1"}', builtin="[z]", webhook="hooks.example.org")
        )
    for where in ("builtin", "rules.0.builtin", "rules.1.metric", "webhook"):
        assert f"observe.alerts.{where}: " in str(error.value)


def test_the_url_of_a_webhook_is_not_shown() -> None:
    with pytest.raises(UserError) as error:
        check_alerts(config(webhook="hooks.example.org/T0/secret123456"))
    assert "secret123456" not in str(error.value)


@pytest.mark.parametrize(
    "rule",
    [
        '{metric: validation/by_set/hard/pass@8, condition: "< 0.5 of best"}',
        '{metric: reward/failures/timeout, condition: "> 100"}',
        '{metric: disk/free_gib, condition: "< 100"}',
    ],
)
def test_known_metrics_are_taken(rule: str) -> None:
    check_alerts(config(rule))


def test_parts_of_rewards_are_known_by_the_configuration() -> None:
    rule = '{metric: reward/tone, condition: "< 0.5"}'
    with pytest.raises(UserError, match="no metric 'reward/tone'"):
        check_alerts(config(rule))
    function = "rlhpc.rewards.rules:number"
    for rewards in (f"[{{function: {function}, name: tone}}]", "[{function: 'mine:score'}]"):
        check_alerts(load_config(DEMO, [f"rewards={rewards}", f"observe.alerts.rules=[{rule}]"]))


def test_an_entry_changes_a_built_in_rule() -> None:
    changed = config("{builtin: kl, limit: 0.1, window: {steps: 2}, action: stop, command: mine}", command="all")
    rules = {rule.name: rule for rule in rules_of(changed)}
    assert (rules["kl"].action, rules["kl"].command, rules["kl"].window.steps) == ("stop", "mine", 2)
    assert (rules["truncated"].action, rules["truncated"].command) == ("warn", "all")
    assert [(rule, step) for rule, step, _ in fired(list(rules.values()), healthy(10))] == [("kl", 2)]


def test_built_in_rules_are_chosen() -> None:
    assert [rule.name for rule in rules_of(config())] == list(BUILTIN)
    assert not rules_of(config(builtin="false"))
    assert [rule.name for rule in rules_of(config("{builtin: disk}", builtin="[kl, verdict]"))] == ["kl", "disk"]
    assert event_rule("verdict", config(builtin="[kl, verdict]").observe.alerts) is not None
    assert event_rule("requeue", config(builtin="[kl, verdict]").observe.alerts) is None


def test_the_page_has_all_rules() -> None:
    assert between(alerts_table.PAGE, alerts_table.MARKER) == alerts_table.table(), "python -m tools.alerts_table"
    assert len(alerts_table.table().splitlines()) == 2 + len(BUILTIN) + len(JOB_EVENTS)


def test_the_examples_of_the_page_pass_the_checks(tmp_path: Path) -> None:
    examples = [text for text in blocks(alerts_table.PAGE, "yaml") if "alerts:" in text]
    assert len(examples) == 2
    for example in examples:
        file = tmp_path / "config.yaml"
        file.write_text(f"{DEMO.read_text()}\n{example}")
        check_alerts(load_config(file))


def test_all_metrics_of_the_page_are_known() -> None:
    page = metric_names.PAGE.read_text(encoding="utf-8")
    assert metric_names.FILE.read_text(encoding="utf-8") == metric_names.text(page), "python -m tools.metric_names"
    assert {"kl", "reward/mean", "validation/reward_mean"} <= set(metric_names.names(page))
    assert not {"time", "prompt"} & set(metric_names.names(page))


def test_a_number_of_each_rank_has_three_metrics() -> None:
    page = f"| `a` | x |\n{metric_names.OF_RANKS}\n\n| `b` | x |\n\n## More\n| `c` | x |\n\n## Samples\n| `d` | x |\n"
    assert metric_names.names(page) == ["a", "b_mean", "b_max", "b_max_rank", "c"]


def test_built_in_rules_are_on_metrics_that_exist() -> None:
    words = {word for rule in BUILTIN.values() for word in re.findall(r"`([\w/]+)`", rule.text)}
    assert len(words) > 12
    assert words <= set(metric_names.names(metric_names.PAGE.read_text(encoding="utf-8")))
