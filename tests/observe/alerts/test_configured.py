"""Rules in the configuration: what is refused, and with which line; the page and the names that are generated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.observe.alerts.builtin import BUILTIN, CHECKPOINT_MINUTES, JOB_EVENTS
from rlhpc.observe.alerts.configured import rules_of, selected_builtins
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
        ("{metric: rewards/mean, above: 0.5}", "rules.0.metric: no metric 'rewards/mean'; did you mean 'reward/mean'"),
        ("{above: 1}", "observe.alerts.rules.0.metric: is missing; add it"),
        ("{metric: kl}", "observe.alerts.rules.0: needs either above or below; give one of the two"),
        (
            "{metric: kl, above: 3, below: 1}",
            "observe.alerts.rules.0: needs either above or below; give one of the two",
        ),
        ("{metric: kl, above: high}", "observe.alerts.rules.0.above: 'high' is not allowed; allowed: a number"),
        ("{metric: kl, above: .nan}", "observe.alerts.rules.0.above: nan is not allowed; allowed: a number"),
        (
            "{metric: kl, above: 3, of: bist}",
            "rules.0.of: 'bist' is not allowed; allowed: 'best' or 'first' or 'median'",
        ),
        ("{metric: kl, above: 3, name: kll}", "observe.alerts.rules.0.name: no built-in rule 'kll'; did you mean 'kl'"),
        ("{metric: kl, above: 3, name: requeue}", "observe.alerts.rules.0.name: no built-in rule 'requeue'; valid: "),
        (
            "{metric: kl, above: 3, name: kl}, {metric: kl, above: 4, name: kl}",
            "observe.alerts.rules.1.name: duplicate name 'kl'; keep one of them",
        ),
        ("{metric: kl, above: 3, steps: -3}", "observe.alerts.rules.0.steps: -3 is not"),
        ("{metric: kl, above: 3, steps: 10001}", "observe.alerts.rules.0.steps: 10001 is not"),
        ("{metric: kl, above: 3, minutes: -1}", "observe.alerts.rules.0.minutes: -1 is not"),
        ("{metric: kl, above: 3, minutes: .inf}", "observe.alerts.rules.0.minutes: "),
        ("{metric: kl, above: 3, action: page}", "observe.alerts.rules.0.action: 'page' is not"),
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
            config(
                "{metric: kl, above: 1, name: x}", "{metric: y, above: 1}", builtin="[z]", webhook="hooks.example.org"
            )
        )
    for where in ("builtin", "rules.0.name", "rules.1.metric", "webhook"):
        assert f"observe.alerts.{where}: " in str(error.value)


@pytest.mark.parametrize("url", ["hooks.example.org", "ftp://x/y", "http://", "http://x:0/", "https://x/ y"])
def test_the_webhook_is_the_url_of_a_web_server(url: str) -> None:
    with pytest.raises(UserError) as error:
        check_alerts(load_config(DEMO, [f"observe.alerts.webhook='{url}'"]))
    assert str(error.value).startswith("observe.alerts.webhook: not the URL of a web server; write ")


def test_the_url_of_a_webhook_is_not_shown() -> None:
    with pytest.raises(UserError) as error:
        check_alerts(config(webhook="hooks.example.org/T0/secret123456"))
    assert "secret123456" not in str(error.value)


@pytest.mark.parametrize(
    "rule",
    [
        "{metric: validation/by_set/hard/pass@8, below: 0.5, of: best}",
        "{metric: reward/failures/timeout, above: 100}",
        "{metric: disk/free_gib, below: 100}",
    ],
)
def test_known_metrics_are_taken(rule: str) -> None:
    check_alerts(config(rule))


def test_parts_of_rewards_are_known_by_the_configuration() -> None:
    rule = "{metric: reward/tone, below: 0.5}"
    with pytest.raises(UserError, match="no metric 'reward/tone'"):
        check_alerts(config(rule))
    function = "rlhpc.rewards.rules:number"
    for rewards in (f"[{{function: {function}, name: tone}}]", "[{function: 'mine:score'}]"):
        check_alerts(load_config(DEMO, [f"rewards={rewards}", f"observe.alerts.rules=[{rule}]"]))


def test_a_row_replaces_the_built_in_rule_of_its_name() -> None:
    rules = rules_of(config("{metric: kl, above: 0.1, steps: 2, action: stop, name: kl}"))
    assert [rule.name for rule in rules] == [*(name for name in BUILTIN if name != "kl"), "kl"]
    assert (rules[-1].action, rules[-1].window.steps, rules[-1].severity) == ("stop", 2, "warning")
    assert [(rule, step) for rule, step, _ in fired(rules, healthy(10))] == [("kl", 2)]


def test_a_row_replaces_a_function_and_keeps_its_severity() -> None:
    *_, rule = rules_of(config("{metric: skipped_updates, above: 0, action: stop, name: non_finite}"))
    assert (rule.name, rule.action, rule.severity) == ("non_finite", "stop", "error")
    records = [*healthy(3), *healthy(1, 4, skipped_updates=1.0)]
    assert [(name, step) for name, step, _ in fired([rule], records)] == [("non_finite", 4)]


def test_a_rule_of_your_own_is_named_by_its_condition() -> None:
    rows = ("{metric: kl, above: 0.5}", "{metric: reward/mean, below: 0.7, of: best, steps: 3}")
    assert [rule.name for rule in rules_of(config(*rows))[-2:]] == ["kl above 0.5", "reward/mean below 0.7 of best"]


def test_built_in_rules_are_chosen() -> None:
    assert [rule.name for rule in rules_of(config())] == list(BUILTIN)
    assert not rules_of(config(builtin="false"))
    row = "{metric: disk/free_gib, below: 9, name: disk}"
    assert [rule.name for rule in rules_of(config(row, builtin="[kl, verdict]"))] == ["kl", "disk"]
    assert selected_builtins(config(builtin="[kl, verdict]").observe.alerts) == ("kl", "verdict")


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
    words -= {CHECKPOINT_MINUTES}  # no metric: taken beside them
    assert words <= set(metric_names.names(metric_names.PAGE.read_text(encoding="utf-8")))
