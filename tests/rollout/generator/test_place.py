"""The ranks of an engine learn together that the trainers are lost, whichever of them has met it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from rlhpc.core.errors import PeerLost, ReshardError
from rlhpc.rollout.generator.parts import EnginePlace
from tests.helpers.distributed import run_ranks


def lost() -> None:
    """As a thread's loss of a rank reaches the main one."""
    try:
        raise PeerLost("rank 0 is gone")
    except PeerLost as error:
        raise ReshardError("receiving weights: rank 0 is gone") from error


@pytest.mark.ranks
def test_all_ranks_of_an_engine_raise_what_one_has_met() -> None:
    for rank, (found, first, agreed, other) in enumerate(run_ranks(_meet, 3)):
        assert found == 7
        assert first == "TrainersLost: receiving weights: rank 0 is gone"
        assert agreed == "TrainersLost: rank 0 is gone"
        assert other == ("ReshardError: receiving weights: rank 0 is gone" if rank == 1 else "")


def _meet() -> tuple[object, str, str, str]:
    rank, group = dist.get_rank(), dist.new_group(range(3), backend="gloo")
    place = EnginePlace(0, 1, leads=rank == 0, group=group, outlives=True)

    def refuse() -> int:
        raise PeerLost("rank 0 is gone")

    bound = EnginePlace(0, 1, leads=rank == 0, group=group)
    return (
        place.agreed(lambda: 7),
        said(lambda: place.together(lost if rank == 1 else lambda: None)),
        said(lambda: place.agreed(refuse)),
        said(lambda: bound.together(lost if rank == 1 else lambda: None)),
    )


def said(action: Callable[[], object]) -> str:
    """The error that an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_another_error_is_no_loss_of_the_trainers() -> None:
    place = EnginePlace(0, 1, leads=True, outlives=True)
    with pytest.raises(BrokenPipeError):
        place.agreed(lambda: (_ for _ in ()).throw(BrokenPipeError("a reward worker ended")))
