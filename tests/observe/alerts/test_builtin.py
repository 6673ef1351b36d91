"""Each built-in rule fires within its window on a planted fault or a flat reward, and on no healthy run."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.observe.alerts.builtin import BUILTIN
from rlhpc.observe.alerts.configured import rules_of
from rlhpc.observe.alerts.rules import Engine
from rlhpc.observe.progress import Display
from tests.observe.alerts.series import COLLAPSED, RECORDED, fired, healthy, recorded

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
ONSET = 40  # last healthy step
# What a rule sees from the step after ONSET on.
FAULTS: dict[str, list[dict[str, Any]]] = {
    "non_finite": [{"loss": math.nan}, {"grad_norm": math.inf}, {"skipped_updates": 2.0}, {"critic__loss": math.nan}],
    "reward_collapse": [{"reward__mean": 0.1}, {"reward__mean": -0.5}],
    "flat_reward": [
        {"advantage__zero_fraction": 1.0},
        {"reward__max": 0.25, "reward__min": 0.25, "reward__mean": 0.55},
    ],
    "kl": [{"kl": 1.5}],
    "logprob_diff": [{"logprob_diff_mean": 0.15}],
    "truncated": [{"response__truncated_fraction": 1.0}],
    "empty_responses": [{"response__length_mean": 1.0}],
    "throughput": [{"perf__tokens_per_second": 4500.0}],
    "straggler": [{"perf__straggler_rank": 3.0, "perf__straggler_ratio": 1.35}],
    "gpu_memory": [{"memory__device_share_max": 0.99}],
    "gpu_throttled": [{"gpu__throttled_fraction_max": 0.5}],
    "lost_engine": [{"rollout__lost_engines": 1.0}],
    "gpu_ecc": [{"gpu__ecc_uncorrected_max": 1.0}],
    "disk": [{"disk__free_gib": 70.0}, {"disk__free_gib": 0.5, "checkpoint__gib": 0.0}],
    "checkpoint_age": [{"checkpoint__age_minutes": 250.0}],
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in faults]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(DEMO, ["rollout.max_response_tokens=500"])


def test_every_rule_has_a_fault() -> None:
    assert list(FAULTS) == list(BUILTIN)


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_rule_fires_within_its_window_on_a_planted_fault(config: RunConfig, name: str, fault: dict[str, Any]) -> None:
    window = BUILTIN[name].window
    records = [*healthy(ONSET), *healthy(60, ONSET + 1, **fault), *healthy(60, ONSET + 61)]
    found = fired(rules_of(config), records)
    alone = [(rule, step) for rule, step, _ in found if rule == name]
    assert len(alone) == 1, found
    assert ONSET < alone[0][1] <= ONSET + max(window.steps, window.minutes + 1)
    assert {rule for rule, _, _ in found} == {name}


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_shorter_fault_fires_nothing(config: RunConfig, name: str, fault: dict[str, Any]) -> None:
    """Half of the window is healthy: the median is. A fault that fires at once has no shorter one."""
    window = BUILTIN[name].window
    steps = (max(window.steps, round(window.minutes)) - 1) // 2
    records = [*healthy(ONSET), *healthy(steps, ONSET + 1, **fault), *healthy(60, ONSET + 1 + steps)]
    assert not fired(rules_of(config), records)


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_fires_once_per_episode(config: RunConfig, name: str) -> None:
    fault = FAULTS[name][0]
    between = 30 if name != "throughput" else 60
    records, first = healthy(ONSET), ONSET + 1
    for _ in range(2):
        records += healthy(25, first, **fault)
        records += healthy(between, first + 25)
        first += 25 + between
    steps = [step for rule, step, _ in fired(rules_of(config), records) if rule == name]
    assert len(steps) == 2, steps
    assert steps[1] - steps[0] == 25 + between


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.partition(".")[0])
def test_no_rule_fires_in_a_recorded_healthy_run(config: RunConfig, file: Path) -> None:
    records = recorded(file)
    assert len(records) > 100
    assert not fired(rules_of(load_config(DEMO)), records)


@pytest.mark.parametrize("factor", [0.01, 0.1, 2, 10, 30, 100, 1000])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.partition(".")[0])
def test_nothing_fires_at_any_pace_of_the_steps(file: Path, factor: float) -> None:
    """Throughput varies by a factor of six beside busy neighbours. With longer steps its noise fills the windows. The
    warm-up is left out: neighbours halve its median."""
    records = [{**record, "time": record["time"] * factor} for record in recorded(file) if record["phase"] == "rl"]
    assert not fired(rules_of(load_config(DEMO)), records)


def test_a_run_that_collapsed_is_warned_of() -> None:
    """The demo with 25 times its learning rate: the reward has fallen by step 5, and responses are long from 18 on."""
    assert [(rule, step) for rule, step, _ in fired(rules_of(load_config(DEMO)), recorded(COLLAPSED))] == [
        ("kl", 5),
        ("reward_collapse", 6),
        ("truncated", 19),
        ("flat_reward", 25),
    ]


def test_the_demo_was_recorded_with_three_seeds() -> None:
    """Alone, and beside seven busy processes on two cores, with the numbers of stragglers."""
    names = {file.name for file in RECORDED}
    assert {f"{kind}-seed-{seed}.jsonl.gz" for kind in ("demo", "busy") for seed in range(3)} <= names
    busy = [record for file in RECORDED if file.name.startswith("busy") for record in recorded(file)]
    assert sum("perf/straggler_rank" in record for record in busy) > 1500
    speeds = [record["perf/tokens_per_second"] for record in busy if record.get("kl") is not None]
    assert max(speeds) > 6 * min(speeds)


def test_a_collapse_of_entropy_fires_with_the_reward_and_not_alone(config: RunConfig) -> None:
    """Entropy falls to 7% in a healthy run while the reward rises."""
    alone = [*healthy(ONSET), *healthy(60, ONSET + 1, entropy=0.01, reward__mean=0.9)]
    assert not fired(rules_of(config), alone)
    both = [*healthy(ONSET), *healthy(60, ONSET + 1, entropy=0.02, reward__mean=0.4)]
    assert [rule for rule, _, _ in fired(rules_of(config), both)] == ["reward_collapse"]


@pytest.mark.parametrize("mean", [0.0, 0.01, -0.01])
def test_rewards_that_vary_around_zero_have_not_collapsed(config: RunConfig, mean: float) -> None:
    records, generator = healthy(1000), random.Random(1)
    for record in records:
        record["reward/mean"] = generator.gauss(mean, 0.02)
    assert not fired(rules_of(config), records)


def test_negative_rewards_can_collapse(config: RunConfig) -> None:
    records = [*healthy(ONSET, reward__mean=-0.2), *healthy(10, ONSET + 1, reward__mean=-0.9)]
    assert [rule for rule, _, _ in fired(rules_of(config), records)] == ["reward_collapse"]


def test_a_slow_minute_is_no_fall_of_throughput(config: RunConfig) -> None:
    """Steps of a second: ten slow ones, and five slow minutes, are not yet ten minutes."""
    records = healthy(1200)
    for number, record in enumerate(records):
        record["time"] = 1e9 + number
        if number >= 900:
            record["perf/tokens_per_second"] = 1000.0
    assert not fired(rules_of(config), records)


def test_a_fall_of_throughput_of_short_steps_fires_after_its_minutes(config: RunConfig) -> None:
    records = healthy(3000)
    for number, record in enumerate(records):
        record["time"] = 1e9 + number
        if number >= 1500:
            record["perf/tokens_per_second"] = 4000.0
    ((rule, step, _),) = fired(rules_of(config), records)
    assert rule == "throughput"
    assert 1500 + 200 < step <= 1500 + 600


def test_a_straggler_is_one_rank_all_the_time(config: RunConfig) -> None:
    """What changes from step to step is the load, not the rank."""
    records = healthy(100, perf__straggler_ratio=1.4)
    for number, record in enumerate(records):
        record["perf/straggler_rank"] = float((number // 4) % 3)
    assert not fired(rules_of(config), records)


@pytest.mark.parametrize(
    ("override", "rule", "fault"),
    [
        ("rollout.top_p=0.8", "logprob_diff", {"logprob_diff_mean": 0.15}),
        ("rollout.max_response_tokens=1", "empty_responses", {"response__length_mean": 1.0}),
    ],
)
def test_rules_without_meaning_for_a_configuration_are_off(override: str, rule: str, fault: dict[str, Any]) -> None:
    assert not [
        one for one, _, _ in fired(rules_of(load_config(DEMO, [override])), healthy(20, **fault)) if one == rule
    ]


RULE = BUILTIN["flat_reward"]
STEPS = RULE.window.steps
RISING = {"reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0, "advantage/zero_fraction": 0.9}
# All groups solved or failed, GAE on equal rewards, and dynamic sampling that finds no group.
FLAT: list[dict[str, Any]] = [
    {**RISING, "advantage/zero_fraction": 1.0},
    {**RISING, "reward/max": 0.25, "reward/min": 0.25, "advantage/zero_fraction": 0.0},
    {"sampling/dropped_groups": 640, "sampling/kept_groups": 0},
]
# Surplus groups that the next step takes, and a step of one's own with its own metrics.
UNKNOWN: list[dict[str, Any]] = [{"sampling/dropped_groups": 640, "sampling/kept_groups": 2}, {"loss": 0.0}]


def warnings(*steps: dict[str, Any], phase: str = "rl", first: int = 1) -> list[int]:
    """Steps at which a warning comes."""
    engine = Engine([RULE])
    records = [{"phase": phase, "step": n, "time": 60.0 * n, **values} for n, values in enumerate(steps, first)]
    return [record["step"] for record in records if engine.add(record)]


@pytest.mark.parametrize("step", FLAT)
def test_steps_without_advantages_are_warned_of_once(step):
    assert warnings(*[step] * (3 * STEPS)) == [STEPS]


@pytest.mark.parametrize("step", [RISING, *UNKNOWN])
def test_one_other_step_starts_the_count_again(step):
    assert warnings(*[step] * (3 * STEPS)) == []
    assert warnings(*[FLAT[0]] * (STEPS - 1), step, *[FLAT[0]] * STEPS) == [2 * STEPS]


def test_the_warm_up_and_the_first_validation_do_not_count():
    assert not warnings(*[FLAT[0]] * 100, phase="sft")
    assert warnings(*[FLAT[0]] * STEPS, first=0) == []


def test_the_terminal_names_the_page(capsys):
    detector = RULE.detector()
    alert = [detector.add({"phase": "rl", "step": n, "time": 0.0, **FLAT[0]}) for n in range(1, STEPS + 1)][-1]
    with Display(plain_seconds=60) as display:
        display.update([{"phase": "rl", "step": STEPS, "total_steps": 99, **FLAT[0]}], alerts=[{"message": alert}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: no response had an advantage in 10 steps")
    assert line.endswith("see docs/reward_does_not_rise.md")
