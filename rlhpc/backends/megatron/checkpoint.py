"""Saves a model and its optimizer in Megatron's torch_dist format, in one layout, and loads them in any other.

A distributed optimizer splits flat buffers of master weights and moments over the data-parallel ranks at any element. A
rank's part of a parameter is a few boxes of it, which are written and read in place. Keys and shapes are those of
Megatron's ``fully_reshardable`` (distrib_optimizer.py:1404), which gathers whole parameters on every rank first: each
can read the other's checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

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
from rlhpc.parallel.checkpoint_io import private_buckets
from rlhpc.parallel.compat import megatron_device, patient_saves, restore_rng_states, restricted_load, rng_states
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, flat_boxes

FORMAT = "fully_reshardable"

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


_STATE = {"param", "exp_avg", "exp_avg_sq"}
_KEY = "optimizer.state.{name}.{key}"


@dataclass(eq=False)
class Owned:
    """The rank's part of a parameter: its elements ``start`` to ``stop``, and their float32 tensors by Megatron's names
    ("param" is the master weights)."""

    part: Any  # Megatron's optimizer of the parameter
    parameter: Tensor
    start: int
    stop: int
    tensors: dict[str, Tensor]

    def put_back(self) -> None:
        """Sets the optimizer's state to what was read into ``tensors``, which may be copies."""
        self.part._set_main_param_and_optimizer_states(self.parameter, self.tensors)


@dataclass(frozen=True)
class Fragment:
    """A box of the rank's parameter that is saved as a block of one tensor; gate and up are two fragments."""

    box: Box
    target: ShardedTensor


def common_state(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Parameter groups with rates and step counts in Megatron's layout; equal on every rank."""
    parts = optimizer_parts(optimizer)
    if len(parts) > 1:
        optimizer._synchronize_steps()
    states = {number: {**part.state_dict(), "param_state_sharding_type": FORMAT} for number, part in enumerate(parts)}
    return states if len(parts) > 1 else states[0]


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers inside one: of the dense parameters and of the experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def owned_state(optimizer: MegatronOptimizer) -> Iterator[Owned]:
    """State on this rank, parameter by parameter."""
    for part in optimizer_parts(optimizer):
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        tensors = part._get_main_param_and_optimizer_states(parameter)
                        assert tensors.keys() == _STATE, f"the optimizer stores {sorted(tensors)}"
                        yield Owned(part, parameter, ranges["param"].start, ranges["param"].end, tensors)


def state_shards(owned: Sequence[Owned], models: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Views of ``owned`` as blocks of whole tensors; ``models``: the modules' sharded state."""
    described = {
        entry.data: entry for entry in nested_values(models) if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    shards = [
        shard
        for part in owned
        for name, values in part.tensors.items()
        for shard in _shards(part, values, fragments(described[part.parameter], name))
    ]
    return {str(number): shard for number, shard in enumerate(shards)}


def fragments(described: ShardedTensor | ShardedTensorFactory, name: str) -> list[Fragment]:
    """Places at which a parameter's state ``name`` is saved, from the description of the parameter itself."""
    key, local = _KEY.format(name=name, key=described.key), described.data
    # A factory's parts are views of its argument: their offsets in it determine their boxes.
    whole = torch.empty(local.shape, dtype=torch.float32, device="meta")
    assert len(described.replica_id) == 3, f"{described.key}: (pp, tp, dp) expected, not {described.replica_id}"
    replica = (*described.replica_id[:2], 0)  # data-parallel ranks have different parts, not copies
    if isinstance(described, ShardedTensorFactory):
        targets = list(nested_values(described.build_fn(key, whole, replica, None)))
    else:
        targets = [replace(described, key=key, data=whole, dtype=whole.dtype, replica_id=replica)]
    found = [Fragment(_box(target.data, whole), target) for target in targets]
    assert sum(fragment.box.volume for fragment in found) == whole.numel(), f"{key}: the parts are not views"
    return found


def _box(view: Tensor, whole: Tensor) -> Box:
    assert view.stride() == whole.stride(), f"{tuple(view.shape)} is not a box of {tuple(whole.shape)}"
    start, rest = [], view.storage_offset()
    for size in whole.stride():
        at, rest = divmod(rest, size)
        start.append(at)
    return Box(tuple(start), tuple(a + n for a, n in zip(start, view.shape, strict=True)))


def _shards(owned: Owned, values: Tensor, places: Sequence[Fragment]) -> Iterator[ShardedTensor]:
    assert values.numel() == owned.stop - owned.start, "the state differs in size from the rank's part"
    flat, at = values.detach().view(-1), 0
    for box in flat_boxes(tuple(owned.parameter.shape), owned.start, owned.stop):
        block = flat[at : at + box.volume].view(box.shape)
        at += box.volume
        for place in places:
            met = box.meet(place.box)
            if met is not None:
                yield _shard(block[_within(met, box)], met, place)


def _shard(block: Tensor, met: Box, place: Fragment) -> ShardedTensor:
    """The block as a shard without ``prepend_axis_num``: only then Megatron accepts blocks of unequal sizes."""
    target = place.target
    lead = target.prepend_axis_num
    moved = (at - first for at, first in zip(met.start, place.box.start, strict=True))
    offset = (*target.global_offset[:lead], *map(sum, zip(target.global_offset[lead:], moved, strict=True)))
    data = block[(None,) * lead]
    return replace(
        target,
        data=data,
        local_shape=tuple(data.shape),
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, outer.start, strict=True))
