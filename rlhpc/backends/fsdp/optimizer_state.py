"""State of an optimizer by the names of its parameters, as blocks that any number of ranks can load.

State of a parameter may be DTensors sharded as the parameter is, tensors that are equal on all ranks, and plain values.
Options of parameter groups are plain values. 8-bit moments have a scale for each 256 elements of a shard: their blocks
fit the same number of shards only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlhpc.backends.fsdp.checkpoint_files import LocalBlock
from rlhpc.checkpoint.formats.torch_dist_metadata import TORCH_DTYPES, Index
from rlhpc.core.errors import UserError

OPTIMIZER = "optimizer"
_SHARDED, _WHOLE, _PACKED = "sharded", "whole", "packed"
# Options that select an implementation for the device: of the process, not of the checkpoint.
_OWN_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class NamedOptimizer:
    """``names``: of all parameters of the model. ``block_of``: a local part of a parameter, by its name, as a block."""

    optimizer: torch.optim.Optimizer
    names: Mapping[Tensor, str]
    block_of: Callable[[str, Tensor], LocalBlock]

    @property
    def _packs(self) -> bool:
        """True if the moments of some parameters, not the same ones on all ranks, have few bits."""
        return type(self.optimizer).__module__.startswith("torchao.")

    def state(self) -> dict[str, Any]:
        """Blocks, and under ``OPTIMIZER`` what is no tensor: options, and which state each parameter has."""
        blocks: dict[str, Any] = {}
        kept: dict[str, dict[str, Any]] = {}
        for parameter, values in self.optimizer.state.items():
            name = self.names[parameter]
            kept[name] = {key: self._entry(blocks, name, key, value) for key, value in values.items()}
        return {**blocks, OPTIMIZER: {"groups": self._groups(), "state": kept}}

    def _entry(self, blocks: dict[str, Any], name: str, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if not _is_plain(value):
                raise UserError(
                    f"the optimizer's {key} is {type(value).__name__}, which checkpoints do not contain",
                    where="actor.optimizer.function",
                    remedy="keep state in tensors and plain values",
                )
            return (None, value)
        if isinstance(value, DTensor) and self._packs:
            blocks |= _packed_blocks(_key(name, key), value)
            return (_PACKED, _shards(value)[1])
        if isinstance(value, DTensor):
            blocks[_key(name, key)] = self.block_of(name, value.to_local())
            return (_SHARDED, None)
        blocks[_key(name, key)] = LocalBlock(tuple(value.shape), (0,) * value.dim(), value)
        return (_WHOLE, None)

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {
                **{key: value for key, value in group.items() if _is_plain(value)},
                "params": [self.names[parameter] for parameter in group["params"]],
            }
            for group in self.optimizer.param_groups
        ]

    def templates(self, saved: Mapping[str, Any], index: Index, folder: Path) -> Restored:
        """Uninitialised tensors for what ``saved``, the value under ``OPTIMIZER``, describes. Raises UserError for
        state that does not fit the parameters."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        state: dict[Tensor, dict[str, Any]] = {}
        blocks: dict[str, LocalBlock] = {}
        for name, entries in saved["state"].items():
            if name not in parameters:
                raise _unfit(f"has optimizer state of {name!r}, which the model has not", folder)
            parameter = parameters[name]
            self._check(name, parameter, entries, folder)
            state[parameter] = {}
            for key, (kind, value) in entries.items():
                if kind == _PACKED:
                    value = self.optimizer.state[parameter][key]
                    blocks |= _packed_blocks(_key(name, key), value)
                elif kind is not None:
                    value, blocks[_key(name, key)] = self._template(name, parameter, key, kind, index, folder)
                state[parameter][key] = value
        return Restored(self.optimizer, state, blocks, self._options(saved["groups"]))

    def _check(self, name: str, parameter: Tensor, entries: Mapping[str, tuple[Any, Any]], folder: Path) -> None:
        """Refuses state of another optimizer, as far as this one has some already, and packed state of other shards."""
        present = self.optimizer.state.get(parameter, {})
        kinds = {kind for kind, _ in entries.values()}
        if (present and present.keys() != entries.keys()) or self._packs == (_SHARDED in kinds):
            raise _unfit(f"has {sorted(entries)} of another optimizer for {name!r}", folder)
        for key, (kind, shards) in entries.items():
            if kind == _PACKED and shards != _shards(present[key])[1]:
                message = f"has 8-bit moments of {shards} shards, which fit no other number"
                raise UserError(
                    message, where=str(folder), remedy=f"resume on {shards} ranks for each copy of the weights"
                )

    def _template(
        self, name: str, parameter: Tensor, key: str, kind: str, index: Index, folder: Path
    ) -> tuple[Tensor, LocalBlock]:
        """A tensor to read into: present state if it has the same form, as memory may not suffice for both."""
        stored = index.tensors[_key(name, key)]
        dtype, sharded = torch_dtype(stored.dtype), kind == _SHARDED
        if sharded and stored.shape != tuple(parameter.shape):
            raise _unfit(f"has {key} of {name!r} of shape {list(stored.shape)}", folder)
        value = self.optimizer.state.get(parameter, {}).get(key)
        form = (dtype, stored.shape, sharded)
        if not isinstance(value, Tensor) or (value.dtype, tuple(value.shape), isinstance(value, DTensor)) != form:
            empty = torch.empty_like(parameter, dtype=dtype, requires_grad=False) if sharded else None
            value = torch.empty(stored.shape, dtype=dtype) if empty is None else empty
        if isinstance(value, DTensor):
            return value, self.block_of(name, value.to_local())
        return value, LocalBlock(stored.shape, (0,) * len(stored.shape), value)

    def _options(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Options of each group: saved ones if the groups have the same parameters."""
        present = self.optimizer.param_groups
        if [set(group["params"]) for group in saved] != [set(group["params"]) for group in self._groups()]:
            return [dict(group) for group in present]
        return [
            {**group, **{key: value for key, value in old.items() if key in group and key not in _OWN_OPTIONS}}
            for group, old in zip(present, saved, strict=True)
        ]


@dataclass(frozen=True)
class Restored:
    """State to be read into ``blocks``, which share the memory of ``state``."""

    optimizer: torch.optim.Optimizer
    state: dict[Tensor, dict[str, Any]]
    blocks: dict[str, LocalBlock]
    options: list[dict[str, Any]]

    def put_back(self) -> None:
        """Gives the optimizer its state."""
        numbers = {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        groups = [
            {**options, "params": [numbers[p] for p in group["params"]]}
            for options, group in zip(self.options, self.optimizer.param_groups, strict=True)
        ]
        state = {numbers[parameter]: values for parameter, values in self.state.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in self.state.items():
            for key, value in values.items():
                # torch casts state to the dtype of its parameter.
                if isinstance(value, Tensor) and self.optimizer.state[parameter][key].dtype != value.dtype:
                    self.optimizer.state[parameter][key] = value.to(parameter.device)


def _packed_blocks(key: str, value: DTensor) -> dict[str, LocalBlock]:
    """This shard's tensors of packed state by keys of its own; one tensor if the shard is too small to be packed."""
    local = value.to_local()
    parts = {"": local}
    if is_traceable_wrapper_subclass(local):
        parts = {f".{name}": getattr(local, name) for name in local.__tensor_flatten__()[0]}
    number = _shards(value)[0]
    return {
        f"{key}{part}.{number}": LocalBlock(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for part, tensor in parts.items()
    }


def _shards(value: DTensor) -> tuple[int, int]:
    """This rank's shard of a copy of the weights, and the number of shards."""
    mesh = value.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def torch_dtype(name: str) -> torch.dtype:
    """Element type by its name in an index."""
    found: torch.dtype = getattr(torch, TORCH_DTYPES.get(name, name))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _key(name: str, key: str) -> str:
    return f"{OPTIMIZER}.{key}.{name}"


def _unfit(message: str, folder: Path) -> UserError:
    return UserError(message, where=str(folder), remedy="resume with the model and optimizer that it was saved with")
