"""Parameters of vLLM's model on this rank: checks of names and shapes, and their memory, to be written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.rollout.discovered_layout import View
from rlhpc.rollout.vllm_memory import free_weights
from rlhpc.sharding.engine_shards import EngineLayout, engine_parameters
from rlhpc.sharding.shards import Shard

TESTED = "0.25 or 0.32"
_DERIVED = ("W_UV", "W_UK_T")  # per-head matrices that vLLM's latent attention derives from kv_b_proj


class Layout(Protocol):
    """Places of tensors in an engine's parameters on one rank. ``views``: parameters with their axes in another order,
    by the name that shards give them."""

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def views(self) -> Mapping[str, View]: ...

    def zero_padding(self, parameters: Mapping[str, Tensor]) -> None:
        """Zeroes what a weight sync does not write."""


class Weights(Protocol):
    """An engine's weights; see the methods of ``RolloutEngine`` with these names."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def buffers(self) -> dict[str, Tensor]: ...

    def open(self) -> dict[str, Tensor]: ...

    def close(self) -> None: ...

    def fill(self, tensors: Iterator[tuple[str, Tensor]], *, complete: bool = True) -> None: ...

    def shareable(self) -> frozenset[str]: ...

    def share(self, name: str, tensor: Tensor) -> None: ...


class LiveWeights:
    """Parameters that vLLM's kernels use as loaded: on a GPU, where addresses must not change."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, captured: bool, but: nn.Module | None = None) -> None:
        """``captured``: CUDA graphs hold the addresses. ``but``: a model whose parameters this one uses too, and which
        are not its own."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        self._model, self._dtype, self._captured = model, dtype, captured
        self._latent = [module for module in model.modules() if isinstance(module, MLAAttention)]
        derived = {id(own) for module in self._latent for own in module.parameters(recurse=False)}
        derived |= {id(own) for own in (but.parameters() if but is not None else ())}
        self._parameters = {name: own for name, own in model.named_parameters() if id(own) not in derived}
        self.shapes = {name: tuple(own.shape) for name, own in self._parameters.items()}
        self.dtypes = {name: own.dtype for name, own in self._parameters.items()}
        self._replaced: dict[str, Tensor] = {}  # vLLM's own tensors, by name of the shared parameter
        self._to_free = False

    def buffers(self) -> dict[str, Tensor]:
        return persistent_buffers(self._model)

    def open(self) -> dict[str, Tensor]:
        self._free_replaced()
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def close(self) -> None:
        self._free_replaced()
        for module in self._latent:
            _renew_latent(module, self._dtype)

    def fill(self, tensors: Iterator[tuple[str, Tensor]], *, complete: bool = True) -> None:
        load_all(self._model, tensors, complete=complete)

    def shareable(self) -> frozenset[str]:
        if self._captured:
            return frozenset()
        sources = {id(module.kv_b_proj.weight) for module in self._latent}
        return frozenset(name for name, own in self._parameters.items() if id(own) not in sources)

    def share(self, name: str, tensor: Tensor) -> None:
        parameter = self._parameters[name]
        assert tensor.dtype == parameter.dtype, f"{name}: {tensor.dtype}, not {parameter.dtype}"
        if name not in self._replaced:
            self._replaced[name], self._to_free = parameter.data, True
        parameter.data = tensor

    def _free_replaced(self) -> None:
        if self._to_free:
            used = [*self._model.parameters(), *self._model.buffers()]  # some may be views of replaced ones
            free_weights(list(self._replaced.values()), used)
            self._to_free = False


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a file may contain, such as a layer's scalar in Gemma 4, by name. They have memory at all times."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point() and buffer.itemsize > 1
    }


@torch.no_grad()
def load_all(model: nn.Module, tensors: Iterator[tuple[str, Tensor]], *, complete: bool = True) -> None:
    """Loads weights through vLLM's own loader; ``complete``: asserts that every parameter was loaded."""
    parameters = dict(model.named_parameters())
    loaded = model.load_weights(tensors)
    if not complete or loaded is None:  # some loaders do not say what they have loaded
        return
    # Latent attention registers views of a parameter as parameters.
    storages = {parameters[name].untyped_storage().data_ptr() for name in loaded & parameters.keys()}
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in loaded and parameter.untyped_storage().data_ptr() not in storages
    ]
    assert not missing, f"no weights for {sorted(missing)}"


def check_parameters(found: Mapping[str, tuple[int, ...]], shape: ModelShape, layout: EngineLayout) -> None:
    """Raises a UserError unless the engine's parameters are those that a weight sync plan writes."""
    expected = engine_parameters(shape, layout)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) == expected.get(name):
            continue
        if shape.tied_embeddings and name == "lm_head.weight":
            raise UserError(
                "tie_word_embeddings is true, but the model folder contains an lm_head.weight, which vLLM would use",
                where="model",
                remedy="set tie_word_embeddings to false in config.json, or remove that tensor",
            )
        import vllm

        has, wants = (f"shape {list(size)}" if size else "nothing" for size in (found.get(name), expected.get(name)))
        raise UserError(
            f"vLLM {vllm.__version__} has other parameters than this version of rlhpc supports: {name} has {has},"
            f" expected was {wants}",
            where="rollout",
            remedy=f"install a tested version of vLLM, {TESTED}",
        )


class TableLayout:
    """The layout of a known family, whose parameters are padded by rows of the vocabulary only."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards: Sequence[Shard] = shards
        self.views: Mapping[str, View] = {}
        self._filled: defaultdict[str, int] = defaultdict(int)
        for shard in shards:
            self._filled[shard.local_name] = max(self._filled[shard.local_name], shard.local_box.stop[0])

    def zero_padding(self, parameters: Mapping[str, Tensor]) -> None:
        """See ``Layout``."""
        for name, tensor in parameters.items():
            if self._filled[name] < len(tensor):
                tensor[self._filled[name] :].zero_()


@torch.no_grad()
def _renew_latent(module: Any, dtype: torch.dtype) -> None:
    """Recomputes in place what latent attention derives: CUDA graphs hold the addresses."""
    source = module.kv_b_proj.weight.untyped_storage().data_ptr()
    before = {name: getattr(module, name) for name in _DERIVED}
    if all(tensor.untyped_storage().data_ptr() == source for tensor in before.values()):
        return
    module.process_weights_after_loading(dtype)
    for name, tensor in before.items():
        new = getattr(module, name)
        if new.data_ptr() != tensor.data_ptr():
            tensor.copy_(new)
            setattr(module, name, tensor)
