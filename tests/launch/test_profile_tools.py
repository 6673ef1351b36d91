"""Tools of the section profile that a machine lacks: an error where ranks start, a warning where they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch.machine import check_profile_tools, profile_warnings
from tests.helpers.commands import invoke
from tests.helpers.machine import have_gpus
from tests.helpers.plain_model import write_inputs


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU and nsys."""
    have_gpus(monkeypatch, tmp_path, 0)
    monkeypatch.setenv(env.PATH, str(tmp_path))


def test_a_run_here_is_refused_with_all_that_is_missing(tmp_path: Path) -> None:
    config = load_config(write_inputs(tmp_path), ["profile.tools=[torch,memory,nsys]"])
    with pytest.raises(UserError) as error:
        check_profile_tools(config)
    assert str(error.value) == (
        "profile.tools: there is no GPU for memory, nsys; nsys is not installed here; "
        "install what is missing, or name other tools"
    )


def test_the_defaults_need_nothing(tmp_path: Path) -> None:
    config = load_config(write_inputs(tmp_path))
    check_profile_tools(config)
    assert profile_warnings(config) == []


def test_a_check_warns_of_what_is_not_installed_here(tmp_path: Path) -> None:
    override = "profile.tools=[nsys]"
    checked = invoke("run", str(write_inputs(tmp_path)), "--check", override)
    assert "warning profile.tools: nsys is not installed here\n" in checked.output
    config = load_config(write_inputs(tmp_path), ["profile.tools=[memory]", "slurm.gpus_per_node=0"])
    assert profile_warnings(config) == ["profile.tools: there is no GPU for memory"]
