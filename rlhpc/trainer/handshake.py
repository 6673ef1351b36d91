"""Posts of the trainers' first rank to engines before RL and at the end, with ``placement: separate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from rlhpc.config.schema import RunConfig
from rlhpc.core.context import Reason
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.rank import RankInfo
from rlhpc.core.store_client import BEGIN, TrainersStart
from rlhpc.parallel.agreement import facts_of
from rlhpc.parallel.board import Board
from rlhpc.parallel.groups import follow, present_trainers
from rlhpc.rollout.generator.parts import SHARE_SECONDS, EnginePlace
from rlhpc.sharding.placement import Placement

_END = "end"  # key on the board

Check = Callable[[], object]


def agreed_facts(config: RunConfig, attempt: AttemptFolder) -> dict[str, str]:
    """Facts that all ranks of the job agree on when they have joined it."""
    return facts_of([attempt.config, config.model.path / "config.json"])


def follow_trainers(config: RunConfig, info: RankInfo, placement: Placement) -> RankInfo:
    """Makes this rank one of the trainers' present start; returns it with its generation as those trainers count it:
    their own ranks have begun for the first time. Collective over the ranks of its world."""
    if not config.may_lose_engines:
        return info
    if info.role != "engines":
        follow(TrainersStart(info.generation))
        return replace(info, generation=0)
    found = [present_trainers() if info.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    start = found[0]
    assert start is not None
    follow(start)
    return replace(info, generation=start.generation_of(placement.engine_of(info.job_rank), info.generation))


def post_begin(board: Board, *, generates: bool) -> None:
    """Announces RL. Without ``generates`` the attempt ends before."""
    board.post(BEGIN, {"generates": generates})


def wait_for_begin(place: EnginePlace, board: Board, check: Check) -> bool:
    """Waits until RL begins; whether engines generate. See ``wait_together``."""
    return bool(wait_together(place, board, BEGIN, "waiting for RL", check)["generates"])


def post_end(board: Board, reason: Reason | None) -> None:
    """Announces that the trainers have all that they need of the engines. ``reason``: why the run stops early."""
    board.post(_END, {"reason": reason})


def wait_for_end(place: EnginePlace, board: Board, check: Check) -> Reason | None:
    """Waits until the trainers end; returns why they stop early. See ``wait_together``."""
    reason: Reason | None = wait_together(place, board, _END, "waiting for the trainers", check)["reason"]
    return reason


def wait_together(place: EnginePlace, board: Board, key: str, phase: str, check: Check) -> Any:
    """The trainers' post, on all ranks of an engine, for which its first one waits: without end, as the launcher
    ends engines whose trainers do not come back. ``check``: raises PeerLost if they are lost; see
    ``EnginePlace.agreed``."""
    while True:
        found = place.agreed(lambda: board.find(key, SHARE_SECONDS, phase, check))
        if found is not None:
            return found
