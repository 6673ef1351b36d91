"""A range of a flattened tensor is a few boxes."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from rlhpc.sharding.shards import Box, flat_boxes


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
