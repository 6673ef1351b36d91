"""Requests for profiles on two ranks: they take effect on both in the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.trainer.profiles import Profiles
from rlhpc.trainer.stop import Stopper
from tests.helpers.distributed import run_ranks
from tests.helpers.plain_model import write_inputs

pytestmark = pytest.mark.ranks
STEPS = 12


def follow(config: Path, folder: Path, requests: dict[int, object], overrides: list[str]) -> set[int]:
    """On a rank: all steps, with requests written while a step runs; returns those after which a request is left."""
    run, info = RunFolder(folder), RankInfo.from_environ()
    attempt = run.attempt(1)
    context = RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))
    loaded = load_config(config, ["resources.ranks_per_node=2", f"train.steps={STEPS}", *overrides])
    profiles = Profiles(loaded, context, lambda: None)
    stopper, left = Stopper(context, profiles), set()
    for phase, step in [("sft", STEPS + 1), *(("rl", step) for step in range(1, STEPS + 1))]:
        profiles.begin(phase, step)
        if phase == "rl" and step in requests and info.rank == 0:
            run.profiles.mkdir(exist_ok=True, parents=True)
            write_json(run.profile_request, requests[step])
        profiles.end()
        profiles.write()
        stopper.agree()
        if run.profile_request.exists():
            left.add(step)
    return left


def profiled(folder: Path) -> list[tuple[int, int]]:
    """Steps and ranks."""
    files = (folder / "profiles").glob("step-*/*.gz")
    return sorted((int(file.parent.name.removeprefix("step-")), int(file.name[5:10])) for file in files)


def test_coming_steps_are_profiled_on_the_ranks_of_the_section(tmp_path: Path) -> None:
    config, section = write_inputs(tmp_path), ["profile.ranks=[all]", f"profile.steps=[1,{STEPS + 1}]"]
    requests = {3: {"steps": 2}, 6: {"steps": 3}, 7: {"steps": 1}}
    assert run_ranks(follow, 2, config, tmp_path / "run", requests, section) == [set(), set()]
    assert profiled(tmp_path / "run") == [(step, rank) for step in (1, 4, 5, 7, 8, 9) for rank in (0, 1)]


def test_a_request_is_for_the_chosen_ranks_alone(tmp_path: Path) -> None:
    run_ranks(follow, 2, write_inputs(tmp_path), tmp_path / "run", {3: {"steps": 1}}, ["profile.ranks=[1]"])
    assert profiled(tmp_path / "run") == [(4, 1)]


@pytest.mark.parametrize("request_", [[], {"steps": "many"}, {"steps": -1}], ids=str)
def test_a_file_of_another_shape_is_taken_away(tmp_path: Path, request_: object) -> None:
    config = write_inputs(tmp_path)
    assert run_ranks(follow, 2, config, tmp_path / "run", {3: request_, 5: {"steps": 1}}, []) == [set(), set()]
    assert profiled(tmp_path / "run") == [(6, 0)]
