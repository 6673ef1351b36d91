"""Split of the tokens of a packed batch over context-parallel ranks, and the inverse indices.

Each sequence is padded to 2 x cp equal chunks. Rank r holds chunks r and 2cp-1-r, an early and a late one, so that
causal attention costs every rank the same (zig-zag; Llama 3, arXiv 2407.21783, section 3.3.2). T is the number of
tokens in the batch, P in the padded sequences, L = P / cp on one rank; S counts the padded sequences.

There are three orders of tokens: *packed*, that of the batch; *whole*, the padded sequences concatenated; *gathered*,
the result of an all-gather of every rank's local tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np


@dataclass(frozen=True, eq=False)
class ContextPart:
    """Tokens of one rank, sequence after sequence, with the early chunk of each first."""

    packed: np.ndarray  # int64 [L] index into the batch, -1 for padding
    positions: np.ndarray  # int64 [L] in its sequence
    # Keys visible to the queries of each chunk: its sequence up to the chunk's end. One segment for each chunk.
    query_lengths: np.ndarray  # int64 [segments]
    visible_lengths: np.ndarray  # int64 [segments]
    visible: np.ndarray  # int64 [sum of visible_lengths] keys of each segment, in gathered order


@dataclass(frozen=True)
class ContextSplit:
    """Split of sequences of ``lengths`` tokens over ``cp`` ranks, each with a multiple of ``align`` tokens.

    With cp 1 there is no split, and only the alignment adds padding, as one more sequence at the end.
    """

    lengths: tuple[int, ...]
    cp: int
    align: int
    least: int = 0  # minimum local tokens, for ranks that must hold equally many

    @cached_property
    def padded_lengths(self) -> np.ndarray:
        """int64 [S] tokens of each padded sequence, over all ranks; the last may consist of padding."""
        lengths = np.array(self.lengths, dtype=np.int64)
        padded = -(-lengths // self._chunks) * self._chunks
        # Each rank holds as many chunks of the last sequence as of any other.
        step = lcm(self.align, self._chunks // self.cp)
        local = int(padded.sum()) // self.cp
        missing = -(-max(local, self.least) // step) * step - local
        return np.append(padded, missing * self.cp) if missing else padded

    @property
    def local_tokens(self) -> int:
        """L: tokens of each rank."""
        return int(self.padded_lengths.sum()) // self.cp

    @property
    def is_trivial(self) -> bool:
        """True if all three orders are equal: one rank and no padding."""
        return self.cp == 1 and self.local_tokens == sum(self.lengths)

    @cached_property
    def gathered_of_whole(self) -> np.ndarray:
        """int64 [P] sorts gathered tokens into whole sequences: ``whole = gathered[gathered_of_whole]``."""
        order = np.empty(len(self.whole_of_gathered), dtype=np.int64)
        order[self.whole_of_gathered] = np.arange(len(order))
        return order

    @cached_property
    def whole_of_gathered(self) -> np.ndarray:
        """int64 [P], the inverse: ``gathered = whole[whole_of_gathered]``."""
        return np.concatenate([self._whole_places(rank) for rank in range(self.cp)])

    @cached_property
    def gathered_of_packed(self) -> np.ndarray:
        """int64 [T] drops padding: ``packed = gathered[gathered_of_packed]``."""
        lengths = np.array(self.lengths, dtype=np.int64)
        index: np.ndarray = self.gathered_of_whole[_ranges(self._starts[: len(lengths)], lengths)]
        return index

    def part(self, rank: int) -> ContextPart:
        """Part of ``rank`` in the context-parallel group."""
        places = self._whole_places(rank)
        sequence = np.repeat(np.arange(len(self.padded_lengths)), self.padded_lengths // self.cp)
        positions = places - self._starts[sequence]
        lengths = np.zeros(len(self.padded_lengths), dtype=np.int64)
        lengths[: len(self.lengths)] = self.lengths
        packed = np.where(positions < lengths[sequence], _exclusive_sum(lengths)[sequence] + positions, -1)

        size, held = self.padded_lengths // self._chunks, self._held(rank)
        visible_lengths = np.outer(size, held + 1).ravel()
        visible = self.gathered_of_whole[_ranges(np.repeat(self._starts, len(held)), visible_lengths)]
        return ContextPart(packed, positions, np.repeat(size, len(held)), visible_lengths, visible)

    @property
    def _chunks(self) -> int:
        """Number of chunks of each sequence."""
        return 2 * self.cp if self.cp > 1 else 1

    def _held(self, rank: int) -> np.ndarray:
        """Chunks of each sequence that ``rank`` holds."""
        assert 0 <= rank < self.cp
        return np.array([rank, 2 * self.cp - 1 - rank] if self.cp > 1 else [0], dtype=np.int64)

    @property
    def _starts(self) -> np.ndarray:
        """int64 [S] start of each sequence in whole order."""
        return _exclusive_sum(self.padded_lengths)

    def _whole_places(self, rank: int) -> np.ndarray:
        """int64 [L] places of the rank's tokens in whole order."""
        size, held = self.padded_lengths // self._chunks, self._held(rank)
        starts = self._starts[:, None] + np.outer(size, held)
        return _ranges(starts.ravel(), np.repeat(size, len(held)))


def split_context(lengths: Sequence[int], cp: int, align: int = 1, least: int = 0) -> ContextSplit:
    """Splits sequences of ``lengths`` tokens over ``cp`` ranks, each with a multiple of ``align`` tokens, and at least
    ``least``."""
    assert min(cp, align, *lengths) > 0
    return ContextSplit(tuple(int(length) for length in lengths), cp, align, least)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of start, start + 1, … for each pair of start and length."""
    offsets = np.repeat(starts - _exclusive_sum(lengths), lengths)
    return offsets + np.arange(len(offsets), dtype=np.int64)


def _exclusive_sum(lengths: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.cumsum(lengths) - lengths
    return sums
