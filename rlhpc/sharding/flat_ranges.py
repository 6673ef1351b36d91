"""Converts ranges of a flattened tensor, as in a distributed optimizer, to boxes, as in a checkpoint."""

from __future__ import annotations

from math import prod

from rlhpc.sharding.shards import Box


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, as consecutive boxes.

    At most ``2 * len(shape) - 1``: a part of the first row, whole rows, a part of the last row.
    """
    assert 0 <= start <= stop <= prod(shape), f"{start} to {stop} of {shape}"
    if start == stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop,))] if shape else [Box((), ())]
    rows, size = shape[1:], prod(shape[1:])
    first, last = -(-start // size), stop // size  # whole rows
    if first > last:
        return _inside(first - 1, flat_boxes(rows, start % size, stop % size))
    found = _inside(first - 1, flat_boxes(rows, start % size, size)) if start % size else []
    if first < last:
        found.append(Box((first, *(0 for _ in rows)), (last, *rows)))
    return found + _inside(last, flat_boxes(rows, 0, stop % size))


def _inside(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.start), (row + 1, *box.stop)) for box in boxes]
