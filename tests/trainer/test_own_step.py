"""A step of the user's own, by ``train.step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from tests.docs.pages import DOCS
from tests.helpers.runs import complete, records, write_config

NOT_A_FUNCTION = 3


def nothing(run: Any, state: Any) -> None:
    """Forgets to return."""


def odd(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 for about half of all responses."""
    return float(sum(map(ord, solution_str)) % 2)


@pytest.mark.heavy
def test_what_is_no_step_is_refused() -> None:
    from rlhpc.config.schema import RunConfig
    from rlhpc.trainer.step import find_step, rl_step

    def config(step: str | None) -> RunConfig:
        return RunConfig.model_validate({"name": "x", "model": {"path": "m"}, "train": {"steps": 1, "step": step}})

    assert find_step(config(None)) is rl_step
    with pytest.raises(UserError, match=r"^train.step: .*NOT_A_FUNCTION is of type int; name a function"):
        find_step(config("tests.trainer.test_own_step:NOT_A_FUNCTION"))
    step, unused = find_step(config("tests.trainer.test_own_step:nothing")), Any
    with pytest.raises(UserError, match=r"^train.step: .*nothing returned a value of type NoneType; return \(metrics"):
        step(unused, unused)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_pages_step_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(DOCS / "examples"))
    config = write_config(
        tmp_path,
        resources__ranks_per_node=2,
        sft=None,
        algorithm={"kl": {"coefficient": 0.0}},
        data__validation=[],
        train={"steps": 2, "prompts_per_step": 16, "minibatches": 2, "step": "my_step:step"},
        rewards__0__function="tests.trainer.test_own_step:odd",
    )
    complete(config)
    steps = records(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["correct"] == round(step["reward/mean"] * 64)
        assert 0 < step["correct"] < 64
        assert step["loss"] > 0
        assert step["grad_norm"] > 0
        assert step["skipped_updates"] == 0
    assert steps[1]["loss"] != steps[0]["loss"]
