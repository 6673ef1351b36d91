"""Feed-forward parts of Megatron's layers: SwiGLU in one step with the product after it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.swiglu import swiglu_linear


class SwigluRowLinear(RowParallelLinear):
    """Megatron's row-parallel linear layer with gate and up for its input."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        return swiglu_linear(input, weight)


SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=SwigluRowLinear)


class _SwigluMLP(MLP):
    def forward(
        self, hidden_states: Float[Tensor, "T 1 hidden"], *_: Any, **__: Any
    ) -> tuple[Float[Tensor, "T 1 hidden"], None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gate_up)


class FeedForward(_SwigluMLP):
    """Feed-forward part of a dense layer. A class and no ModuleSpec: Megatron gives process groups to its own class
    alone, and warns of others in a ModuleSpec (transformer_layer.py:366)."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config, SUBMODULES, ffn_hidden_size=config.ffn_hidden_size)


class SharedExperts(SharedExpertMLP, _SwigluMLP):
    """Experts of every token, of which an expert layer may have some."""
