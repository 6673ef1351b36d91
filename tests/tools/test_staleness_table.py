"""The table of accuracy by staleness shows the stored results of runs that can start."""

from __future__ import annotations

import pytest

from rlhpc.config.schema import RunConfig
from tools.staleness_table import NAMES, UNCORRECTED, config_of, table


def test_a_row_for_each_staleness_and_a_column_for_each_seed() -> None:
    result = {"after_warm_up": 0.25, "after_grpo": 0.9, "staleness_max": 4.0, "staleness_mean": 3.5}
    kept = {"4": {"0": {**result, "after_grpo": 1.0}}, UNCORRECTED: {"0": result, "10": result}}
    assert table(kept).splitlines()[-2:] == [
        "| 4 | yes | 25.0% → 100.0% | not run | 3.50 | 4 |",
        "| 4 | no | 25.0% → 90.0% (missed) | 25.0% → 90.0% (missed) | 3.50 | 4 |",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_run_has_its_staleness_and_weights(name: str) -> None:
    config = RunConfig.model_validate(config_of(name))
    assert f"{config.asynchrony.max_staleness}" == name.removesuffix("-uncorrected")
    assert (config.algorithm.rollout_correction.method == "none") == (name == UNCORRECTED)
