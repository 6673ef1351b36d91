"""Segments of attention: consecutive runs of queries, each with the run of keys that it attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

# Without a fused kernel, segments are padded to the longest of their bucket; shorter ones than this share of it start
# another bucket.
_BUCKET_FILL = 0.7
_SHORT = 32  # tokens, below which another call costs more than the padding


@dataclass(frozen=True, eq=False)
class Segments:
    """Query j of a segment attends to its keys 0 … key_length - query_length + j: the last query to the last key.

    This is causal attention with bottom-right alignment; with as many keys as queries, plain causal attention.
    """

    query_lengths: np.ndarray  # int64 [segments]
    key_lengths: np.ndarray  # int64 [segments], at least the query lengths
    device: torch.device

    @cached_property
    def query_bounds(self) -> Int32[Tensor, " segments+1"]:
        return _bounds(self.query_lengths, self.device)

    @cached_property
    def key_bounds(self) -> Int32[Tensor, " segments+1"]:
        return _bounds(self.key_lengths, self.device)

    @cached_property
    def longest_query(self) -> int:
        return int(self.query_lengths.max())

    @cached_property
    def longest_key(self) -> int:
        return int(self.key_lengths.max())

    @cached_property
    def buckets(self) -> tuple[PaddedBucket, ...]:
        """Segments grouped by similar lengths, for one attention call each."""
        pairs = list(zip(self.query_lengths.tolist(), self.key_lengths.tolist(), strict=True))
        # A rank has an early and a late chunk of each sequence; all early chunks have one ratio of lengths, and so have
        # all late ones.
        order = sorted(range(len(pairs)), key=lambda i: (-pairs[i][1] / pairs[i][0], -pairs[i][1]))
        buckets: list[list[int]] = []
        for i in order:
            if buckets and _similar(pairs[buckets[-1][0]], pairs[i]):
                buckets[-1].append(i)
            else:
                buckets.append([i])
        return tuple(self._bucket(np.array(members)) for members in buckets)

    def _bucket(self, members: np.ndarray) -> PaddedBucket:
        queries, keys = self.query_lengths[members, None], self.key_lengths[members, None]
        query_column, key_column = np.arange(queries.max())[None], np.arange(keys.max())[None]
        query_rows = _starts(self.query_lengths)[members, None] + np.minimum(query_column, queries - 1)
        key_rows = _starts(self.key_lengths)[members, None] + np.minimum(key_column, keys - 1)
        cells = (query_column < queries).ravel().nonzero()[0]
        rows = (torch.from_numpy(x).to(self.device) for x in (query_rows, key_rows, cells, query_rows.ravel()[cells]))
        return PaddedBucket(*rows, self.query_lengths[members], self.key_lengths[members])


@dataclass(frozen=True, eq=False)
class PaddedBucket:
    """Segments of similar lengths as rows: ``query_rows[i, j]`` is the index of query j of segment i.

    Rows are padded with the segment's last token: no real query attends to such a key, and the output of such a query
    is dropped. ``cells`` are the real queries in the flattened rows, ``queries`` their indices.
    """

    query_rows: Int64[Tensor, "segments longest_query"]
    key_rows: Int64[Tensor, "segments longest_key"]
    cells: Int64[Tensor, " queries"]
    queries: Int64[Tensor, " queries"]
    query_lengths: np.ndarray  # int64 [segments]
    key_lengths: np.ndarray  # int64 [segments]
    _masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window, shared by all layers

    def mask(self, window: int | None = None) -> Bool[Tensor, "segments 1 longest_query longest_key"] | None:
        """Keys that each query attends to, ``window`` at most; None for plain causal attention."""
        longest = int(self.key_lengths.max())
        window = None if window is None or window >= longest else window
        if window is None and (self.query_lengths == self.key_lengths).all():
            return None
        return self.visible(window)

    def visible(self, window: int | None = None) -> Bool[Tensor, "segments 1 longest_query longest_key"]:
        """Mask as ``mask``, also for plain causal attention."""
        if window not in self._masks:
            queries, keys = self.query_lengths[:, None], self.key_lengths[:, None]
            query_column, key_column = (np.arange(rows.size(1))[None] for rows in (self.query_rows, self.key_rows))
            last_seen = query_column + keys - queries  # [segments, longest_query]
            seen = key_column[:, None] <= last_seen[:, :, None]
            if window is not None:
                # Padding has keys too, or its softmax would not be a number: no segment of a bucket has a greater
                # difference of its lengths than the first, which is the longest.
                seen &= key_column[:, None] > last_seen[:, :, None] - window
            self._masks[window] = torch.from_numpy(seen)[:, None].to(self.query_rows.device)
        return self._masks[window]


def _similar(longest: tuple[int, int], pair: tuple[int, int]) -> bool:
    if max(longest) <= _SHORT:
        return pair[0] <= longest[0] and pair[1] <= longest[1]
    return all(_BUCKET_FILL * most <= length <= most for most, length in zip(longest, pair, strict=True))


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _bounds(lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device, non_blocking=True)
