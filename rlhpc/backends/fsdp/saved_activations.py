"""Measures the tensors that the modules of an architecture store for their backward pass.

It runs on the meta device, where tensors have sizes and no data: a model of any size takes seconds and no memory.

``python -m rlhpc.backends.fsdp.saved_activations FOLDER DTYPE [--trusted]`` prints the result as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rlhpc.backends.fsdp.recompute import SHARED_EXPERTS, feed_forward_parts
from rlhpc.backends.fsdp.sharded_model import BuildOptions, build_on_meta, decoder_layers, decoder_of
from rlhpc.backends.fsdp.source import read_config
from rlhpc.core.errors import UserError, one_line
from rlhpc.plan.estimates.fsdp_activations import MeasuredActivations

TOKENS = (512, 1024)  # of two passes: what both store alike does not depend on tokens
_NAME = "rlhpc_measured"
_CORE = ("queries", "keys_values", "outputs", "sums")
Place = tuple[int | None, str]  # layer, and part of it


def measure_activations(config: PretrainedConfig, dtype: torch.dtype) -> MeasuredActivations:
    """Bytes per token that a model of this configuration stores in ``dtype``. Raises UserError if its modules need
    data."""
    AttentionInterface.register(_NAME, _attention)
    model = build_on_meta(config, BuildOptions(attention=_NAME, shard_dtype=dtype))
    try:
        few, many = (_Ledger(model).stored(tokens) for tokens in TOKENS)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be measured without data ({one_line(str(error))[:200]})",
            where="model.path",
            remedy="plan with the bound",
        ) from None
    return _coefficients(few, many)


def _coefficients(few: dict[Place, int], many: dict[Place, int]) -> MeasuredActivations:
    """A line through both measurements for each place."""
    slopes = {place: (many[place] - few.get(place, 0)) / (TOKENS[1] - TOKENS[0]) for place in many}
    layers: dict[int, float] = {}
    parts: dict[str, float] = {}
    constant = 0.0
    for (layer, part), slope in slopes.items():
        if layer is not None:
            layers[layer] = layers.get(layer, 0.0) + slope
            parts[part] = parts.get(part, 0.0) + slope
            constant += max(0.0, many[layer, part] - slope * TOKENS[1])
    outside = sum(slope for (layer, _), slope in slopes.items() if layer is None)
    named = {name: parts.get(name, 0.0) for name in (*_CORE, "mlp", "moe", SHARED_EXPERTS)}
    return MeasuredActivations(
        sum(layers.values()), outside, max(layers.values()), constant / max(1, len(layers)), **named
    )


class _Ledger:
    """Storages that autograd holds, each counted where it is stored first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._found: dict[int, tuple[Place, Tensor]] = {}  # tensors: alive, so that no other takes their place
        weights = (*model.parameters(), *model.buffers())
        self._left_out = {tensor.untyped_storage()._cdata for tensor in weights}
        self._layer: int | None = None
        self._part = ""

    def stored(self, tokens: int) -> dict[Place, int]:
        """Bytes of a pass over ``tokens`` tokens by place."""
        device, decoder = torch.device("meta"), decoder_of(self._model)
        inputs = torch.zeros(1, tokens, dtype=torch.long, device=device)
        positions = torch.arange(tokens, device=device)[None]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._take, lambda tensor: tensor)
        with self._watching(), hooks, _GroupedProducts(), _attending(self):
            decoder(input_ids=inputs, position_ids=positions, use_cache=False)
        found: dict[Place, int] = {}
        for place, tensor in self._found.values():
            found[place] = found.get(place, 0) + tensor.untyped_storage().nbytes()
        return found

    def take(self, tensor: Tensor, part: str) -> None:
        """Counts the tensor's storage at the current layer, unless it is known."""
        key = tensor.untyped_storage()._cdata
        if key not in self._left_out:
            self._found.setdefault(key, ((self._layer, part), tensor))

    def _take(self, tensor: Tensor) -> Tensor:
        self.take(tensor, self._part)
        return tensor

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Context in which the ledger knows which layer and part computes."""
        with ExitStack() as stack:
            for number, layer in enumerate(decoder_layers(self._model)):
                stack.callback(layer.register_forward_pre_hook(self._entering("_layer", number)).remove)
                stack.callback(layer.register_forward_hook(self._entering("_layer", None)).remove)
                for part, module in feed_forward_parts(layer):
                    outer = "moe" if part == SHARED_EXPERTS else ""
                    stack.callback(module.register_forward_pre_hook(self._keep_inputs).remove)
                    stack.callback(module.register_forward_pre_hook(self._entering("_part", part)).remove)
                    stack.callback(module.register_forward_hook(self._entering("_part", outer)).remove)
            yield

    def _entering(self, name: str, place: int | str | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            setattr(self, name, place)

        return hook

    def _keep_inputs(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Counts a part's inputs outside of it: recomputation keeps them."""
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.take(tensor, self._part)


class _Core(torch.autograd.Function):
    """Stores what fused attention stores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("only forward passes are measured")


_ledger: _Ledger | None = None


@contextmanager
def _attending(ledger: _Ledger) -> Iterator[None]:
    global _ledger
    before, _ledger = _ledger, ledger
    try:
        yield
    finally:
        _ledger = before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Stand-in for packed attention. Values that are narrower than keys are padded, and so is the output."""
    assert _ledger is not None, "attention outside of a measurement"
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    width = max(key.size(-1), value.size(-1))
    own = [x if x.size(-1) == width else nn.functional.pad(x, (0, width - x.size(-1))) for x in (query, key, value)]
    for tensor, part in zip(own, ("queries", "keys_values", "keys_values"), strict=True):
        _ledger.take(tensor, part)
    output = _Core.apply(query, key, value)
    _ledger.take(output.new_empty(query.shape[:2], dtype=torch.float32), "sums")
    _ledger.take(output if value.size(-1) == width else output.new_empty(*query.shape[:-1], width), "outputs")
    return output[None].contiguous(), None


class _GroupedProducts(TorchFunctionMode):
    """Replaces grouped products, which refuse float32 on the meta device, by what stores the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._grouped_mm:  # which nn.functional.grouped_mm calls
            return _Grouped.apply(args[0], args[1])
        return function(*args, **(kwargs or {}))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.size(-1))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("only forward passes are measured")


def main() -> None:
    folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    try:
        config = read_config(folder, trusted="--trusted" in sys.argv[3:])
        found = asdict(measure_activations(config, dtype))
    except UserError as error:
        found = {"error": error.message}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
