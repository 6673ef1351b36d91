"""``rlhpc profile``: a request for coming steps, and runs that cannot be asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import locked
from tests.cli.test_light import HEAVY, modules_after
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run on this machine whose first attempt has begun, and has no config.yaml yet."""
    folder = RunFolder(tmp_path / "run").create()
    save_config(folder, load_config(write_inputs(tmp_path)))
    attempts.begin(folder, job_id="", restart_count=0, nodes=("a",), world_size=4, saved_step=-1)
    with locked(folder):
        yield folder


def command(*words: object) -> Result:
    return invoke("profile", *words)


def test_the_next_step_is_asked_for(run: RunFolder) -> None:
    asked = command(run.path)
    assert asked.output == f"run: asked for profiles of the next step, in {run.profiles}\n"
    assert read_json(run.profile_request) == {"steps": 1}


def test_a_new_request_replaces_one_that_was_not_read(run: RunFolder) -> None:
    command(run.path)
    assert "profiles of the next 3 steps" in command(run.path, "--steps", "3").output
    assert read_json(run.profile_request) == {"steps": 3}


@pytest.mark.parametrize("steps", ["0", "-1", "next", "1001"])
def test_other_numbers_are_refused(run: RunFolder, steps: str) -> None:
    refused = command(run.path, "--steps", steps)
    assert (refused.exit_code, "Invalid value for '--steps'" in refused.output) == (2, True)
    assert not run.profile_request.exists()


def test_a_run_that_is_over_is_refused(run: RunFolder) -> None:
    attempts.end(run.attempt(1), Verdict(0.0, "finished", "", "none"))
    error = command(run.path).exception
    assert isinstance(error, UserError)
    assert str(error) == "run: the run is over; set profile.steps, and resume it"
    assert not run.profiles.exists()


def test_the_command_needs_no_torch(run: RunFolder) -> None:
    assert not modules_after("profile", str(run.path)) & {*HEAVY, "numpy", "submitit"}
