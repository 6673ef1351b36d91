"""Weights of vLLM's model on a CPU, where its kernels need them packed. Imported by ``vllm_cpu`` only."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rlhpc.rollout.vllm_weights import load_all, persistent_buffers

# Of freed memory that the C library may hold while weights are packed: to return it after each layer takes a third of a
# small model's weight sync.
_CACHED_BYTES = 1 << 24


@dataclass
class _Plain:
    """A parameter as vLLM's loader fills it, the layers that hold it, and its memory, resized to 0 while unused."""

    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    tensor: Tensor
    nbytes: int
    shared: bool = False

    @property
    def in_use(self) -> bool:
        """True if a layer still uses it unpacked after packing. (vLLM 0.25 packs stacks of experts in place.)"""
        held = any(getattr(layer, name) is self.parameter for layer, name in self.owners)
        return held and self.parameter.data_ptr() == self.tensor.data_ptr() and self.tensor.dim() < 3

    def take(self) -> None:
        """Returns the parameter to its layers, with uninitialized memory."""
        if not self.shared:
            self.tensor.untyped_storage().resize_(self.nbytes)
        self.parameter.data = self.tensor
        for layer, name in self.owners:
            layer.register_parameter(name, self.parameter)

    def free(self) -> None:
        """Frees the memory, even if tensors still refer to it."""
        if not self.shared:
            self.tensor.untyped_storage().resize_(0)


class PackedWeights:
    """A model's parameters: plain while they are written, packed while they are used, without memory while they sleep.

    Packing replaces a layer's weight by an empty one, or its data by another layout. The parameter object, which knows
    how it is sharded and loaded, is stored here and restored before weights are written.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        """Call it before vLLM packs the model for the first time, and ``settle`` after."""
        self._model, self._config = model, vllm_config
        self._plain: dict[str, _Plain] = {}
        self._shareable: frozenset[str] = frozenset()
        known: dict[nn.Parameter, _Plain] = {}  # tied layers share one
        for prefix, layer in model.named_modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter not in known:
                    nbytes = parameter.untyped_storage().nbytes()
                    known[parameter] = self._plain[f"{prefix}.{name}"] = _Plain([], parameter, parameter.data, nbytes)
                known[parameter].owners.append((layer, name))
        self._of_layer: dict[nn.Module, list[_Plain]] = {}
        for plain in self._plain.values():
            for layer, _ in plain.owners:
                self._of_layer.setdefault(layer, []).append(plain)
        self.shapes = {name: tuple(plain.tensor.shape) for name, plain in self._plain.items()}
        self.dtypes = {name: plain.tensor.dtype for name, plain in self._plain.items()}
        self._heads = _heads(model)
        self._freed = 0  # bytes that the C library may hold
        self._others: frozenset[nn.Module] = frozenset()

    def leave(self, other: nn.Module) -> None:
        """Forgets what the model shares with ``other``, and what that has replaced. Call it before ``settle``."""
        self._others = frozenset(other.modules())
        own = set(self._layers)
        self._of_layer = {layer: plain for layer, plain in self._of_layer.items() if layer in own}
        self._plain = {name: plain for name, plain in self._plain.items() if plain.owners[0][0] in own}
        self.shapes, self.dtypes = ({name: given[name] for name in self._plain} for given in (self.shapes, self.dtypes))
        self._heads = _heads(self._model) & own

    def settle(self) -> None:
        """Frees what the packed model does not use, such as the packed copy of an embedding."""
        for layer in self._layers:
            if isinstance(layer, VocabParallelEmbedding):
                self._pack(layer)
        self._free_replaced(*self._plain.values())
        self._shareable = frozenset(name for name, plain in self._plain.items() if plain.in_use)

    def buffers(self) -> dict[str, Tensor]:
        return persistent_buffers(self._model)

    def open(self) -> dict[str, Tensor]:
        """Drops the packed weights and restores every parameter."""
        self._drop_packed()
        for plain in self._plain.values():
            plain.take()
        return {name: plain.tensor for name, plain in self._plain.items()}

    @torch.no_grad()
    def close(self) -> None:
        """Packs layer by layer, so that at most one layer is in memory in both forms."""
        with set_current_vllm_config(self._config):
            for layer in self._layers:
                self._pack(layer)
                self._free_replaced(*self._of_layer.get(layer, ()))
            for layer in self._layers:
                if isinstance(layer, AttentionLayerBase) and hasattr(layer, "process_weights_after_loading"):
                    layer.process_weights_after_loading(self._config.model_config.dtype)
        self._free_replaced(*self._plain.values())

    def fill(self, tensors: Iterator[tuple[str, Tensor]], *, complete: bool = True) -> None:
        """Loads weights through vLLM's own loader into open parameters; ``complete``: asserts that all are loaded."""
        load_all(self._model, tensors, complete=complete)

    def free(self) -> None:
        """Frees plain and packed weights; ``open`` allocates them again."""
        self._drop_packed()
        for plain in self._plain.values():
            plain.free()
        self._return_freed()

    def shareable(self) -> frozenset[str]:
        return self._shareable

    def share(self, name: str, tensor: Tensor) -> None:
        plain = self._plain[name]
        assert tensor.dtype == plain.tensor.dtype, f"{name}: {tensor.dtype}, not {plain.tensor.dtype}"
        assert tensor.is_contiguous(), f"{name}: kernels assume contiguous memory"
        plain.free()
        plain.tensor = plain.parameter.data = tensor
        plain.shared = True

    @property
    def _layers(self) -> list[nn.Module]:
        return [layer for layer in self._model.modules() if layer not in self._others]

    def _pack(self, layer: nn.Module) -> None:
        """Packs a layer as vLLM does, except that an LM head keeps only its packed weights, an embedding only its plain
        ones."""
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, VocabParallelEmbedding):
            layer.cpu_linear = None
            if layer in self._heads:
                plain = next(plain for plain in self._of_layer[layer] if (layer, "weight") in plain.owners)
                head_only = isinstance(layer, ParallelLMHead) and len(plain.owners) == 1
                dispatch_cpu_unquantized_gemm(layer, remove_weight=head_only)
        elif isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)

    def _free_replaced(self, *parameters: _Plain) -> None:
        for plain in parameters:
            if not plain.in_use:
                self._freed += 0 if plain.shared else plain.tensor.untyped_storage().nbytes()
                plain.free()
        if self._freed >= _CACHED_BYTES:
            self._return_freed()

    def _return_freed(self) -> None:
        self._freed = 0
        _return_freed()

    def _drop_packed(self) -> None:
        known = {owner for plain in self._plain.values() for owner in plain.owners}
        for layer in self._layers:
            for name, _ in list(layer.named_parameters(recurse=False)):
                if (layer, name) not in known:
                    delattr(layer, name)  # derived from others
                else:
                    setattr(layer, name, None)
            layer.__dict__.pop("cpu_linear", None)
            # While it is set, vLLM treats the experts' weights as packed (unquantized_fused_moe_method.py:187).
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None


def _heads(model: nn.Module) -> set[nn.Module]:
    """Layers that compute logits: the model's LM heads, else its embedding, which Gemma 2 uses as such."""
    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = {layer for layer in tables if isinstance(layer, ParallelLMHead) or layer is getattr(model, "lm_head", None)}
    return heads or set(tables)


def _return_freed() -> None:
    """Returns memory that the C library has cached to the system; glibc only."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
