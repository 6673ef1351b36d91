"""The helper itself: results by rank, and the traceback of the first failure."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.ranks


def sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the planted fault")
    dist.all_reduce(torch.ones(1))


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


def wait_forever() -> None:
    time.sleep(60)


def surroundings() -> tuple[int, str | None, str, int]:
    return hash("ranks"), os.environ.get("PLANTED"), os.getcwd(), os.getsid(0)


def test_ranks_hash_differently_and_have_the_caller_s_surroundings(tmp_path, monkeypatch):
    """Sets differ in order between ranks, as in a job; forked ranks have the caller's current environment."""
    monkeypatch.setenv("PLANTED", "seen")
    monkeypatch.chdir(tmp_path)
    found = run_ranks(surroundings, 2, join=False)
    assert len({hashed for hashed, *_ in found}) == 2
    assert len({session for *_, session in found}) == 2
    assert [rank[1:3] for rank in found] == [("seen", str(tmp_path))] * 2
    monkeypatch.delenv("PLANTED")
    assert run_ranks(surroundings, 1, join=False)[0][1] is None


def test_results_come_back_by_rank():
    assert run_ranks(sum_of_ranks, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_the_first_rank_to_fail_is_shown():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed first(.|\n)*the planted fault"):
        run_ranks(fail_on_rank_one, 2)


def test_a_killed_rank_is_shown_before_its_victims():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed first, exit -9"):
        run_ranks(die_on_rank_one, 2)


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankFailed, match="still ran after 2 s"):
        run_ranks(wait_forever, 1, join=False, timeout=2)
