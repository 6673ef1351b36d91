"""What becomes of a run whose weights do not get to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def test_a_rank_that_dies_in_a_weight_sync_ends_the_run_with_its_name(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        resources__ranks_per_node=2,
        actor__parallel={"tp": 2},
        sft=None,
        validation__every=100,
        algorithm__name="tests.trainer.dying:ALGORITHM",
    )
    code, output = run(config)
    assert code == 1
    assert records(tmp_path / "run"), "of the validation after the first weight sync"
    message = next(line for line in output.splitlines() if line.startswith("rlhpc: rank"))
    assert message.startswith("rlhpc: rank 1 on")
    assert "was killed" in message


def test_log_probs_too_far_apart_end_the_run_in_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, reshard__max_logprob_diff=1e-12)
    code, output = run(config)
    assert code == 2
    line = next(line for line in output.splitlines() if "max_logprob_diff" in line)
    assert "in step 1 the engine's log-probs differ from the trainer's by" in line
    assert "raise the limit of 1e-12" in line
    assert "Traceback" not in output
