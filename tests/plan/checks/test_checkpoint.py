"""checkpoint.keep_best names a metric that validation has, checkpoint.export_at checkpoints that the run has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.observe.evaluation import ScoredResponse, evaluation_metrics
from rlhpc.plan.checks.data import check_keep_best, validation_metrics
from rlhpc.plan.checks.run import check_config
from tests.helpers.configs import least_config
from tests.helpers.plain_model import write_inputs


def config(metric: str | None, files: list[dict[str, str]], count: int = 1) -> RunConfig:
    validation = {"samples_per_prompt": count, "temperature": 1.0}
    return least_config(data={"validation": files}, validation=validation, checkpoint={"keep_best": metric})


FILES = [{"path": "a.jsonl", "name": "aime24"}, {"path": "b.jsonl"}]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_metrics_are_those_of_a_validation(count: int) -> None:
    one = ScoredResponse(0, "aime24", "a", 1.0, 3, False, answer="4")
    found = evaluation_metrics([replace(one, prompt=prompt) for prompt in range(2) for _ in range(count)], 1.0)
    assert set(validation_metrics(config(None, FILES, count))) == found.keys()


@pytest.mark.parametrize(
    "metric",
    [
        "reward_mean",
        "validation/reward_mean",
        "pass@4",
        "maj@4",
        "by_set/aime24/mean@4",
        "by_source/openai/gsm8k/pass@1",
    ],
)
def test_a_metric_of_validation_is_accepted(metric: str) -> None:
    check_keep_best(config(metric, FILES, 4))


@pytest.mark.parametrize(
    ("metric", "files", "count", "message"),
    [
        ("reward_mean", [], 1, "there is none; name files in data.validation"),
        ("reward_maen", FILES, 1, "did you mean .*'reward_mean'"),
        ("pass@3", FILES, 4, "validation has no metric 'pass@3'"),
        ("maj@4", FILES, 1, "validation has no metric"),
        ("by_set/other/reward_mean", FILES, 1, "validation has no metric"),
        ("by_source/reward_mean", [], 1, "there is none"),
    ],
)
def test_another_one_is_refused(metric: str, files: list[dict[str, str]], count: int, message: str) -> None:
    with pytest.raises(UserError, match=rf"checkpoint\.keep_best: .*{message}"):
        check_keep_best(config(metric, files, count))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["export=hf", "export_at=best"],
            r"export_at: 'best', but no .* set checkpoint\.keep_best, or choose last or all",
        ),
        (["export_at=all"], r"export_at: 'all', but checkpoint\.export is none; set checkpoint\.export to hf"),
        (["export=safetensors"], "export: 'safetensors' is not allowed; allowed: 'none' or 'hf'"),
        (["export=hf", "export_at=first"], "export_at: .*allowed: 'last' or 'best' or 'all'"),
    ],
)
def test_an_export_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = write_inputs(tmp_path)
    with pytest.raises(UserError, match=rf"checkpoint\.{message}"):
        check_config(load_config(file, [f"checkpoint.{override}" for override in overrides]))


@pytest.mark.parametrize("overrides", [["export=hf"], ["export=hf", "export_at=all"], ["export=none"]])
def test_an_export_that_can_be_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    check_config(load_config(write_inputs(tmp_path), [f"checkpoint.{override}" for override in overrides]))
