"""A model and its optimizer in Megatron's own torch_dist format: saved in one layout, loaded in any other."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from rlhpc.parallel.agreement import raise_together
from rlhpc.parallel.compat import megatron_device, patient_saves, restore_rng_states, rng_states
from rlhpc.parallel.saving import private_buckets
from rlhpc.sharding.layout import ParallelLayout

# The optimizer's state is by parameters, not by this layout's buffers.
_LAID_OUT = {
    "distrib_optim_sharding_type": FORMAT,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_RNG_AXES = ("tp", "pp", "ep", "etp")  # ranks that differ along others draw alike


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds of one model: the modules of this rank's stages, and of a trained one the optimizer and
    the states of the random generators."""

    layout: ParallelLayout
    models: Sequence[GPTModel]
    optimizer: MegatronOptimizer | None

    def save(self, folder: Path, *, asynchronous: bool = False) -> BackgroundWrite | None:
        """Each rank writes its own shards into an existing empty folder. Collective.

        ``asynchronous``: what is to be written is copied, a process of its own writes it, and ``finish`` of the answer
        makes the checkpoint whole.
        """
        failures: list[OSError] = []
        with megatron_device(), torch.no_grad(), patient_saves(folder, failures), _plain_errors():
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            content = {**_LAID_OUT, "rng_axes": self._rng_sizes}
            state, owned = {**self._models(group), **self._rng()}, self._owned()
            if self.optimizer is not None:
                state["optimizer"] = common_state(self.optimizer)
            request = dist_checkpointing.save(
                {**state, **self._shards(owned, state)},
                str(folder),
                # What data-parallel ranks hold alike is written by all of them, each a part.
                FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group),
                async_sharded_save=asynchronous,
                content_metadata=content,
            )
            raise_together(next(iter(failures), None))
            return BackgroundWrite(request, folder) if asynchronous else None

    def load(self, folder: Path, *, without_head: bool = False) -> None:
        """Take what was saved, in this layout or another; generators only where they are cut alike. Collective.

        ``without_head``: the head stays as it is, where a critic begins with the weights of another model.
        """
        with megatron_device(), torch.no_grad():
            common = dist_checkpointing.load_common_state_dict(str(folder))
            saved = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
            if self.optimizer is not None:
                self.optimizer.load_state_dict(common["optimizer"])  # first: what is read into may not exist yet
            owned = self._owned()
            template = self._models(parallel_state.get_data_parallel_group(with_context_parallel=True))
            template |= self._shards(owned, template)
            if saved.get("rng_axes") == self._rng_sizes:
                template.update(self._rng())
            if without_head:
                for i in range(len(self.models)):
                    template[f"model{i}"].pop("output_layer.weight", None)
            state = dist_checkpointing.load(template, str(folder))
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"], strict=not without_head)
            for part in owned:
                part.put_back()
            if "rng" in state:
                restore_rng_states(state["rng"])

    def _models(self, group: dist.ProcessGroup) -> dict[str, Any]:
        metadata = {**_LAID_OUT, "dp_cp_group": group}
        return {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(self.models)}

    def _owned(self) -> list[Owned]:
        return [] if self.optimizer is None else list(owned_state(self.optimizer))

    def _shards(self, owned: Sequence[Owned], models: dict[str, Any]) -> dict[str, Any]:
        shards = state_shards(owned, models)
        return {"optimizer_shards": shards} if shards else {}

    @property
    def _rng_sizes(self) -> dict[str, int]:
        return {axis: self.layout.size(axis) for axis in _RNG_AXES}

    def _rng(self) -> dict[str, ShardedObject]:
        """The generators' states, by one rank for all that draw alike. No step of a run draws from them: sampling and
        data have seeds of their own."""
        if self.optimizer is None:
            return {}
        coords = [tuple(self.layout.coord(rank)[axis] for axis in _RNG_AXES) for rank in range(self.layout.world_size)]
        mine, kinds = coords[dist.get_rank()], sorted(set(coords))
        copies = [rank for rank, coord in enumerate(coords) if coord == mine]
        replica = copies.index(dist.get_rank())
        return {"rng": ShardedObject("rng", rng_states(), (len(kinds),), (kinds.index(mine),), replica_id=replica)}


class BackgroundWrite:
    """Shards on their way to disk. A process forked from the rank writes them from private copies of what is on a GPU,
    pinned or shared; of all other memory it sees what was there at the fork."""

    def __init__(self, request: AsyncRequest, folder: Path) -> None:
        self._folder = folder
        self._caller, self._finalize = TemporalAsyncCaller(), request.finalize_fns
        if request.preload_fn is not None:  # there is something to write
            request = request._replace(preload_fn=functools.partial(private_buckets, request.async_fn_args[1]))
        self._caller.schedule_async_call(request._replace(finalize_fns=[]))

    def done(self) -> bool:
        """This rank's writer has ended, well or not."""
        process = self._caller.process
        return process is None or not process.is_alive()

    def finish(self) -> None:
        """Wait for the writer, and make the checkpoint whole; an OSError if it could not be written. Collective."""
        failures: list[OSError] = []
        with megatron_device(), patient_saves(self._folder, failures), _plain_errors():
            self._caller.close()
            for finalize in self._finalize:
                finalize()
        raise_together(next(iter(failures), None))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """An error of the disk as the OSError that it was, on every rank: Megatron tells rank 0 alone, in a traceback."""
    try:
        yield
    except CheckpointException as error:
        found = re.search(r"\[Errno (\d+)\]", "".join(str(failure) for failure, _ in error.failures.values()))
        number = torch.tensor([int(found[1]) if found else 0])
        dist.broadcast(number, src=0)
        if int(number):
            raise OSError(int(number), os.strerror(int(number))) from error
        raise RuntimeError("a checkpoint was not written") from error
