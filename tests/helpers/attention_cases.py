"""Packed batches for tests of attention, and a float64 reference that takes one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhpc.models import shape_of
from tests.helpers.plain_model import FIELDS

MIXED = (11, 3, 40, 7, 1, 22, 64, 5)


@dataclass(frozen=True)
class Case:
    """Heads and sizes of an attention. Queries and keys longer than values come rotated, as in latent attention."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    lengths: tuple[int, ...]

    @property
    def rotates(self) -> bool:
        return self.dim == self.value_dim


CASES = {
    "as many keys as queries": Case(4, 4, 16, 16, MIXED),
    "grouped queries": Case(8, 4, 16, 16, MIXED),
    "two key heads": Case(8, 2, 16, 16, MIXED),
    "three key heads": Case(12, 3, 8, 8, MIXED),
    "one key head": Case(4, 1, 16, 16, MIXED),
    "latent": Case(4, 4, 24, 16, MIXED),
    "short": Case(4, 2, 8, 8, (2, 5, 3, 1)),
    "single tokens": Case(4, 2, 8, 8, (1, 1, 1)),
    "one sequence": Case(4, 2, 8, 8, (97,)),
}


def inputs(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """Random query, key, value and gradient of the output, equal in every process."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(case.heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim)]
    sizes.append((case.heads, case.value_dim))
    tokens = sum(case.lengths)
    return tuple(torch.randn(tokens, *size, generator=generator).to(device, dtype) for size in sizes)


def batch(case: Case, device: str = "cpu") -> Any:
    """A packed batch with the case's lengths and arbitrary tokens."""
    import numpy as np

    from rlhpc.data.collate import pack_batch

    sequences = [(np.arange(length), 1) for length in case.lengths]
    return pack_batch(sequences, sample_ids=range(len(sequences))).to(torch.device(device))


def rotary_table(case: Case, device: str = "cpu") -> Any:
    """Default rotary embedding for the case's head size."""
    from rlhpc.backends.megatron.packed import RotaryTable

    return RotaryTable(shape_of({**FIELDS, "head_dim": case.dim}), torch.device(device))


def attention(case: Case, cp_comm_type: str | None = None, group: Any = None) -> Any:
    """The attention module as Megatron builds it."""
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlhpc.backends.kernels.rotary import rotate
    from rlhpc.backends.megatron.attention import PackedAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.dim,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=case.dim,
    )
    core = PackedAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=cp_comm_type,
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=group),
    )

    def attend(query: Tensor, key: Tensor, value: Tensor, *, packed_seq_params: Any) -> Tensor:
        params = packed_seq_params
        if case.rotates:
            query, key = rotate(query, params.cos, params.sin), rotate(key, params.cos, params.sin)
        return core(query, key, value, packed_seq_params=params)

    return attend


def one_at_a_time(case: Case, query: Tensor, key: Tensor, value: Tensor, rotates: bool | None = None) -> Tensor:
    """[T, heads, value_dim]: causal softmax attention, sequence by sequence."""
    rotates = case.rotates if rotates is None else rotates
    outputs, start = [], 0
    for length in case.lengths:
        q, k, v = (x[start : start + length].double().transpose(0, 1) for x in (query, key, value))
        if rotates:
            q, k = _rotated(q), _rotated(k)
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / case.dim**0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def _rotated(x: Tensor) -> Tensor:
    """Rotary embedding: pairs (i, i + half) rotated by position x theta^(-2i / dim)."""
    length, half = x.size(1), x.size(2) // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def outcome(output: Tensor, gradient: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The output, and the gradients of the leaves for this gradient of the output."""
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def farthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Maximum absolute difference."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
