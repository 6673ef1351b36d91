"""What a GPU's kernels are called with: attention, grouped products, norms, log-probs.

Shapes, strides and types are checked on the meta device and with stand-ins that have the kernels' real signatures.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhpc.backends.kernels import expert_mlp, loss_head, packed_attention
from rlhpc.backends.kernels.choices import sort_choices
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.backends.kernels.segments import Segments
from tests.helpers.attention_cases import CASES, Case, inputs
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy

META = torch.device("meta")


class Kernel:
    """Attention of packed sequences by plain matrix products; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor, scale: float, left: int = -1, softcap: float = 0.0
    ) -> Tensor:
        q_ends, k_ends = bounds
        assert q_ends.dtype == k_ends.dtype == torch.int32
        assert q.size(-1) == k.size(-1) == v.size(-1)
        outputs, q_bounds, k_bounds = [], q_ends.tolist(), k_ends.tolist()
        for i in range(len(q_bounds) - 1):
            one, keys, values = (
                x[ends[i] : ends[i + 1]].float().transpose(0, 1)
                for x, ends in ((q, q_bounds), (k, k_bounds), (v, k_bounds))
            )
            keys, values = (x.repeat_interleave(q.size(1) // k.size(1), dim=0) for x in (keys, values))
            scores = one @ keys.transpose(1, 2) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            own = scores.size(2) - scores.size(1)  # diagonal of each query's own key
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(own + 1)
            if left >= 0:
                hidden |= torch.ones_like(hidden).tril(own - left - 1)
            outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outputs).to(q.dtype)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """The parameters of flash-attn 2.5 to 2.8; 2.4 lacks the softcap and the block table."""
        self.calls.append({"causal": causal, "longest": (max_seqlen_q, max_seqlen_k)})
        assert causal
        assert softmax_scale is not None
        left, _ = window_size
        return self.attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, left=left, softcap=softcap)

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """The parameters that PyTorch's has from 2.12 on."""
        self.calls.append({"window": window_size, "gqa": enable_gqa, "longest": (max_q, max_k)})
        assert enable_gqa or query.size(1) == key.size(1)
        assert window_size[1] == 0
        assert scale is not None
        return self.attend(query, key, value, cu_seq_q, cu_seq_k, scale=scale, left=window_size[0])

    def varlen_attn_of_equal_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """The parameters before ``enable_gqa``."""
        return self.varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
        )

    def varlen_attn_with_is_causal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """The parameters before ``window_size``."""
        assert is_causal
        return self.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=(-1, 0))


KERNELS = ("flash_attn_varlen_func", "varlen_attn", "varlen_attn_of_equal_heads", "varlen_attn_with_is_causal")


@pytest.mark.parametrize("name", ["grouped queries", "latent"])
@pytest.mark.parametrize("which", KERNELS)
def test_fused_attention_equals_the_padded_one(monkeypatch: pytest.MonkeyPatch, which: str, name: str) -> None:
    """Outputs and gradients; values shorter than keys are filled up for the kernel, and cut again."""
    case, kernel = CASES[name], Kernel()
    _install(monkeypatch, which, kernel)
    lengths = np.array(case.lengths)
    expected = _attend(case, Segments(lengths, lengths, torch.device("cpu")), "cpu")
    with FakeCuda():
        found = _attend(case, Segments(lengths, lengths, torch.device("cuda")), "cuda")
        assert all(tensor.is_cuda for tensor in found)
    longest = int(max(lengths))
    grouped = case.heads != case.kv_heads and which == "varlen_attn"
    assert [call["longest"] for call in kernel.calls] == [(longest, longest)]
    assert [call.get("gqa", grouped) for call in kernel.calls] == [grouped]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "flash-attn 3"), ((10, 0), "flash-attn")])
def test_flash_attention_3_is_for_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    """Its first releases return sums too."""
    second, third, case = Kernel(), Kernel(), CASES["grouped queries"]
    _install(monkeypatch, "flash_attn_varlen_func", second)
    hopper = ModuleType("flash_attn_interface")
    hopper.flash_attn_varlen_func = lambda *given, **named: (third.flash_attn_varlen_func(*given, **named), None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", hopper)
    lengths = np.array(case.lengths)
    with FakeCuda(capability=capability):
        found = _attend(case, Segments(lengths, lengths, torch.device("cuda")), "cuda")
        assert packed_attention.kernel_name(on_gpu=True) == name
    assert found[0].shape == (sum(case.lengths), case.heads, case.dim)
    assert [len(kernel.calls) for kernel in (second, third)] == ([0, 1] if capability[0] == 9 else [1, 0])


def test_float32_is_not_given_to_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, case = Kernel(), CASES["grouped queries"]
    _install(monkeypatch, "flash_attn_varlen_func", kernel)
    with FakeCuda():
        lengths = np.array(case.lengths)
        _attend(case, Segments(lengths, lengths, torch.device("cuda")), "cuda", torch.float32)
    assert not kernel.calls


def test_pytorch_s_own_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of the installed PyTorch, without its numbers."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for heads, kv_heads in ((4, 4), (8, 2)):
        query, key = (torch.empty(50, n, 64, dtype=torch.bfloat16, device=META) for n in (heads, kv_heads))
        lengths = np.array([20, 30])
        output = packed_attention.attend_fused(query, key, key.clone(), Segments(lengths, lengths, META), Scores(0.1))
        assert output.shape == query.shape
        assert output.dtype == torch.bfloat16


def _install(monkeypatch: pytest.MonkeyPatch, which: str, kernel: Kernel) -> None:
    flash = ModuleType("flash_attn")
    if which == "flash_attn_varlen_func":
        flash.flash_attn_varlen_func = kernel.flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash if "flash" in which else None)
    if "flash" not in which:
        import torch.nn.attention.varlen as varlen

        monkeypatch.setattr(varlen, "varlen_attn", getattr(kernel, which))


def _attend(case: Case, segments: Segments, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    *leaves, gradient = (x.to(device) for x in inputs(case, dtype))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = attend(*leaves, segments, Scores(case.dim**-0.5))
    return [output, *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_grouped_products_have_strides_that_cuda_takes(tokens: int) -> None:
    """PyTorch's own checks of the CUDA kernel, of the forward pass and of the gradients of both factors."""
    x = torch.empty(tokens, 64, dtype=torch.bfloat16, device=META, requires_grad=True)
    w13 = torch.empty(4, 2 * 48, 64, dtype=torch.bfloat16, device=META, requires_grad=True)
    w2 = torch.empty(4, 64, 48, dtype=torch.bfloat16, device=META, requires_grad=True)
    weights = torch.empty(tokens, 2, device=META, requires_grad=True)
    selected = torch.empty(tokens, 2, dtype=torch.int64, device=META)
    choices = sort_choices(selected, torch.empty(4, dtype=torch.int64, device=META))
    output = expert_mlp.expert_mlp(x, weights, w13, w2, choices)
    assert output.shape == x.shape
    output.backward(torch.empty_like(output))
    for leaf in (x, weights, w13, w2):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


def test_grouped_products_in_float32_are_one_product_for_each_expert() -> None:
    """On a GPU PyTorch has the grouped product for bfloat16 alone."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(10, 8, generator=generator), torch.randn(3, 8, 6, generator=generator)
    other = torch.randn(10, 6, generator=generator)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    expected = torch.cat([x[:4] @ weight[0], x[4:] @ weight[2]])
    gradient = torch.stack([other[:4].T @ x[:4], torch.zeros(6, 8), other[4:].T @ x[4:]])
    with FakeCuda(), _without_grouped_mm():
        found = expert_mlp.grouped_product(x.cuda(), weight.cuda(), ends.cuda())
        of_weight = expert_mlp.grouped_weight_gradient(
            weight.transpose(1, 2).cuda(), other.cuda(), x.cuda(), ends.cuda()
        )
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(of_weight.cpu(), gradient)


def _without_grouped_mm() -> Any:
    return mock.patch("torch.nn.functional.grouped_mm", side_effect=AssertionError("not for float32"))


def _config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def test_log_probs_take_larger_pieces_on_a_gpu() -> None:
    rows, columns = 1 << 12, 1 << 14
    on_cpu = loss_head._chunks(torch.empty(rows, columns, device=META))
    with FakeCuda():
        on_gpu = loss_head._chunks(torch.empty(rows, columns, device="cuda"))
    assert len(on_gpu) < len(on_cpu)
    for pieces, elements in ((on_cpu, loss_head.CHUNK_ELEMENTS), (on_gpu, loss_head.CHUNK_ELEMENTS_GPU)):
        assert pieces[0].start == 0
        assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
        assert pieces[-1].stop >= rows
        assert (pieces[0].stop - pieces[0].start) * columns <= elements
