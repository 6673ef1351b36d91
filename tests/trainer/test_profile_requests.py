"""Requests for profiles on two ranks: they take effect on both in the same step, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.api import RunState
from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.profiles import EVERY, ProfileRequest, Range, Selection, read_answer, write_request
from rlhpc.core.rank import RankInfo
from rlhpc.observe.profiles.index import read_profiles
from rlhpc.trainer.profiles import Profiles
from rlhpc.trainer.stop import Stopper
from tests.helpers.distributed import run_ranks
from tests.helpers.plain_model import write_inputs
from tests.helpers.profiles import Profiled

pytestmark = pytest.mark.ranks
STEPS = 12


def follow(config: Path, folder: Path, requests: dict[int, ProfileRequest], first: int = 1) -> list[Any]:
    """On a rank: steps from ``first`` to the last, with requests written while a step runs; the answers after each."""
    run, info = RunFolder(folder), RankInfo.from_environ()
    attempt = run.attempt(1)
    context = RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))
    loaded = load_config(config, ["resources.ranks_per_node=2", f"train.steps={STEPS}"])
    state = RunState(prompts_digest="", actor_steps=0, critic_steps=0)
    state.step = first - 1
    profiles = Profiles(loaded, context, Profiled({}), state)
    stopper, answers = Stopper(context, profiles), []
    for step in range(first, STEPS + 1):
        profiles.begin("rl", step)
        if step in requests and info.rank == 0:
            run.profiles.mkdir(exist_ok=True, parents=True)
            write_request(run, requests[step])
        profiles.end()
        profiles.write()
        stopper.agree()
        answers.append(read_answer(run))
    return answers


def profiled(folder: Path) -> list[tuple[int, int]]:
    return [(one.step, one.rank) for one in read_profiles(RunFolder(folder))]


def test_requests_take_effect_on_all_ranks_or_are_refused(tmp_path: Path) -> None:
    config = write_inputs(tmp_path)
    requests = {
        1: ProfileRequest("a", Selection(1, 2, (EVERY,)), relative=True),
        4: ProfileRequest("b", Selection(6, 6, (Range(1, 1),))),
        6: ProfileRequest("c", Selection(6, 9, (EVERY,))),
        7: ProfileRequest("d", Selection(1, 1, tools=("torch", "memory")), relative=True),
        8: ProfileRequest("e", Selection(1, 9, (EVERY,)), relative=True),
    }
    answers, _ = run_ranks(follow, 2, config, tmp_path / "run", requests)
    assert profiled(tmp_path / "run") == [(2, 0), (2, 1), (3, 0), (3, 1), (6, 1)]
    refused = {answer.id: answer.refused for answer in answers if answer is not None}
    assert refused == {
        "a": "",
        "b": "",
        "c": "step 6 has passed; ask for step 7 or later",
        "d": "tools that need CUDA: memory; this run is on CPUs, use torch or py-spy",
        "e": f"step 17 is after the last one, {STEPS}",
    }
    assert answers[0].selection == Selection(2, 3, (EVERY,))


def test_what_was_promised_is_kept_after_a_restart(tmp_path: Path) -> None:
    config = write_inputs(tmp_path)
    requests = {10: ProfileRequest("a", Selection(12, 12, (EVERY,)))}
    run_ranks(follow, 2, config, tmp_path / "run", requests, 10)
    for file in tmp_path.glob("run/profiles/step-*/*"):
        file.unlink()
    run_ranks(follow, 2, config, tmp_path / "run", {}, 9)
    assert profiled(tmp_path / "run") == [(12, 0), (12, 1)]
