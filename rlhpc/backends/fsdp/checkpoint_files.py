"""Writes and reads blocks of sharded tensors in the format of PyTorch's distributed checkpoint (DCP).

A state has a ``LocalBlock`` of each tensor by its key, and plain values that all ranks have in common. PyTorch gathers
the plans of all ranks, so that copies of a block are written by one of them, the one with the least to write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlhpc.core.storage import os_error_in, patiently
from rlhpc.parallel.checkpoint_io import RestrictedLoad
from rlhpc.parallel.waits import leave_out_this_thread

_COPY_AHEAD = 10_000_000  # bytes on their way from a device
T = TypeVar("T")
State = Mapping[str, Any]


@dataclass(frozen=True)
class LocalBlock:
    """This rank's part of a tensor of ``shape``, from ``start`` on."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.start), self.data.size())

    def copied(self) -> LocalBlock:
        """The block in CPU memory of its own."""
        return replace(self, data=self.data.detach().to("cpu", copy=True))


class BlockWriter(FileSystemWriter):
    """Writes one file a rank, flushed to disk, again from memory after transient errors of the file system.

    ``background``: in a thread beside training, from a copy of the state.
    """

    def __init__(self, folder: Path, *, background: bool = False) -> None:
        # Copies in CPU memory need no stream of a device, of which a new thread would take the first.
        super().__init__(folder, per_thread_copy_ahead=0 if background else _COPY_AHEAD)
        self._background = background

    def stage(self, state_dict: Any) -> Any:
        """Copies what training may change before it is written."""
        return {
            key: value.copied() if isinstance(value, LocalBlock) else copy.deepcopy(value)
            for key, value in state_dict.items()
        }

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def storage_meta(self) -> StorageMeta:
        """Metadata without the path of the folder, which gets its name later."""
        return StorageMeta(save_id=self.save_id)

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Prepares the thread that writes."""
        if self._background:
            leave_out_this_thread()
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The folder exists and is empty."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        return self._patiently(lambda: super(BlockWriter, self).write_data(plan, planner))

    def finish(self, metadata: Metadata, results: Any) -> None:
        self._patiently(lambda: super(BlockWriter, self).finish(metadata, results))

    def _patiently(self, act: Callable[[], T]) -> T:
        def once() -> T:
            try:
                return act()
            except RuntimeError as error:  # of torch.save, in place of the file system's
                found = os_error_in(error)
                if found is None:
                    raise
                raise found from None

        return patiently(once, self.path)


class SaveBlocks(DefaultSavePlanner):
    """Plan of a save."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(key, value) for key, value in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.data if isinstance(found, LocalBlock) else found


class BlockReader(FileSystemReader):
    """Reads a checkpoint whose index has been read without running code from it."""

    def __init__(self, folder: Path, restricted: RestrictedLoad) -> None:
        super().__init__(folder)
        self._restricted = restricted

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._restricted.metadata(self)


class LoadBlocks(DefaultLoadPlanner):
    """Plan of a load into blocks of any layout."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, *args: Any, **_: Any) -> None:
        self.state_dict, self.metadata, self.is_coordinator = args

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, block in self.state_dict.items():
            entry: Any = self.metadata.state_dict_metadata[key]
            assert entry.size == torch.Size(block.shape), f"shape of {key}"
            items += create_read_items_for_chunk_list(key, entry, [block.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        data: Tensor = self.state_dict[index.fqn].data
        return data


def without_empty(state: State) -> dict[str, Any]:
    """A state without blocks that have no elements: a rank may have none of a tensor's rows."""
    return {key: value for key, value in state.items() if not isinstance(value, LocalBlock) or prod(value.data.shape)}


def _write_item(key: str, value: Any) -> WriteItem:
    if not isinstance(value, LocalBlock):
        return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
    chunk = value.chunk
    data = TensorWriteData(chunk, Properties.create_from_tensor(value.data), torch.Size(value.shape))
    return WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
