"""Blocks of tensors in an engine's parameters, found from what its own loader makes of coded tensors.

A coded tensor's elements are one digit of its number, or of their coordinate along one axis. Such digits, read back at
a few points of a parameter, show the blocks that it consists of. Works on numbers and positions, without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from rlhpc.sharding.shards import Box, Shard, TensorSpec

UNTOUCHED, ZEROED = -1, -2  # in place of a tensor's number: the loader writes nothing there, or zeros
SENTINEL = -1.0  # of parameters before a load; no digit is 0 or negative
_BASES = {"float32": 1 << 20, "float16": 1 << 11, "bfloat16": 1 << 8}  # each dtype holds digits from 1 to these exactly
_LATTICE = 4  # lines through a parameter along each axis, by place on each other axis
_MOST_CELLS = 1 << 16

Positions = Int[np.ndarray, "points dims"]


class Transformed(Exception):
    """A parameter contains something else than elements of tensors."""


@dataclass(frozen=True)
class View:
    """A parameter with its axes in the order of a tensor's; None: an axis of size 1 that the parameter lacks."""

    parameter: str
    axes: tuple[int | None, ...]

    @property
    def name(self) -> str:
        """Name of the view in ``Shard.local_name``."""
        return f"{self.parameter}({', '.join('new' if axis is None else str(axis) for axis in self.axes)})"

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the view of a parameter of ``shape``."""
        return tuple(1 if axis is None else shape[axis] for axis in self.axes)


@dataclass(frozen=True)
class DiscoveredLayout:
    """Shards of one rank of an engine. ``views``: by the name that shards give them; ``padded``: parameters that
    tensors do not fill."""

    shards: tuple[Shard, ...]
    views: Mapping[str, View] = field(default_factory=dict)
    padded: frozenset[str] = frozenset()

    def zero_padding(self, parameters: Mapping[str, Any]) -> None:
        """Zeroes padded parameters, before tensors are written."""
        for name in self.padded & parameters.keys():
            parameters[name].zero_()


@dataclass(frozen=True)
class CodePass:
    """One load of all tensors: the ``digit`` of coordinates along ``axis``, or of the tensors' numbers (None)."""

    axis: int | None
    digit: int


class Code:
    """Digits of a list of tensors that a dtype holds exactly, and the passes that it takes to load all of them."""

    def __init__(self, tensors: Sequence[TensorSpec], dtype: str) -> None:
        self.tensors, self._base = tuple(tensors), _BASES[dtype]
        self._dims = max((len(tensor.shape) for tensor in tensors), default=0)
        sizes = {axis: max(t.shape[axis] for t in tensors if len(t.shape) > axis) for axis in range(self._dims)}
        self.passes = tuple(
            CodePass(axis, digit)
            for axis, size in ((None, len(tensors)), *sizes.items())
            for digit in range(self._digits(size))
        )

    def values(self, number: int, code_pass: CodePass) -> Int[np.ndarray, " size"]:
        """Values along the pass's axis of a tensor, equal along its others; one value if the axis is None or lacks."""
        if code_pass.axis is None:
            own = np.array([number])
        else:
            shape = self.tensors[number].shape
            own = np.arange(shape[code_pass.axis] if len(shape) > code_pass.axis else 1)
        return own // self._base**code_pass.digit % self._base + 1

    def read(self, values: Float[np.ndarray, "passes points"]) -> Read:
        """Decodes the values of all passes at each point."""
        blank = values[0] <= 0
        sound = (values == np.round(values)) & (values <= self._base) & ((values <= 0) == blank)
        if not sound.all() or (values < SENTINEL).any():
            raise Transformed
        numbers = np.zeros(values.shape[1], np.int64)
        coordinates = np.zeros((values.shape[1], self._dims), np.int64)
        for code_pass, digits in zip(self.passes, values.astype(np.int64) - 1, strict=True):
            into = numbers if code_pass.axis is None else coordinates[:, code_pass.axis]
            into += digits * self._base**code_pass.digit
        numbers[blank] = np.where(values[0][blank] == 0, ZEROED, UNTOUCHED)
        if numbers.max(initial=0) >= len(self.tensors):
            raise Transformed
        return Read(numbers, coordinates)

    def _digits(self, size: int) -> int:
        digits = 1
        while self._base**digits < size:
            digits += 1
        return digits


@dataclass(frozen=True)
class Read:
    """Number of each point's tensor, UNTOUCHED or ZEROED, and its coordinates in that tensor."""

    numbers: Int[np.ndarray, " points"]
    coordinates: Int[np.ndarray, "points dims"]


@dataclass(frozen=True)
class _Cell:
    """A block of a parameter that is one block of one tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class Probe:
    """Finds the blocks of one parameter: reads lines through it, cuts it where tensors change, reads a corner of each
    cell. A structure finer than the lines is refined through a point that contradicts what was found."""

    def __init__(self, name: str, shape: tuple[int, ...], tensors: Sequence[TensorSpec]) -> None:
        self.name, self.shape, self._tensors = name, shape, tensors
        self._places = [_lattice(size) for size in shape]
        self._cells: list[_Cell] = []
        self._shards: list[Shard] = []
        self._contradiction: tuple[int, ...] | None = None
        self.views: dict[str, View] = {}
        self.loaded = False

    def refine(self, position: Sequence[int]) -> None:
        """Reads lines through this point too, next time."""
        for places, at in zip(self._places, position, strict=True):
            places.add(int(at))

    def lines(self) -> Positions:
        """Points of all lines."""
        if not self.shape:
            return np.zeros((1, 0), np.int64)
        return np.concatenate([np.stack(line, axis=1) for _, line in self._axis_lines()])

    def take_lines(self, read: Read) -> None:
        """Cuts the parameter into cells by what was read along the lines."""
        cuts: list[set[int]] = [{0, size} for size in self.shape]
        at = 0
        for axis, line in self._axis_lines():
            size = len(line[axis])
            part = slice(at, at + size)
            cuts[axis] |= _breaks(read.numbers[part], read.coordinates[part])
            at += size
        self.loaded = bool((read.numbers != UNTOUCHED).any())
        if int(np.prod([len(cut) - 1.0 for cut in cuts])) > _MOST_CELLS:
            raise Transformed
        ranges = product(*(pairwise(sorted(cut)) for cut in cuts))
        self._cells = [_Cell(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in ranges]

    def corners(self) -> Positions:
        """First element of each cell, and its next one along each axis."""
        found = [place for cell in self._cells for place in _corner(cell)]
        return np.array(found, np.int64).reshape(len(found), len(self.shape))

    def take_corners(self, read: Read) -> None:
        """Makes shards of the cells."""
        at, shards = 0, []
        self.views, self._contradiction = {}, None
        for cell in self._cells:
            count = 1 + sum(size > 1 for size in cell.shape)
            number, own = read.numbers[at], read.coordinates[at : at + count]
            if number >= 0:
                if (shard := self._shard(cell, self._tensors[number], own)) is None:
                    self._contradiction = cell.start
                else:
                    shards.append(shard)
            at += count
        self._shards = _merged(shards)

    @property
    def contradiction(self) -> tuple[int, ...] | None:
        """A point where lines and corners do not fit together."""
        return self._contradiction

    @property
    def shards(self) -> list[Shard]:
        return self._shards

    @property
    def padded(self) -> bool:
        """True if elements of the parameter are of no tensor."""
        return sum(shard.box.volume for shard in self._shards) < int(np.prod(self.shape))

    def local_box(self, shard: Shard) -> tuple[slice, ...]:
        """Place of a shard in the parameter itself."""
        view = self.views.get(shard.local_name)
        if view is None:
            return shard.local_box.slices
        places = {axis: part for axis, part in zip(view.axes, shard.local_box.slices, strict=True) if axis is not None}
        return tuple(places[axis] for axis in range(len(self.shape)))

    def _axis_lines(self) -> Iterator[tuple[int, list[Int[np.ndarray, " n"]]]]:
        """Each line as its axis and the indices of its points along every axis."""
        for axis, size in enumerate(self.shape):
            others = [sorted(places) if a != axis else [0] for a, places in enumerate(self._places)]
            for base in product(*others):
                yield axis, [np.arange(size) if a == axis else np.full(size, at) for a, at in enumerate(base)]

    def _shard(self, cell: _Cell, tensor: TensorSpec, read: Int[np.ndarray, "points dims"]) -> Shard | None:
        """The cell as a shard; None if its elements are not a block of the tensor."""
        dims = len(tensor.shape)
        start = read[0, :dims]
        known: dict[int, int] = {}
        for axis, there in zip((a for a, size in enumerate(cell.shape) if size > 1), read[1:, :dims], strict=True):
            (moved,) = np.nonzero(there - start) if (there != start).sum() == 1 else (np.array([-1]),)
            if moved[0] < 0 or (there - start)[moved[0]] != 1 or int(moved[0]) in known.values():
                return None
            known[axis] = int(moved[0])
        axes = _order(known, len(cell.shape), dims)
        sizes = [1 if axis is None else cell.shape[axis] for axis in axes]
        begin = tuple(int(at) for at in start)
        stop = tuple(at + size for at, size in zip(begin, sizes[len(axes) - dims :], strict=True))
        if any(at > size for at, size in zip(stop, tensor.shape, strict=True)):
            return None
        local_start = tuple(0 if axis is None else cell.start[axis] for axis in axes)
        view = View(self.name, axes)
        if axes == tuple(range(len(cell.shape))):
            return Shard(tensor, Box(begin, stop), self.name, local_start)
        self.views[view.name] = view
        return Shard(tensor, Box(begin, stop), view.name, local_start)


def layout_of(probes: Iterable[Probe], tensors: Sequence[TensorSpec]) -> DiscoveredLayout:
    """The layout that all probes have found, in the order of the tensors."""
    order = {tensor: number for number, tensor in enumerate(tensors)}
    probes = list(probes)
    shards = [shard for probe in probes for shard in probe.shards]
    shards.sort(key=lambda shard: (order[shard.tensor], shard.box.start, shard.local_name))
    views = {name: view for probe in probes for name, view in probe.views.items()}
    return DiscoveredLayout(tuple(shards), views, frozenset(probe.name for probe in probes if probe.padded))


def _lattice(size: int) -> set[int]:
    """A few places along an axis: both ends, and others without a regular distance."""
    return {at for at in (0, size - 1, *(int(size * part) for part in (0.382, 0.729))) if 0 <= at < size}


def _corner(cell: _Cell) -> Iterator[tuple[int, ...]]:
    yield cell.start
    for axis, size in enumerate(cell.shape):
        if size > 1:
            yield tuple(at + (axis == a) for a, at in enumerate(cell.start))


def _breaks(numbers: Int[np.ndarray, " n"], coordinates: Int[np.ndarray, "n dims"]) -> set[int]:
    """Places along a line where another block begins: another tensor, or a step in another direction."""
    steps = np.diff(coordinates, axis=0)
    along = (np.abs(steps).sum(axis=1) == 1) & (steps.max(axis=1, initial=0) == 1)
    blank = numbers[1:] < 0
    follows: Bool[np.ndarray, " n-1"] = (numbers[1:] == numbers[:-1]) & (along | blank)
    found, direction = set(), None
    turns = np.r_[False, (steps[1:] != steps[:-1]).any(axis=1)] if len(steps) else np.zeros(0, bool)
    for at in np.flatnonzero(~follows | (turns & ~blank)):
        # The step into the first element of a block is not along it.
        if follows[at] and direction == at - 1:
            direction = None
            continue
        found.add(int(at) + 1)
        direction = at
    return found


def _order(known: Mapping[int, int], held: int, dims: int) -> tuple[int | None, ...]:
    """The parameter's axes in the order of the tensor's, after leading ones of size 1; as they are if that is
    possible. ``known``: the tensor's axis of each axis of a size above 1."""
    lead = held - dims
    if lead >= 0 and all(axis - lead == own for axis, own in known.items()):
        return tuple(range(held))
    order: list[int | None] = [None] * dims
    for axis, own in known.items():
        order[own] = axis
    free = [axis for axis in range(held) if axis not in known]
    for own in reversed(range(dims)):
        if order[own] is None and free:
            order[own] = free.pop()
    return (*free, *order)


def _merged(shards: Sequence[Shard]) -> list[Shard]:
    """The shards, with those merged that are neighbors both in the tensor and in the parameter."""
    found = list(shards)
    for dim in range(max((len(shard.box.start) for shard in shards), default=0)):
        found.sort(key=lambda shard: _line_of(shard, dim))
        joined: list[Shard] = []
        for shard in found:
            before = joined[-1] if joined else None
            if before is not None and len(shard.box.start) > dim and _continues(before, shard, dim):
                stop = (*before.box.stop[:dim], shard.box.stop[dim], *before.box.stop[dim + 1 :])
                joined[-1] = replace(before, box=Box(before.box.start, stop))
            else:
                joined.append(shard)
        found = joined
    return found


def _line_of(shard: Shard, dim: int) -> tuple[object, ...]:
    """Sorts shards so that neighbors along ``dim`` follow each other."""
    start = shard.box.start
    at = start[dim] if len(start) > dim else 0
    return shard.local_name, shard.tensor.name, _without(start, dim), _without(shard.box.stop, dim), at


def _continues(first: Shard, second: Shard, dim: int) -> bool:
    if (first.tensor, first.local_name) != (second.tensor, second.local_name):
        return False
    same = all(_without(a, dim) == _without(b, dim) for a, b in zip(_ends(first), _ends(second), strict=True))
    whole = Box(first.box.start, second.box.stop)
    return (
        same and first.box.stop[dim] == second.box.start[dim] and replace(first, box=whole).part(second.box) == second
    )


def _ends(shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shard.box.start, shard.box.stop


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]
