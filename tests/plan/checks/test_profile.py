"""Steps, ranks and tools that cannot be profiled are refused before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.observe import check_profile
from tests.helpers.plain_model import write_inputs


def check(folder: Path, *overrides: str) -> None:
    check_profile(load_config(write_inputs(folder), ["resources.ranks_per_node=4", "train.steps=50", *overrides]))


@pytest.mark.parametrize(
    "override",
    [
        "profile.steps=[1,50]",
        "profile.steps=[10,40-42]",
        "profile.steps=[10-50:10]",
        "profile.ranks=[0,2-3]",
        "profile.ranks=[all]",
        "profile.ranks=[0-3:2]",
    ],
)
def test_what_the_run_has_is_accepted(tmp_path: Path, override: str) -> None:
    check(tmp_path, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("profile.steps=[51]", "profile.steps: step 51 is after the last one, train.steps 50; use steps up to 50"),
        ("profile.steps=[40-60]", "profile.steps: step 60 is after"),
        ("profile.steps=[9-3]", "profile.steps: invalid range 9-3"),
        ("profile.steps=[41-51:2]", "profile.steps: step 51 is after"),
        ("profile.steps=[1-9:0]", "profile.steps"),
        ("profile.steps=[all]", "profile.steps"),
        ("profile.ranks=[4]", r"profile.ranks: no rank 4: the run has 4; use ranks up to 3, or \[all\]"),
        ("profile.ranks=[0-7]", "profile.ranks: no rank 7"),
        ("profile.phases=[update]", "profile.phases: no longer a key: a profile has the whole step"),
        ("profile.max_mib=1", "profile.max_mib: no longer a key: profiles stay until you delete them"),
        ("profile.tools=[py-spy]", "profile.tools.*allowed: 'torch' or 'memory' or 'nsys'"),
        ("profile.ranks=[x]", "profile.ranks"),
    ],
)
def test_anything_else_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check(tmp_path, override)
    assert "\n" not in str(error.value)
