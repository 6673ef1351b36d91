"""Windows, softcaps and sinks on a GPU: what the kernels are called with, and sinks added to a kernel without them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhpc.backends.kernels import packed_attention
from rlhpc.backends.kernels.packed_attention import RawKernel, Scores, SinkAttention, attend, attend_fused, kernel_name
from rlhpc.backends.kernels.segments import Segments
from rlhpc.core.errors import UserError
from tests.fake_cuda.test_kernels import META, Kernel, _install
from tests.helpers.attention_cases import CASES, inputs
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy

CASE = CASES["grouped queries"]
LENGTHS = np.array(CASE.lengths)
WINDOW, SOFTCAP = Scores(0.3, window=5), Scores(0.3, softcap=1.5)


@pytest.mark.parametrize(
    ("which", "scores"),
    [
        ("flash_attn_varlen_func", WINDOW),
        ("flash_attn_varlen_func", SOFTCAP),
        ("flash_attn_varlen_func", Scores(0.3, window=5, softcap=1.5)),
        ("varlen_attn", WINDOW),
    ],
)
def test_kernels_compute_the_scores_of_the_layer(monkeypatch: pytest.MonkeyPatch, which: str, scores: Scores) -> None:
    kernel = Kernel()
    _install(monkeypatch, which, kernel)
    expected = _attend("cpu", scores)
    with FakeCuda():
        found = _attend("cuda", scores)
        assert kernel_name(on_gpu=True) == ("flash-attn" if "flash" in which else "torch varlen_attn")
    assert len(kernel.calls) == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("which", "scores", "dim", "message"),
    [
        ("varlen_attn", SOFTCAP, 16, r"softcap .*; install flash-attn 2\.6 or newer"),
        ("varlen_attn_with_is_causal", WINDOW, 16, "a sliding window, which no installed kernel computes"),
        ("flash_attn_varlen_func", WINDOW, 264, "no heads of more than 256 dimensions, the model has 264"),
    ],
)
def test_what_no_kernel_computes_is_refused(
    monkeypatch: pytest.MonkeyPatch, which: str, scores: Scores, dim: int, message: str
) -> None:
    _install(monkeypatch, which, Kernel())
    with pytest.raises(UserError, match=message):
        _attend_meta(scores, dim)


def test_an_old_flash_attention_without_softcap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "flash_attn_varlen_func", Kernel())

    def of_2_4(q: Tensor, k: Tensor, v: Tensor, *bounds: object, softmax_scale: float, causal: bool) -> Tensor:
        return q

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", of_2_4)
    with pytest.raises(UserError, match=r"upgrade flash-attn to 2\.6 or newer"):
        _attend_meta(SOFTCAP)


def test_sinks_beside_a_softcap_are_refused() -> None:
    with pytest.raises(UserError, match="a softcap of its attention scores beside sinks"):
        _attend_meta(SOFTCAP, sinks=torch.empty(CASE.heads, device=META))


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in PyTorch's operations in place of its kernel."""
    monkeypatch.setattr(packed_attention, "_torch_kernel", _plain_kernel)


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.parametrize("scores", [Scores(0.3), WINDOW])
def test_sinks_are_exact_on_a_kernel_without_them(scores: Scores) -> None:
    """Outputs, and gradients of queries, keys, values and sinks, by a kernel's own backward pass."""
    *leaves, gradient = (x.double() for x in inputs(CASE))
    leaves = [leaf.requires_grad_() for leaf in [*leaves, torch.linspace(-2, 3, CASE.heads).double()]]
    segments = Segments(LENGTHS, LENGTHS, torch.device("cpu"))
    output = attend(*leaves[:3], segments, scores, leaves[3])
    expected = [output, *torch.autograd.grad(output, leaves, gradient)]

    output = attend_fused(*leaves[:3], segments, scores, leaves[3])
    found = [output, *torch.autograd.grad(output, leaves, gradient)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_sinks_pass_what_pytorch_s_operators_take() -> None:
    """Both operators of the installed PyTorch, without their numbers."""
    for scores in (Scores(0.3), WINDOW):
        leaves = [torch.empty(50, n, 64, dtype=torch.bfloat16, device=META, requires_grad=True) for n in (8, 2, 2)]
        sinks = torch.empty(8, dtype=torch.bfloat16, device=META, requires_grad=True)
        lengths = np.array([20, 30])
        output = attend_fused(*leaves, Segments(lengths, lengths, META), scores, sinks)
        assert (output.shape, output.dtype) == (leaves[0].shape, torch.bfloat16)
        output.backward(torch.empty_like(output))
        for leaf in (*leaves, sinks):
            assert leaf.grad is not None
            assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.usefixtures("plain_kernel")
def test_sinks_go_to_a_kernel_on_a_gpu() -> None:
    expected = _attend("cpu", WINDOW, with_sinks=True)
    with FakeCuda():
        found = _attend("cuda", WINDOW, with_sinks=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


def _attend(device: str, scores: Scores, with_sinks: bool = False) -> list[Tensor]:
    """Output, and gradients of queries, keys, values and sinks, in half precision."""
    *leaves, gradient = (x.to(device) for x in inputs(CASE, torch.bfloat16))
    if with_sinks:
        leaves.append(torch.linspace(-2, 3, CASE.heads).to(device))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = attend(*leaves[:3], Segments(LENGTHS, LENGTHS, torch.device(device)), scores, *leaves[3:])
    return [output, *torch.autograd.grad(output, leaves, gradient)]


def _attend_meta(scores: Scores, dim: int = 16, sinks: Tensor | None = None) -> Tensor:
    query, key = (torch.empty(50, n, dim, dtype=torch.bfloat16, device=META) for n in (CASE.heads, CASE.kv_heads))
    lengths = np.array([20, 30])
    return attend_fused(query, key, key, Segments(lengths, lengths, META), scores, sinks)


def _plain_kernel(segments: Segments, scores: Scores) -> RawKernel:
    """Both passes by matrix products; the backward pass takes weights from the log-sums that it is given."""

    document = torch.from_numpy(np.repeat(np.arange(len(segments.query_lengths)), segments.query_lengths))
    distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
    hidden = (document[:, None] != document) | (distance < 0)
    if scores.window is not None:
        hidden |= distance >= scores.window
    hidden = hidden.to(segments.device)

    def logits(query: Tensor, key: Tensor) -> Tensor:
        """[heads, queries, keys] of the whole pack, -inf between documents and outside of windows."""
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        return (torch.einsum("qhd,khd->hqk", query, key) * scores.scale).masked_fill(hidden, -torch.inf)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = logits(query, key).to(torch.promote_types(query.dtype, torch.float32))
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
        return torch.einsum("hqk,khd->qhd", found.softmax(-1).to(value.dtype), value), found.logsumexp(-1)

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        copies, shape = query.size(1) // key.size(1), (len(key), key.size(1), -1, key.size(2))
        weights = (logits(query, key) - sums[..., None]).exp().to(query.dtype)
        of_value = torch.einsum("hqk,qhd->khd", weights, gradient)
        of_weights = torch.einsum("qhd,khd->hqk", gradient, value.repeat_interleave(copies, dim=1))
        subtracted = (gradient * output).sum(-1).T[..., None]
        of_products = weights * (of_weights - subtracted) * scores.scale
        of_query = torch.einsum("hqk,khd->qhd", of_products, key.repeat_interleave(copies, dim=1))
        of_key = torch.einsum("hqk,qhd->khd", of_products, query)
        return of_query, of_key.reshape(shape).sum(2), of_value.reshape(shape).sum(2)

    return RawKernel(forward, backward)


def test_the_plain_kernel_is_attention_without_sinks() -> None:
    """A sink of -inf takes nothing."""
    *leaves, gradient = (x.double() for x in inputs(CASE))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    segments = Segments(LENGTHS, LENGTHS, torch.device("cpu"))
    nothing = torch.full((CASE.heads,), -torch.inf, dtype=torch.float64)
    output = SinkAttention.apply(*leaves, nothing, _plain_kernel(segments, WINDOW))
    expected = attend(*leaves, segments, WINDOW)
    for ours, theirs in zip(
        [output, *torch.autograd.grad(output, leaves, gradient)],
        [expected, *torch.autograd.grad(expected, leaves, gradient)],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
