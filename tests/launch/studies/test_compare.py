"""``rlhpc study compare`` on runs whose numbers are known: results, refusals, and rates of errors."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.paired import Paired, holm, paired, power, seeds_needed
from rlhpc.launch.studies.sides import find_side, missing
from tests.docs.fields import SECTIONS, differences
from tests.helpers.commands import invoke
from tests.helpers.runs import ROOT

DEMO = ROOT / "configs" / "demo.yaml"


def finished_run(folder: Path, seed: int, values: list[float], *overrides: str, cause: str = "finished") -> None:
    """A run folder whose steps have these values of reward/mean."""
    run = RunFolder(folder).create()
    save_config(run, load_config(DEMO, [f"seed={seed}", f"run_dir={folder}", *overrides]))
    attempt = attempts.begin(run, job_id="", restart_count=0, nodes=("n",), world_size=1, saved_step=-1)
    steps = [{"phase": "rl", "step": step, "time": 0.0, "reward/mean": value} for step, value in enumerate(values, 1)]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    attempts.end(attempt, Verdict(time.time(), cause, "", "none"))  # type: ignore[arg-type]


def side(folder: Path, ends: list[float], *overrides: str) -> str:
    """A folder with a run for each seed from 0 on, whose last values are these."""
    for seed, end in enumerate(ends):
        finished_run(folder / f"seed-{seed}", seed, [0.0, end - 0.1, end + 0.1], *overrides)
    return str(folder)


def compared(*words: str) -> str:
    done = invoke("study", "compare", *words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_difference_larger_than_seeds_make_is_decided(tmp_path: Path) -> None:
    first = side(tmp_path / "low", [0.20, 0.26, 0.23, 0.21])
    second = side(tmp_path / "high", [0.30, 0.37, 0.32, 0.33], "actor.optimizer.learning_rate=0.01")
    words = (first, second, "--metric=reward/mean", "--last=2")
    text, found = compared(*words), json.loads(compared(*words, "--json"))
    assert "metric    reward/mean, mean of its last 2; higher is better" in text
    assert "pair      high - low: high is better" in text
    (pair,) = found["pairs"]
    assert pair["difference"] == pytest.approx(0.105)
    assert pair["p"] < 0.01
    assert pair["interval"][0] > 0
    assert [row["value"] for row in found["runs"] if row["side"] == "low"] == pytest.approx([0.20, 0.26, 0.23, 0.21])
    assert "actor.optimizer.learning_rate" in text
    assert [row["key"] for row in found["differences"]] == ["actor.optimizer.learning_rate"]
    assert "low is better" in compared(*words, "--goal=minimize")
    assert not differences(SECTIONS["`rlhpc study compare`"], found)


def test_noise_is_not_decided_and_says_how_many_seeds_would_decide(tmp_path: Path) -> None:
    chance = random.Random(0)
    ends = [[chance.gauss(0.3, 0.05) for _ in range(5)] for _ in range(2)]
    text = compared(side(tmp_path / "a", ends[0]), side(tmp_path / "b", ends[1]), "--metric=reward/mean")
    assert "pair      b - a: not decided" in text
    assert re.search(r"is decided with \d+ seeds in four of five cases", text) or "not decided by 1,000 seeds" in text
    assert "the configurations do not differ" in text


def test_sides_with_other_prompts_are_said_to_have_them(tmp_path: Path) -> None:
    first, second = side(tmp_path / "a", [0.1] * 3), side(tmp_path / "b", [0.1] * 3, "train.prompts_per_step=8")
    text = compared(first, second, "--metric=reward/mean")
    assert "train.prompts_per_step: runs of one seed do not see the same prompts in the same order" in text


def test_with_two_pairs_it_says_nothing_else(tmp_path: Path) -> None:
    first, second = side(tmp_path / "a", [0.1, 0.1]), side(tmp_path / "b", [0.9, 0.9, 0.9])
    text = compared(first, second, "--metric=reward/mean")
    assert "pair      b - a: not decided (2 pair(s) of seeds; at least 3 are needed)" in text
    assert "interval" not in text
    assert "x the spread" not in text


def test_runs_that_have_not_finished_do_not_count(tmp_path: Path) -> None:
    first, second = side(tmp_path / "a", [0.1] * 3), side(tmp_path / "b", [0.2] * 3)
    finished_run(tmp_path / "b" / "more", 9, [0.0, 1.0], cause="time_limit")
    text = compared(first, second, "--metric=reward/mean")
    assert "b: the run(s) with seed 9 have not finished, and do not count" in text


def test_three_sides_are_compared_in_pairs_and_corrected(tmp_path: Path) -> None:
    ends = {"a": [0.10, 0.13, 0.11], "b": [0.15, 0.17, 0.16], "c": [0.11, 0.13, 0.12]}
    sides = [side(tmp_path / name, values) for name, values in ends.items()]
    alone = json.loads(compared(*sides[:2], "--metric=reward/mean", "--json"))["pairs"][0]["p"]
    found = json.loads(compared(*sides, "--metric=reward/mean", "--json"))["pairs"]
    assert [(pair["first"], pair["second"]) for pair in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found[0]["p"] > alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "study compare: needs two sides"),
        (["a", "nowhere"], "nowhere: is neither a configuration nor a folder with runs"),
        (["a", "a"], "study compare: 'a' names two sides; give each its own name"),
        (["a", "b", "--metric=reward/meen"], "has no RL step with reward/meen; did you mean 'reward/mean'?"),
        (["a", "b", "--metric=reward/mean", "--last=4"], "--last: 4, but "),
        (["a", "b", "--last=2", "--best"], "--best: contradicts --last"),
        (["a", "b", "--local"], "--local: applies to runs that are missing; add --seeds"),
        (["a", "b", "--seeds=5"], "--seeds: 5, but a has no runs with the seeds 3, 4, and no configuration"),
        (["a", "twice"], "0 is that of "),
    ],
)
@pytest.mark.heavy
def test_bad_input_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    side(tmp_path / "a", [0.1] * 3)
    side(tmp_path / "b", [0.1] * 3)
    for number in range(2):
        finished_run(tmp_path / "twice" / f"run-{number}", 0, [0.1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        invoke("study", "compare", *words, catch_exceptions=False)


def test_without_scipy_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [side(tmp_path / name, [0.1] * 3) for name in "ab"]
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    with pytest.raises(UserError, match=re.escape("study compare: needs scipy; pip install 'rlhpc[study]'")):
        invoke("study", "compare", *sides, "--metric=reward/mean", catch_exceptions=False)


def test_the_runs_of_a_configuration_are_beside_its_folder_and_those_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        text = DEMO.read_text().replace("name: demo", f"name: {name}")
        (tmp_path / f"{name}.yaml").write_text(text)
        finished_run(tmp_path / "runs" / f"{name}-seed-1", 1, [0.5])
    sides = [find_side(f"{name}.yaml") for name in "ab"]
    assert [[*one.runs] for one in sides] == [[1], [1]]
    absent = missing(sides, 3)
    assert [[(run.seed, str(run.folder)) for run in runs] for runs in absent] == [
        [(0, f"runs/{name}-seed-0"), (2, f"runs/{name}-seed-2")] for name in "ab"
    ]
    text = compared("a.yaml", "b.yaml", "--seeds=3", "--dry-run")
    assert text.splitlines()[0].startswith("missing  a-seed-0")
    assert "compare again when they have finished" in text


def test_curves_are_drawn_with_bands(tmp_path: Path) -> None:
    first, second = side(tmp_path / "a", [0.1, 0.2, 0.3]), side(tmp_path / "b", [0.2, 0.3, 0.1])
    compared(first, second, "--metric=reward/mean", f"--plot={tmp_path / 'curves.png'}")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_imports_neither_torch_nor_scipy_before_it_compares() -> None:
    import subprocess

    program = "import sys, rlhpc.cli.study; sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


LEVEL, COMPARISONS = 0.05, 2000
STEPS, LAST, RHO = 120, 20, 0.95


def numbers(count: int, chance: np.random.Generator) -> np.ndarray:
    """One number for each of ``count`` runs: the mean of the last steps of a curve whose values are correlated."""
    values = chance.normal(size=count) / math.sqrt(1 - RHO**2)
    kept = np.zeros(count)
    for step in range(STEPS):
        values = RHO * values + chance.normal(size=count)
        if step >= STEPS - LAST:
            kept += values / LAST
    return kept


@pytest.fixture(scope="module")
def spread() -> float:
    """From seed to seed."""
    return float(numbers(200_000, np.random.default_rng(7)).std())


def found_share(pairs: int, difference: float) -> float:
    """The share of comparisons that find a difference, which is there or not."""
    chance = np.random.default_rng(1000 * pairs + round(10 * difference))
    first, second = (numbers(COMPARISONS * pairs, chance).reshape(COMPARISONS, pairs) for _ in range(2))
    tests = [paired(list(a), list(b + difference)) for a, b in zip(first, second, strict=True)]
    return sum(test.p is not None and test.p <= LEVEL for test in tests) / COMPARISONS


@pytest.mark.heavy
@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_equal_configurations_are_rarely_said_to_differ(pairs: int) -> None:
    assert found_share(pairs, 0.0) <= 0.065


@pytest.mark.parametrize("spreads", [1, 2])
@pytest.mark.parametrize("pairs", [3, 5, 8])
@pytest.mark.heavy
def test_differences_are_found_as_often_as_predicted(pairs: int, spreads: int, spread: float) -> None:
    predicted = power(spreads / math.sqrt(2), pairs, LEVEL)
    assert found_share(pairs, spreads * spread) == pytest.approx(predicted, abs=0.05)


def test_the_test_is_that_of_scipy_and_its_interval_agrees() -> None:
    chance = random.Random(3)
    for pairs in (3, 4, 9):
        first, second = ([chance.gauss(0, 1) for _ in range(pairs)] for _ in range(2))
        found, known = paired(first, second), stats.ttest_rel(second, first)
        assert found.p == pytest.approx(known.pvalue)
        assert found.interval(0.05) == pytest.approx(tuple(known.confidence_interval(0.95)))
        low, high = found.interval(found.p or 1.0)  # the interval of the level that just decides ends at 0
        assert min(abs(low), abs(high)) == pytest.approx(0.0, abs=1e-9)


def test_as_many_seeds_as_needed_find_it_in_four_of_five_cases() -> None:
    found = Paired(5, 1.0, 1.4, 1.0, 0.2)
    seeds = seeds_needed(found, LEVEL)
    assert seeds is not None
    assert power(1.0 / 1.4, seeds, LEVEL) >= 0.8 > power(1.0 / 1.4, seeds - 1, LEVEL)
    assert seeds_needed(Paired(5, 0.01, 1.0, 1.0, 0.9), LEVEL) is None
    assert seeds_needed(Paired(5, 0.0, 1.0, 1.0, 1.0), LEVEL) is None


@pytest.mark.parametrize("pairs", [1, 2])
def test_with_fewer_than_three_pairs_there_is_no_p_value(pairs: int) -> None:
    assert paired([0.0] * pairs, [5.0, 5.1][:pairs]).p is None


def test_pairs_that_all_differ_by_the_same_decide() -> None:
    found = paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert (found.p, found.interval(0.05)) == (0.0, (0.5, 0.5))
    assert paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).p == 1.0


def test_several_comparisons_are_corrected() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
