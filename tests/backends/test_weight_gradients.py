"""Gradients of weights, added to float32 buffers in the backward pass itself: the same as gradients of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rlhpc.backends.kernels import gradients
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.tiny_models import make_model
from tests.helpers.training import (
    TOKENS,
    batches_of,
    make_actor,
    negative_log_likelihood,
    optimizer_section,
    separate_gradients,
)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_a_product_is_added_to_the_buffer(dtype: torch.dtype, near: float) -> None:
    output_gradient, x = torch.randn(30, 4).to(dtype), torch.randn(30, 6).to(dtype)
    start = torch.randn(4, 6)
    buffer = start.clone()
    gradients.add_product(buffer, output_gradient, x)
    assert torch.allclose(buffer, start + output_gradient.float().t() @ x.float(), atol=near)


def test_a_weight_without_buffer_gets_its_gradient() -> None:
    weight, output_gradient, x = torch.randn(4, 6), torch.randn(30, 4), torch.randn(30, 6)
    assert torch.equal(gradients.weight_gradient(weight, output_gradient, x), output_gradient.t() @ x)


def test_a_gpu_adds_half_precision_products_in_float32() -> None:
    """One operator, called as it is declared, if PyTorch has it; otherwise a product and a sum."""
    accumulate = mock.Mock(side_effect=_addmm)
    with FakeCuda():
        x = torch.ones(3, 2, dtype=torch.bfloat16, device="cuda")
        for called in (2, 0):  # once to find out
            gradients._accumulates_in_float32.cache_clear()
            with mock.patch.object(torch, "addmm", accumulate if called else mock.Mock(side_effect=RuntimeError)):
                buffer = torch.ones(2, 2, device="cuda")
                gradients.add_product(buffer, x, x)
            assert buffer.tolist() == [[4.0, 4.0], [4.0, 4.0]]
            assert accumulate.call_count == called
            accumulate.reset_mock()
        gradients._accumulates_in_float32.cache_clear()


def _addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    meta = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in (total, a, b)]
    assert torch.ops.aten.addmm.dtype_out(*meta, out_dtype, out=meta[0]).dtype == torch.float32
    assert out is total
    return out.add_(a.float() @ b.float())


@pytest.mark.ranks
def test_megatron_s_linear_layers_add_theirs_to_the_buffers(tmp_path: Path) -> None:
    """Bit-equal to gradients of their own, also after recomputation; tied weights, where one of an embedding is added,
    up to the order of the sum."""
    models = [
        (make_model(tmp_path / "tied", "qwen3", tie_word_embeddings=True), {}),
        (make_model(tmp_path / "experts", "qwen3moe"), {"recompute": "full"}),
    ]
    for found in run_ranks(_look, 1, models)[0]:
        assert found["products"] == found["linear weights"] > 0
        assert found["later products"] == 0
        assert found["different"] <= {"embedding.word_embeddings.weight"}
        assert found["distance"] < 0.01


def _look(models: list[tuple[Path, dict[str, Any]]]) -> list[dict[str, Any]]:
    from megatron.core.tensor_parallel import layers

    from rlhpc.config.training import MemorySection

    found = []
    for dtype in ("float32", "bfloat16"):
        for folder, memory in models:
            actor = make_actor(folder, optimizer_section(), MemorySection(**memory), dtype)
            add = mock.Mock(side_effect=layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32)
            stand_in = mock.Mock(wgrad_gemm_accum_fp32=add)
            with mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", stand_in):
                fused = _gradients(actor)
                products = add.call_count
                linear = [m for chunk in actor.models for m in chunk.modules() if _is_linear(m)]
                separate_gradients(actor)
                plain = _gradients(actor)
            found.append(
                {
                    "products": products,
                    "later products": add.call_count - products,
                    "linear weights": len(linear) * len(batches_of(actor)),
                    "different": {name for name in plain if not torch.equal(plain[name], fused[name])},
                    "distance": max(float((plain[n] - fused[n]).norm() / plain[n].norm()) for n in plain),
                }
            )
    return found


def _is_linear(module: torch.nn.Module) -> bool:
    """Upstream's, whose product is upstream's too."""
    from rlhpc.backends.megatron.layers import SwigluRowLinear

    return getattr(module, "gradient_accumulation_fusion", False) is True and not isinstance(module, SwigluRowLinear)


def _gradients(actor: Any) -> dict[str, Tensor]:
    actor.differentiate(batches_of(actor), negative_log_likelihood, TOKENS, 1.0)
    named = [pair for chunk in actor.models for pair in chunk.named_parameters()]
    assert all(param.grad is None for _, param in named)
    assert all(param.main_grad.any() for _, param in named)
    return {name: param.main_grad.clone() for name, param in named}
