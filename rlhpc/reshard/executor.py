"""Executes a reshard plan on live tensors: packs, exchanges and writes, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.core.heartbeat import touch
from rlhpc.reshard.plan import Copy, ReshardPlan
from rlhpc.sharding.shards import Shard, TensorSpec

View = Callable[[Shard], Tensor]  # live memory of a shard on this rank


@dataclass(frozen=True)
class _Message:
    """One rank's data to send (or receive) in one bucket: copies ordered by peer, and bytes per peer."""

    copies: tuple[Copy, ...]
    splits: list[int]

    @property
    def size(self) -> int:
        return sum(self.splits)


class Mover:
    """Executes this rank's part of a plan.

    While it moves, it holds two send and two receive buffers, each at most as large as the plan's largest bucket.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        """``group`` holds all ranks of both sides; None: all ranks of the job. Copies inside this rank into the
        ``shared`` parameters are left out: the engine uses the trainer's memory."""
        self._dtype, self._device, self._group = dtype, device, group
        self._lasting = device.type == "cuda"  # the engine's memory keeps its address there: views stay valid
        self._views: list[tuple[Tensor, Tensor]] | None = None
        rank, members = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
        self._local = [copy for copy in plan.local(rank) if copy.target.local_name not in shared]
        self._sends = [self._message(copies, members, _receiver) for copies in plan.sends(rank)]
        self._receives = [self._message(copies, members, _sender) for copies in plan.receives(rank)]

    @torch.no_grad()
    def move(self, read: View, write: View) -> None:
        """Writes every target shard of this rank. Collective over the group.

        While a bucket is in flight, the next one is packed, and copies inside the rank are made.
        """
        buckets = len(self._sends)
        sent, received = self._buffers(self._sends), self._buffers(self._receives)
        work = self._start(0, read, sent, received) if buckets else None
        self._copy(read, write)
        for bucket in range(buckets):
            touch("weight sync")
            if bucket + 1 < buckets:
                self._pack(bucket + 1, read, sent)
            assert work is not None
            work.wait()
            work = self._exchange(bucket + 1, sent, received) if bucket + 1 < buckets else None
            self._unpack(bucket, write, received)

    def _copy(self, read: View, write: View) -> None:
        """Makes the copies inside this rank, in as few kernels as possible."""
        if not self._local:
            return
        read(self._local[0].source)  # reloads what the trainer has offloaded; existing views stay valid
        if self._views is None or not self._lasting:
            self._views = [(write(c.target), read(c.source)) for c in self._local]
        dtypes = [self.wire_dtype(copy.tensor) for copy in self._local]
        # Parameters of another dtype get what they would over the wire.
        pairs = [
            (into, own if into.dtype == dtype else own.to(dtype))
            for (into, own), dtype in zip(self._views, dtypes, strict=True)
        ]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def _message(self, copies: Sequence[Copy], members: Sequence[int], peer: Callable[[Copy], int]) -> _Message:
        ordered = sorted(copies, key=peer)  # stable: both ends order the copies between them as in the plan
        sizes = {rank: sum(map(self._bytes, group)) for rank, group in groupby(ordered, key=peer)}
        return _Message(tuple(ordered), [sizes.get(rank, 0) for rank in members])

    def _buffers(self, messages: Sequence[_Message]) -> tuple[Tensor, Tensor]:
        """Two buffers for alternate buckets, each as large as its largest message."""
        even, odd = (
            torch.empty(max((m.size for m in messages[i::2]), default=0), dtype=torch.uint8, device=self._device)
            for i in (0, 1)
        )
        return even, odd

    def _start(self, bucket: int, read: View, sent: Sequence[Tensor], received: Sequence[Tensor]) -> dist.Work:
        self._pack(bucket, read, sent)
        return self._exchange(bucket, sent, received)

    def _pack(self, bucket: int, read: View, buffers: Sequence[Tensor]) -> None:
        buffer, start = buffers[bucket % 2], 0
        for copy in self._sends[bucket].copies:
            size = self._bytes(copy)
            put(buffer[start : start + size], read(copy.source), self.wire_dtype(copy.tensor))
            start += size

    def _exchange(self, bucket: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> dist.Work:
        sends, receives = self._sends[bucket], self._receives[bucket]
        return dist.all_to_all_single(
            received[bucket % 2][: receives.size],
            sent[bucket % 2][: sends.size],
            receives.splits,
            sends.splits,
            group=self._group,
            async_op=True,
        )

    def _unpack(self, bucket: int, write: View, buffers: Sequence[Tensor]) -> None:
        buffer, start = buffers[bucket % 2], 0
        for copy in self._receives[bucket].copies:
            size = self._bytes(copy)
            write(copy.target).copy_(get(buffer[start : start + size], copy.box.shape, self.wire_dtype(copy.tensor)))
            start += size

    def wire_dtype(self, tensor: TensorSpec) -> torch.dtype:
        """Dtype that a tensor is sent in."""
        return wire_dtype(tensor, self._dtype)

    def _bytes(self, copy: Copy) -> int:
        return prod(copy.box.shape) * self.wire_dtype(copy.tensor).itemsize


def _receiver(copy: Copy) -> int:
    return copy.target_rank


def _sender(copy: Copy) -> int:
    return copy.source_rank


def wire_dtype(tensor: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """Dtype that a tensor is sent in; ``dtype`` is the model's."""
    return torch.float32 if tensor.float32 else dtype


def put(place: Tensor, block: Tensor, dtype: torch.dtype) -> None:
    """Writes a block into bytes, which may be unaligned where float32 and bfloat16 tensors share a buffer."""
    if place.storage_offset() % dtype.itemsize == 0:
        place.view(dtype).view(block.shape).copy_(block)
    else:
        place.copy_(block.to(dtype).contiguous().view(-1).view(torch.uint8))


def get(place: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The block stored in those bytes: a view of them, or a copy where they are unaligned."""
    if place.storage_offset() % dtype.itemsize:
        place = place.clone()
    return place.view(dtype).view(shape)
