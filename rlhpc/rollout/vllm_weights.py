"""Parameters of vLLM's model on this rank: checks of names and shapes, and their memory, to be written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.rollout.vllm_memory import free_weights
from rlhpc.sharding.engine_shards import EngineLayout, engine_parameters
from rlhpc.sharding.shards import Shard

TESTED = "0.25 or 0.32"
_DERIVED = ("W_UV", "W_UK_T")  # per-head matrices that vLLM's latent attention derives from kv_b_proj


class Weights(Protocol):
    """An engine's weights; see the methods of ``RolloutEngine`` with these names."""

    shapes: dict[str, tuple[int, ...]]

    def open(self) -> dict[str, Tensor]: ...

    def close(self) -> None: ...

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None: ...

    def shareable(self) -> frozenset[str]: ...

    def share(self, name: str, tensor: Tensor) -> None: ...


class LiveWeights:
    """Parameters that vLLM's kernels use as loaded: on a GPU, where addresses must not change."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, captured: bool) -> None:
        """``captured``: CUDA graphs hold the addresses."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        self._model, self._dtype, self._captured = model, dtype, captured
        self._latent = [module for module in model.modules() if isinstance(module, MLAAttention)]
        derived = {id(own) for module in self._latent for own in module.parameters(recurse=False)}
        self._parameters = {name: own for name, own in model.named_parameters() if id(own) not in derived}
        self.shapes = {name: tuple(own.shape) for name, own in self._parameters.items()}
        self._replaced: dict[str, Tensor] = {}  # vLLM's own tensors, by name of the shared parameter
        self._to_free = False

    def open(self) -> dict[str, Tensor]:
        self._free_replaced()
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def close(self) -> None:
        self._free_replaced()
        for module in self._latent:
            _renew_latent(module, self._dtype)

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        load_all(self._model, tensors)
        self.close()

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


@torch.no_grad()
def load_all(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Loads weights through vLLM's own loader, and asserts that every parameter was loaded."""
    parameters = dict(model.named_parameters())
    loaded = model.load_weights(tensors)
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


def zero_padding(parameters: Mapping[str, Tensor], shards: Iterable[Shard]) -> None:
    """Zeroes the last rows, which pad the vocabulary and are not written by a weight sync."""
    filled: defaultdict[str, int] = defaultdict(int)
    for shard in shards:
        filled[shard.local_name] = max(filled[shard.local_name], shard.local_box.stop[0])
    for name, tensor in parameters.items():
        if filled[name] < len(tensor):
            tensor[filled[name] :].zero_()


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
