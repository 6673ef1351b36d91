"""Shards of the training side: every element of every tensor in the right place, and ranges as boxes."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from rlhpc.models import shape_of
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, flat_boxes, megatron_shards, padded_vocab
from tests.helpers import movement
from tests.helpers.coverage import assert_filled_once, assert_held_once, small_layouts
from tests.helpers.published import DEEPSEEK_V3_BF16

SHAPES = {**movement.SHAPES, "deepseek_v3_direct": replace(movement.SHAPES["deepseek_v3_direct"], num_layers=6)}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SHAPES)
def test_each_element_is_held_once_by_every_model_replica(kind: str) -> None:
    layouts = small_layouts(SHAPES[kind])
    assert len(layouts) > 20
    for layout in layouts:
        assert_held_once(SHAPES[kind], layout)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SHAPES)
def test_no_element_of_a_local_parameter_is_held_twice_or_left_out(kind: str) -> None:
    for layout in small_layouts(SHAPES[kind])[::3]:
        assert_filled_once(SHAPES[kind], layout)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_local_parameters_are_filled_without_overlap(tp: int) -> None:
    """Each rank's fused parameter is covered exactly, vocabulary padding aside."""
    shape = SHAPES["qwen2"]
    layout = ParallelLayout(tp, tp=tp)
    local_shapes = {
        "embedding.word_embeddings.weight": (padded_vocab(37, tp) // tp, 8),
        "decoder.layers.0.self_attention.linear_qkv.weight": ((8 + 2 + 2) * 2 // tp, 8),
        "decoder.layers.0.self_attention.linear_qkv.bias": ((8 + 2 + 2) * 2 // tp,),
        "decoder.layers.0.self_attention.linear_proj.weight": (8, 16 // tp),
        "decoder.layers.0.mlp.linear_fc1.weight": (32 // tp, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": (8, 16 // tp),
    }
    for rank in range(tp):
        filled = {name: np.zeros(size, int) for name, size in local_shapes.items()}
        for shard in megatron_shards(shape, layout, rank):
            if shard.local_name in filled:
                filled[shard.local_name][shard.local_box.slices] += 1
        for name, count in filled.items():
            if name.startswith("embedding"):
                rows = max(0, min(37 - rank * len(count), len(count)))
                assert (count[:rows] == 1).all()
                assert (count[rows:] == 0).all()
            else:
                assert (count == 1).all(), (rank, name)


def test_fused_qkv_is_ordered_by_query_group() -> None:
    """Megatron's rows: the queries of group 0, its key, its value, then group 1."""
    shape = SHAPES["qwen2"]  # 4 queries a group, heads of 2 rows
    rows = {}
    for shard in megatron_shards(shape, ParallelLayout(1), 0):
        if shard.local_name == "decoder.layers.0.self_attention.linear_qkv.weight":
            name = shard.tensor.name.split(".")[-2]
            for i in range(shard.box.shape[0]):
                rows[shard.local_start[0] + i] = (name, shard.box.start[0] + i)
    expected = []
    for group in range(2):
        expected += [("q_proj", group * 8 + i) for i in range(8)]
        expected += [("k_proj", group * 2 + i) for i in range(2)]
        expected += [("v_proj", group * 2 + i) for i in range(2)]
    assert [rows[i] for i in range(len(rows))] == expected


def test_experts_are_dealt_to_ranks_in_blocks_gate_before_up() -> None:
    """Of 8 experts with 8 rows each, at ep 4 and etp 2: two on a rank, four rows of gate, then four of up."""
    shape, layout = SHAPES["deepseek_v3"], ParallelLayout(8, tp=2, ep=4, etp=2)
    for rank in range(8):
        first, row = 2 * (rank // 2), 4 * (rank % 2)
        found = {
            (shard.tensor.name.split("experts.")[1], shard.box.start, shard.local_start, shard.local_box.shape)
            for shard in megatron_shards(shape, layout, rank)
            if shard.tensor.expert is not None and shard.tensor.layer == 3
        }
        assert found == {
            held
            for local in range(2)
            for held in (
                (f"{first + local}.gate_proj.weight", (row, 0), (local, 0, 0), (1, 4, 8)),
                (f"{first + local}.up_proj.weight", (row, 0), (local, 4, 0), (1, 4, 8)),
                (f"{first + local}.down_proj.weight", (0, row), (local, 0, 0), (1, 8, 4)),
            )
        }


def test_the_shards_of_one_rank_of_a_large_job_are_planned_at_once() -> None:
    shape = shape_of(DEEPSEEK_V3_BF16)
    layout = ParallelLayout(2048, tp=8, pp=16, ep=64, last_stage_layers=1)
    start = time.process_time()
    shards = megatron_shards(shape, layout, 100)
    assert time.process_time() - start < 1
    assert {shard.tensor.layer for shard in shards} == {None, 0, 1, 2, 3}  # 4 layers a stage, and the embedding


def test_layers_are_dealt_to_stages_and_virtual_stages_in_order() -> None:
    shape = replace(SHAPES["qwen2"], num_layers=8)
    layout = ParallelLayout(2, pp=2, vpp=2)
    held = {
        rank: {(s.chunk, s.tensor.layer) for s in megatron_shards(shape, layout, rank) if s.tensor.layer is not None}
        for rank in range(2)
    }
    assert held[0] == {(0, 0), (0, 1), (1, 4), (1, 5)}
    assert held[1] == {(0, 2), (0, 3), (1, 6), (1, 7)}


@pytest.mark.parametrize("seed", range(200))
def test_boxes_hold_the_range_in_its_order(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    start, stop = sorted(draw.randint(0, prod(shape)) for _ in range(2))
    elements = np.arange(prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    held = [int(x) for box in boxes for x in elements[box.slices].reshape(-1)]
    assert held == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    assert flat_boxes((8, 3, 2), 6, 30) == [Box((1, 0, 0), (5, 3, 2))]
    assert flat_boxes((4, 4), 6, 14) == [Box((1, 2), (2, 4)), Box((2, 0), (3, 4)), Box((3, 0), (4, 2))]
