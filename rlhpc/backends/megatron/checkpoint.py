"""Saves a model and its optimizer in Megatron's torch_dist format, in one layout, and loads them in any other."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import CheckpointException

from rlhpc.backends.megatron.optimizer_shards import FORMAT, Owned, common_state, owned_state, state_shards
from rlhpc.checkpoint.formats.megatron_folder import (
    TRACKER,
    checkpoint_folder,
    common_values,
    iteration_name,
    tracker_text,
)
from rlhpc.checkpoint.formats.torch_dist import checkpoint_parameters, extra_states, found_form
from rlhpc.checkpoint.formats.weight_table import refuse_other_backend
from rlhpc.core.files import make_folder, write_atomic
from rlhpc.models import ModelShape
from rlhpc.parallel.agreement import on_first_rank, raise_together
from rlhpc.parallel.compat import megatron_device, patient_saves, restore_rng_states, restricted_load, rng_states
from rlhpc.parallel.saving import private_buckets
from rlhpc.sharding.layout import ParallelLayout

# Optimizer state is saved by parameters, not by this layout's buffers.
_METADATA = {
    "distrib_optim_sharding_type": FORMAT,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_RNG_AXES = ("tp", "pp", "ep", "etp")  # ranks that differ along other axes have equal generators


class ModelCheckpoint:
    """Checkpoints of one model: the modules of this rank's stages and, if it is trained, its optimizer and the states
    of the random generators."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        models: Sequence[GPTModel],
        optimizer: MegatronOptimizer | None,
    ) -> None:
        self.shape, self.layout, self.models, self.optimizer = shape, layout, models, optimizer

    def save(self, home: Path, step: int = 0, *, asynchronous: bool = False) -> ForkedWrite | None:
        """Writes this rank's shards into an existing empty folder, as the checkpoint of iteration ``step`` of
        Megatron-LM. Collective.

        ``asynchronous``: copies the state and writes it in a process of its own; ``finish`` of the result completes the
        checkpoint.
        """
        folder = home / iteration_name(step)
        on_first_rank(lambda: self._begin(home, folder, step))
        failures: list[OSError] = []
        with megatron_device(), torch.no_grad(), patient_saves(folder, failures), _plain_errors():
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            content = {**_METADATA, "rng_axes": self._rng_sizes}
            common = common_values(self.shape, self.layout, step)
            state, owned = {**common, "args": Namespace(**common["args"])}, self._owned()
            state |= {**self._models(group), **self._rng(), "extra_states": self._extra_states()}
            if self.optimizer is not None:
                state["optimizer"] = common_state(self.optimizer)
            request = dist_checkpointing.save(
                {**state, **self._shards(owned, state)},
                str(folder),
                # State that data-parallel ranks have in common is written by all of them, a part each.
                FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group),
                async_sharded_save=asynchronous,
                content_metadata=content,
            )
            raise_together(next(iter(failures), None))
            return ForkedWrite(request, folder) if asynchronous else None

    def load(self, home: Path) -> None:
        """Loads what was saved in any layout; generators only if the axes that they differ along are equal. Collective.

        Raises UserError for a checkpoint that contains more than plain values, or has other names.
        """
        refuse_other_backend(home, "megatron")
        folder = checkpoint_folder(home)
        with megatron_device(), torch.no_grad(), restricted_load(folder) as index:
            found_form(self.shape, index.tensors.keys(), folder)
            common = dist_checkpointing.load_common_state_dict(str(folder))
            saved = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
            if self.optimizer is not None:
                self.optimizer.load_state_dict(common["optimizer"])  # first: the tensors to read into may not exist yet
            owned = self._owned()
            template = self._models(parallel_state.get_data_parallel_group(with_context_parallel=True))
            template |= self._shards(owned, template)
            if saved.get("rng_axes") == self._rng_sizes:
                template.update(self._rng())
            state = dist_checkpointing.load(template, str(folder))
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"])
            for part in owned:
                part.put_back()
            if "rng" in state:
                restore_rng_states(state["rng"])

    def _models(self, group: dist.ProcessGroup) -> dict[str, Any]:
        metadata = {**_METADATA, "dp_cp_group": group}
        return {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(self.models)}

    def _begin(self, home: Path, folder: Path, step: int) -> None:
        make_folder(folder)
        write_atomic(home / TRACKER, tracker_text(step))

    def _extra_states(self) -> dict[str, ShardedObject]:
        """This rank's part of the empty states that modules of Transformer Engine would have beside those that these
        modules save."""
        parameters = checkpoint_parameters(self.shape)
        missing = sorted({*extra_states(parameters)} - {*extra_states(parameters, linear=True)})
        mine = missing[dist.get_rank() :: dist.get_world_size()]
        return {key: ShardedObject.empty_from_unique_key(key) for key in mine}

    def _owned(self) -> list[Owned]:
        return [] if self.optimizer is None else list(owned_state(self.optimizer))

    def _shards(self, owned: Sequence[Owned], models: dict[str, Any]) -> dict[str, Any]:
        shards = state_shards(owned, models)
        return {"optimizer_shards": shards} if shards else {}

    @property
    def _rng_sizes(self) -> dict[str, int]:
        return {axis: self.layout.size(axis) for axis in _RNG_AXES}

    def _rng(self) -> dict[str, ShardedObject]:
        """States of the generators, written by one of the ranks that have them in common. No step of a run uses them:
        sampling and data have seeds of their own."""
        if self.optimizer is None:
            return {}
        coords = [tuple(self.layout.coord(rank)[axis] for axis in _RNG_AXES) for rank in range(self.layout.world_size)]
        mine, kinds = coords[dist.get_rank()], sorted(set(coords))
        copies = [rank for rank, coord in enumerate(coords) if coord == mine]
        replica = copies.index(dist.get_rank())
        return {"rng": ShardedObject("rng", rng_states(), (len(kinds),), (kinds.index(mine),), replica_id=replica)}


class ForkedWrite:
    """Background write of a rank's shards; implements ``BackgroundWrite``.

    A process forked from the rank writes private copies of tensors on a GPU and in pinned or shared memory; of all
    other memory it has the contents at the time of the fork.
    """

    def __init__(self, request: AsyncRequest, folder: Path) -> None:
        self._folder = folder
        self._caller, self._finalize = TemporalAsyncCaller(), request.finalize_fns
        if request.preload_fn is not None:  # None: nothing to write
            request = request._replace(preload_fn=functools.partial(private_buckets, request.async_fn_args[1]))
        self._caller.schedule_async_call(request._replace(finalize_fns=[]))

    def done(self) -> bool:
        """See ``BackgroundWrite``."""
        process = self._caller.process
        return process is None or not process.is_alive()

    def finish(self) -> None:
        """Waits for the writer and completes the checkpoint; raises OSError if it could not be written. Collective."""
        failures: list[OSError] = []
        with megatron_device(), patient_saves(self._folder, failures), _plain_errors():
            self._caller.close()
            for finalize in self._finalize:
                finalize()
        raise_together(next(iter(failures), None))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises the original OSError of a failed write on every rank: Megatron raises it on rank 0 alone, as text."""
    try:
        yield
    except CheckpointException as error:
        found = re.search(r"\[Errno (\d+)\]", "".join(str(failure) for failure, _ in error.failures.values()))
        number = torch.tensor([int(found[1]) if found else 0])
        dist.broadcast(number, src=0)
        if int(number):
            raise OSError(int(number), os.strerror(int(number))) from error
        raise RuntimeError("writing a checkpoint failed") from error
