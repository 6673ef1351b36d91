"""A rank with another version or another config is named at the start, on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.agreement import UNKNOWN, check_agreement, check_job_agreement, disagreement, facts_of
from tests.helpers.distributed import run_ranks


def test_the_rank_that_differs_is_named_with_node_and_both_values() -> None:
    everyone = [("a", {"torch": "2.13"}), ("a", {"torch": "2.13"}), ("b", {"torch": "2.11"})]
    assert disagreement(everyone) == "rank 2 on b has torch 2.11, the others have 2.13"
    assert disagreement(everyone[:2]) is None


def test_many_ranks_are_counted() -> None:
    everyone = [("a", {"x": "1"})] * 8 + [("b", {"x": "2"})] * 6
    assert disagreement(everyone) == "rank 8 on b, 9 on b, 10 on b, 11 on b and 2 more has x 2, the others have 1"


def test_a_rank_that_cannot_tell_agrees_with_all() -> None:
    everyone = [("a", {"prompts": "1"}), ("b", {"prompts": UNKNOWN}), ("c", {"prompts": "2"}), ("c", {"prompts": "2"})]
    assert disagreement(everyone) == "rank 0 on a has prompts 1, the others have 2"
    assert disagreement(everyone[1:]) is None


@pytest.mark.ranks
def test_ranks_that_read_different_configs_all_stop(tmp_path: Path) -> None:
    for name, text in (("same", "a"), ("other", "b")):
        (tmp_path / name).write_text(text)
    for agreed, message in run_ranks(_ask, 3, tmp_path):
        assert agreed is None
        assert "rank 1 on " in message
        assert "config.yaml" in message


def _ask(folder: Path) -> tuple[str | None, str | None]:
    info = RankInfo.from_environ()
    messages = []
    for odd in ("same", "other"):
        facts = facts_of([folder / (odd if info.rank == 1 else "same")])
        named = {(name if not name.startswith("/") else "config.yaml"): value for name, value in facts.items()}
        try:
            check_agreement(info, named)
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages[0], messages[1]


@pytest.mark.ranks
def test_roles_that_read_different_configs_all_stop() -> None:
    """The odd rank is named by its number in the job, on the ranks of both roles."""
    for rank, (first, second, third, own) in enumerate(run_ranks(_ask_in_a_role, 4, roles=(2, 2))):
        assert first is None
        assert second is not None
        assert "rank 3 on " in second
        assert "has config.yaml b, the others have a" in second
        assert third is None
        assert own is None if rank < 2 else "rank 3 on " in str(own)


@pytest.mark.ranks
def test_an_engine_that_joins_later_compares_itself_with_those_that_began() -> None:
    """Nobody waits for it, or for others that are not there yet."""
    for rank, (same, other) in enumerate(run_ranks(_ask_before_some_join, 3, roles=(2, 1))):
        assert same is None
        assert other is None if rank < 2 else "rank 2 on " in str(other)


def _ask_before_some_join() -> tuple[str | None, str | None]:
    """The two ranks of the first role begin; the third of four joins."""
    info = replace(RankInfo.from_environ(), job_size=4)
    messages: list[str | None] = []
    for own in "ab":
        try:
            check_job_agreement(info, {"config.yaml": own if info.job_rank == 2 else "a"}, range(2))
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages[0], messages[1]


def _ask_in_a_role() -> list[str | None]:
    info = RankInfo.from_environ()
    messages: list[str | None] = []
    checks = (check_job_agreement, check_job_agreement, check_job_agreement, check_agreement)
    for check, odd in zip(checks, "abab", strict=True):
        try:
            check(info, {"config.yaml": odd if info.job_rank == 3 else "a"})
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages
