"""The cut over context-parallel ranks: nothing lost, nothing twice, the same work for each, and the ways back."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from rlhpc.sharding.context_split import ContextSplit, split_context

LENGTHS = {
    "uneven": (11, 3, 40, 7, 7, 22, 64, 5),
    "one token each": (1, 1, 1),
    "shorter than the chunks": (5, 2, 3),
    "one": (64,),
}
CASES = [pytest.param(lengths, id=name) for name, lengths in LENGTHS.items()]


def gathered(split: ContextSplit) -> np.ndarray:
    """Packed index of every rank's tokens, rank after rank, -1 where they only fill up."""
    return np.concatenate([split.part(rank).packed for rank in range(split.cp)])


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


@pytest.mark.parametrize("align", [1, 2, 3, 8])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", CASES)
def test_every_token_is_on_one_rank(lengths: tuple[int, ...], cp: int, align: int) -> None:
    held = gathered(split_context(lengths, cp, align))
    assert sorted(held[held >= 0]) == list(range(sum(lengths)))


@pytest.mark.parametrize("align", [1, 2, 3, 8])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", CASES)
def test_ranks_hold_equally_many_aligned_tokens_and_little_padding(
    lengths: tuple[int, ...], cp: int, align: int
) -> None:
    split = split_context(lengths, cp, align)
    assert {len(split.part(rank).packed) for rank in range(cp)} == {split.local_tokens}
    assert split.local_tokens % align == 0
    for_chunks = (2 * cp - 1) * len(lengths) if cp > 1 else 0
    for_alignment = cp * (2 * align - 1)
    assert cp * split.local_tokens - sum(lengths) <= for_chunks + for_alignment


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", CASES)
def test_positions_count_within_each_sequence(lengths: tuple[int, ...], cp: int) -> None:
    split = split_context(lengths, cp, align=3)
    expected = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(cp):
        part = split.part(rank)
        true = part.packed >= 0
        np.testing.assert_array_equal(part.positions[true], expected[part.packed[true]])


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", CASES)
def test_gathered_tokens_come_back_to_packed_and_to_whole_order(lengths: tuple[int, ...], cp: int) -> None:
    split = split_context(lengths, cp, align=4)
    held = gathered(split)
    np.testing.assert_array_equal(held[split.gathered_of_packed], np.arange(sum(lengths)))

    whole = held[split.gathered_of_whole]
    start = 0
    for length, first, filled in zip(lengths, offsets_of(np.array(lengths)), split.padded_lengths, strict=False):
        np.testing.assert_array_equal(whole[start : start + length], np.arange(first, first + length))
        assert (whole[start + length : start + filled] == -1).all()
        start += filled
    np.testing.assert_array_equal(whole[split.whole_of_gathered], held)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", CASES)
def test_a_query_sees_itself_and_all_before_it(lengths: tuple[int, ...], cp: int) -> None:
    """As kernels align it: the last query of a segment sees the last key."""
    split = split_context(lengths, cp, align=3)
    held = gathered(split)
    first_of = np.repeat(offsets_of(np.array(lengths)), lengths)
    for rank in range(cp):
        part = split.part(rank)
        assert part.query_lengths.sum() == split.local_tokens
        query, key = 0, 0
        for queries, keys in zip(part.query_lengths, part.visible_lengths, strict=True):
            seen = held[part.visible[key : key + keys]]
            for j in range(queries):
                token = part.packed[query + j]
                if token >= 0:
                    expected = np.arange(first_of[token], token + 1)
                    np.testing.assert_array_equal(seen[: keys - queries + j + 1], expected)
            query, key = query + queries, key + keys


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_attention_costs_every_rank_the_same(cp: int) -> None:
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(6.5, 0.8)) + 1 for _ in range(32)]
    split = split_context(lengths, cp)
    costs = []
    for rank in range(cp):
        part = split.part(rank)
        costs.append(int((part.positions[part.packed >= 0] + 1).sum()))
    assert max(costs) * cp <= 1.02 * sum(costs)
    by_filled = {int((split.part(rank).positions + 1).sum()) for rank in range(cp)}
    assert len(by_filled) == 1


def test_one_rank_without_alignment_changes_nothing() -> None:
    split = split_context((5, 3), cp=1)
    assert split.is_trivial
    assert split.part(0).packed.tolist() == list(range(8))
    assert split.part(0).positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert split.gathered_of_packed.tolist() == split.gathered_of_whole.tolist() == list(range(8))


def test_one_rank_is_filled_up_to_the_alignment_by_one_more_sequence() -> None:
    split = split_context((5, 2), cp=1, align=4)
    assert not split.is_trivial
    assert split.padded_lengths.tolist() == [5, 2, 1]
    assert split.part(0).packed.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


def test_two_ranks_hold_the_outer_and_the_inner_chunks() -> None:
    split = split_context((8, 2), cp=2)
    assert split.part(0).packed.tolist() == [0, 1, 6, 7, 8, -1]
    assert split.part(1).packed.tolist() == [2, 3, 4, 5, 9, -1]
    assert split.part(0).visible_lengths.tolist() == [2, 8, 1, 4]
    assert split.part(1).visible_lengths.tolist() == [4, 6, 2, 3]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_batches_of_unequal_length_can_be_filled_up_to_one(cp: int) -> None:
    """Every rank then holds the same number, without the tokens changing."""
    most = max(split_context(lengths, cp, align=3).local_tokens for lengths in LENGTHS.values())
    splits = [split_context(lengths, cp, align=3, least=most) for lengths in LENGTHS.values()]
    assert {split.local_tokens for split in splits} == {most}
    for split in splits:
        assert gathered(split)[split.gathered_of_packed].tolist() == list(range(sum(split.lengths)))


def test_a_large_batch_is_cut_quickly() -> None:
    lengths = [400] * 2000
    began = time.process_time()
    split = split_context(lengths, cp=8, align=8)
    assert len(split.part(3).visible) > 0
    assert len(split.gathered_of_packed) == sum(lengths)
    assert time.process_time() - began < 1
