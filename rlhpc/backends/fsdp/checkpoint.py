"""Checkpoints of a sharded model and its optimizer, which ranks of any number and mesh can load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from rlhpc.backends.fsdp.checkpoint_files import (
    BlockReader,
    BlockWriter,
    LoadBlocks,
    LocalBlock,
    SaveBlocks,
    without_empty,
)
from rlhpc.backends.fsdp.optimizer_state import OPTIMIZER, NamedOptimizer
from rlhpc.backends.fsdp.sharded_model import SCORE, ShardedModel
from rlhpc.backends.fsdp.weight_shards import WeightShards
from rlhpc.checkpoint.formats.safetensors_headers import DTYPES
from rlhpc.checkpoint.formats.torch_archive import DISTRUST
from rlhpc.checkpoint.formats.torch_dist_metadata import TABLE, Index
from rlhpc.checkpoint.formats.weight_table import TablePiece, TableWeight, refuse_other_backend, table_text
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import write_atomic
from rlhpc.core.storage import StorageError
from rlhpc.parallel.agreement import on_first_rank
from rlhpc.parallel.checkpoint_io import RestrictedLoad
from rlhpc.sharding.mesh_sizes import held_rows

_VALUE_HEAD = f"{SCORE}.weight"
_COPY_AGAIN = "copy the checkpoint again"
_LONGEST_REASON = 200  # letters; torch explains its restricted unpickler


class ShardedCheckpoint:
    """Checkpoints of one model: this rank's shards of its parameters, its buffers, and the state of its optimizer if it
    is trained."""

    def __init__(self, model: ShardedModel, weights: WeightShards) -> None:
        self._model, self._weights = model, weights
        self._group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def save(
        self, folder: Path, optimizer: torch.optim.Optimizer | None = None, *, asynchronous: bool = False
    ) -> ThreadedWrite | None:
        """Writes this rank's shards into an existing empty folder. Collective over all ranks.

        ``asynchronous``: copies the state, and writes it in a thread; ``finish`` of the result completes the
        checkpoint.
        """
        self._model.reshard()
        on_first_rank(lambda: write_atomic(folder / TABLE, table_text(self._table())))
        state: dict[str, Any] = dict(self._blocks())
        if optimizer is not None:
            state |= self._named(optimizer).state()
        state = without_empty(state)
        writer = BlockWriter(folder, background=asynchronous)
        if asynchronous:
            saved = dcp.async_save(
                state, storage_writer=writer, planner=SaveBlocks(), process_group=self._background_group()
            )
            assert isinstance(saved, Future)
            return ThreadedWrite(saved)
        with _plain_errors():
            dcp.save(state, storage_writer=writer, planner=SaveBlocks())
        return None

    @torch.no_grad()
    def load(self, folder: Path, optimizer: torch.optim.Optimizer | None = None, *, without_head: bool = False) -> None:
        """Loads what was saved on any number of ranks; without ``optimizer`` the weights alone. Collective over all
        ranks.

        ``without_head``: the checkpoint may lack the value head, which is zero then: for a critic that starts from the
        weights of another model. Raises UserError for a checkpoint that is not of this model, or contains more than
        plain values.
        """
        refuse_other_backend(folder, "fsdp")
        self._model.reshard()
        restricted = RestrictedLoad(folder)
        blocks = self._blocks()
        if without_head and _VALUE_HEAD in blocks and _VALUE_HEAD not in restricted.index.tensors:
            blocks.pop(_VALUE_HEAD).data.zero_()
        _check_shapes(blocks, restricted.index, folder)
        restored = None
        if optimizer is not None:
            if OPTIMIZER not in restricted.index.objects:
                raise UserError("has no optimizer state", where=str(folder), remedy="resume from a trained model")
            saved = restricted.value(OPTIMIZER)
            try:
                restored = self._named(optimizer).templates(saved, restricted.index, folder)
            except UserError:
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                message = f"has damaged optimizer state ({type(error).__name__})"
                raise UserError(message, where=str(folder), remedy=_COPY_AGAIN) from None
            blocks |= restored.blocks
        with _plain_errors(folder):
            dcp.load(without_empty(blocks), storage_reader=BlockReader(folder, restricted), planner=LoadBlocks())
        if restored is not None:
            restored.put_back()

    def _blocks(self) -> dict[str, LocalBlock]:
        """Parameters, and buffers that files contain."""
        return {name: self._block_of(name, self._weights.local(name)) for name in self._weights.shapes}

    def _block_of(self, name: str, local: Tensor) -> LocalBlock:
        """A local part of a parameter, or of a tensor that is sharded as it is."""
        shape, start = self._weights.shapes[name], 0
        if self._weights.is_sharded(name):
            sizes = self._model.meshes.sizes
            rows = held_rows(shape[0], sizes.shards, sizes.shard_index(dist.get_rank()))
            start = rows.start
            assert local.shape == (len(rows), *shape[1:]), f"{tuple(local.shape)} of {name} is not its shard's"
        return LocalBlock(shape, (start, *(0 for _ in shape[1:])), local)

    def _named(self, optimizer: torch.optim.Optimizer) -> NamedOptimizer:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.module.named_parameters()}
        return NamedOptimizer(optimizer, names, self._block_of)

    def _table(self) -> list[TableWeight]:
        dtype = DTYPES[str(self._model.options.compute_dtype).removeprefix("torch.")]
        return [
            TableWeight(
                weight.tensor,
                "F32" if weight.tensor.float32 else dtype,
                tuple(TablePiece(piece.box, piece.parameter, piece.start) for piece in weight.pieces),
            )
            for weight in self._weights.weights
        ]

    def _background_group(self) -> dist.ProcessGroup:
        """Group of all ranks for the collectives of a thread: gloo's of two threads in one group would mix."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        assert isinstance(self._group, dist.ProcessGroup)
        return self._group


class ThreadedWrite:
    """Background write of a rank's shards; implements ``BackgroundWrite``."""

    def __init__(self, saved: Future[Any]) -> None:
        self._saved = saved

    def done(self) -> bool:
        """See ``BackgroundWrite``."""
        return self._saved.done()

    def finish(self) -> None:
        """Waits for the thread, which completes the checkpoint; raises OSError if it could not be written."""
        with _plain_errors():
            self._saved.result()


def _check_shapes(blocks: dict[str, LocalBlock], index: Index, folder: Path) -> None:
    for name, block in blocks.items():
        saved = index.tensors.get(name)
        if saved is None:
            weights = [key for key in index.tensors if not key.startswith(f"{OPTIMIZER}.")]
            raise UserError(
                f"the checkpoint has no {name!r}, which the model requires",
                where=str(folder),
                remedy=did_you_mean(name, weights),
            )
        if saved.shape != block.shape:
            raise UserError(
                f"{name!r} has shape {list(saved.shape)}, the model requires {list(block.shape)}",
                where=str(folder),
                remedy="use the model.path that the checkpoint was trained from",
            )


@contextlib.contextmanager
def _plain_errors(read: Path | None = None) -> Iterator[None]:
    """Raises the file system's error of a rank on every rank, which PyTorch has gathered into one of its own. ``read``:
    the folder that is read, in which anything else is the fault of its files."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        rank = dist.get_rank()
        found = failures.get(rank)
        if not isinstance(found, OSError):
            rank, found = next(
                ((rank, failure) for rank, failure in sorted(failures.items()) if isinstance(failure, OSError)),
                (rank, None),
            )
        if found is None and read is not None:
            first = next(iter(failures.values()))
            message = f"cannot be read ({type(first).__name__}: {str(first)[:_LONGEST_REASON]})"
            remedy = f"{_COPY_AGAIN}; {DISTRUST}"
            raise UserError(message, where=str(read), remedy=remedy) from None
        if found is None:
            raise RuntimeError("writing a checkpoint failed") from error
        if rank == dist.get_rank():
            raise found from None
        kind = StorageError if isinstance(found, StorageError) else OSError
        raise kind(found.errno, f"{found.strerror or found} (on rank {rank})", found.filename) from None
