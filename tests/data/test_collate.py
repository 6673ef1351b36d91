"""Packing sequences into one batch and back."""

from __future__ import annotations

import time

import numpy as np
import torch

from rlhpc.api import KeptTokens
from rlhpc.data.collate import pack_batch, unpack, with_kept


def two_sequences() -> list[tuple[np.ndarray, int]]:
    return [(np.array([11, 12, 13, 14], np.int32), 2), (np.array([21, 22, 23], np.int32), 1)]


def test_targets_positions_and_weights_of_two_sequences():
    batch = pack_batch(two_sequences(), sample_ids=(5, 3), weights=[0.5, 1.0])
    assert batch.tokens.tolist() == [11, 12, 13, 14, 21, 22, 23]
    assert batch.targets.tolist() == [12, 13, 14, 0, 22, 23, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.loss_weight.tolist() == [0, 0.5, 0.5, 0, 1, 1, 0]
    assert batch.sample_ids == (5, 3)
    assert {batch.tokens.dtype, batch.targets.dtype, batch.positions.dtype} == {torch.int64}
    assert (batch.cu_seqlens.dtype, batch.loss_weight.dtype) == (torch.int32, torch.float32)


def test_tokens_that_were_given_are_not_trained_on():
    response_mask = [np.array([True, False]), None]
    batch = pack_batch(two_sequences(), sample_ids=(0, 1), weights=[0.5, 1.0], response_mask=response_mask)
    assert batch.loss_weight.tolist() == [0, 0.5, 0, 0, 1, 1, 0]


def test_kept_tokens_lie_where_their_token_is_predicted():
    kept = KeptTokens(np.array([13, 19, 14], np.int32), np.array([2, 1], np.int32))
    batch = with_kept(pack_batch(two_sequences(), sample_ids=(0, 1)), [kept, None], [2, 1])
    assert batch.kept.tolist() == [[0, 0], [14, 20], [15, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert batch.kept.dtype == torch.int32
    assert batch.blank(3).kept.tolist() == [[0, 0]] * 3
    assert with_kept(batch, [None, KeptTokens.whole(2)], [2, 1]) is batch


def test_response_values_lie_where_their_tokens_are_predicted():
    values = [np.array([0.1, 0.2]), np.array([0.3, 0.4])]
    batch = pack_batch(two_sequences(), sample_ids=(0, 1), per_token={"advantages": values})
    np.testing.assert_allclose(batch.extra["advantages"], [0, 0.1, 0.2, 0, 0.3, 0.4, 0], rtol=1e-6)


def test_a_blank_batch_has_the_fields_of_its_like_and_trains_nothing():
    values = [np.array([0.1, 0.2]), np.array([0.3, 0.4])]
    blank = pack_batch(two_sequences(), sample_ids=(0, 1), per_token={"advantages": values}).blank(3)
    assert blank.cu_seqlens.tolist() == [0, 3]
    assert blank.positions.tolist() == [0, 1, 2]
    assert blank.mask.tolist() == blank.tokens.tolist() == blank.extra["advantages"].tolist() == [0, 0, 0]


def test_unpack_returns_what_was_packed():
    draw = np.random.default_rng(0)
    sequences, values = [], []
    for _ in range(20):
        prompt_len, response_len = draw.integers(1, 9), draw.integers(0, 9)
        sequences.append((draw.integers(0, 99, prompt_len + response_len), int(prompt_len)))
        values.append(draw.random(response_len, dtype=np.float32))
    batch = pack_batch(sequences, sample_ids=range(20), weights=[0.0] * 20, per_token={"x": values})
    back = unpack(batch, batch.extra["x"], [prompt_len for _, prompt_len in sequences])
    assert len(back) == 20
    for was, now in zip(values, back, strict=True):
        np.testing.assert_array_equal(was, now)


def test_the_weighted_targets_are_the_response_tokens():
    batch = pack_batch(two_sequences(), sample_ids=(0, 1))
    assert batch.targets[batch.mask.bool()].tolist() == [13, 14, 22, 23]


def test_thousands_of_sequences_pack_quickly():
    sequences = [(np.arange(400, dtype=np.int32), 100)] * 4000
    values = {"advantages": [np.ones(300, np.float32)] * 4000}
    began = time.process_time()
    pack_batch(sequences, sample_ids=range(4000), per_token=values)
    assert time.process_time() - began < 2


def test_routed_experts_are_counted_from_one_and_left_open_where_none_is_known():
    routed_experts = [np.array([[[0, 255]], [[3, 1]]], dtype=np.uint8), np.array([[[300, 2]]], dtype=np.int16)]
    batch = pack_batch([(np.arange(3), 1), (np.arange(2), 1)], sample_ids=[0, 1], routed_experts=routed_experts)
    expected = [[1, 256], [4, 2], [0, 0], [301, 3], [0, 0]]
    assert batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts[:, 0].tolist() == expected
    assert batch.blank(2).routed_experts.tolist() == [[[0, 0]], [[0, 0]]]
