"""The trained distribution is the one that tokens were drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import complete, records, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

CUT = {"rollout__top_p": 0.8, "rollout__sampling": {"top_k": 6, "min_p": 0.05, "bad_words": ["7"]}}


@pytest.mark.long
def test_truncated_responses_are_trained_as_they_were_drawn(tmp_path: Path) -> None:
    """Two updates a step, so that log-probs of before the first one are computed too; a reference as well."""
    config = write_config(
        tmp_path, **CUT, train__steps=2, train__minibatches=2, algorithm__kl={"coefficient": 0.01}, data__validation=[]
    )
    complete(config)
    steps = [record for record in records(tmp_path / "run") if record["phase"] == "rl"]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["logprob_diff_max"] < 1e-4
        assert abs(step["mismatch_k1"]) < 1e-5
        assert step["grad_norm"] > 0
    complete(config, "rollout.sampling.top_k=null", f"run_dir={tmp_path / 'other'}", "train.steps=1")
    (step,) = (record for record in records(tmp_path / "other") if record["phase"] == "rl")
    assert step["mismatch_k1"] > 0.01
    logs = "".join(log.read_text() for log in (tmp_path / "other").glob("attempts/*/logs/*.out"))
    assert f"the engine's log-probs were {step['mismatch_k1']:.3g} nats a token above the trained ones" in logs
