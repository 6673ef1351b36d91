"""Packed attention of whole architectures by fused kernels: windows, softcap, sinks, latent attention, experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.core.errors import UserError
from tests.helpers.tiny_architectures import LENGTHS, build, documents, farthest_gradient, gradients, loss_of

pytestmark = pytest.mark.gpu

# By what attention of theirs differs: queries in groups, windows, a softcap, sinks, latent keys.
KINDS = ("qwen3", "mistral", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3")
# Times the distance of transformers' own attention. The gradient of a sink is a sum of products with the output, which
# flash attention has only rounded.
BOUND, SINKS_BOUND = 1.5, 3.0
Found = tuple[Tensor, dict[str, Tensor]]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_as_near_to_float32_as_one_document_at_a_time(kernel: str, kind: str) -> None:
    """Logits and gradients in bfloat16, beside transformers' own attention by explicit scores in bfloat16."""
    from rlhpc.backends.fsdp.attention_interface import register

    exact = _one_at_a_time(_on_gpu(build(kind, "eager"), torch.float32))
    theirs = _one_at_a_time(_on_gpu(build(kind, "eager"), torch.bfloat16))
    model = _on_gpu(build(kind, register()), torch.bfloat16)
    if kind == "gemma2" and kernel == "torch":
        with pytest.raises(UserError, match="a softcap of its attention scores, which no installed kernel computes"):
            _packed(model)
        return
    ours = _packed(model)
    assert _apart(ours[0], exact[0]) < BOUND * _apart(theirs[0], exact[0]) + 1e-3
    bound = SINKS_BOUND if kind == "gpt_oss" else BOUND
    assert farthest_gradient(ours[1], exact[1]) < bound * farthest_gradient(theirs[1], exact[1]) + 1e-3


def test_a_document_longer_than_the_window_sees_no_more_than_it(kernel: str) -> None:
    """A token beyond the windows of both layers changes no logit of the last one."""
    from rlhpc.backends.fsdp.attention_interface import register

    model = _on_gpu(build("mistral", register(), sliding_window=4), torch.bfloat16)
    tokens = documents()
    with torch.no_grad():
        before = _logits(model, tokens)
        tokens[0][0] = (tokens[0][0] + 1) % 90 + 3
        after = _logits(model, tokens)
    last = LENGTHS[0] - 1
    assert torch.equal(before[last:], after[last:])
    assert not torch.equal(before[:4], after[:4])


def _on_gpu(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Parameters in ``dtype``; buffers, such as rotary frequencies, stay in float32."""
    model = model.to("cuda")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _logits(model: Any, tokens: list[Tensor]) -> Tensor:
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to

    pack = DocumentPack([len(one) for one in tokens], torch.device("cuda", torch.cuda.current_device()))
    with attending_to(pack):
        row = torch.cat(tokens).to("cuda")[None]
        return model(input_ids=row, position_ids=pack.positions[None], use_cache=False).logits[0]


def _packed(model: Any) -> Found:
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to

    logits = _logits(model, documents())
    pack = DocumentPack(LENGTHS, logits.device)
    with attending_to(pack):
        _loss(logits).backward()
    return _cpu(logits, gradients(model))


def _one_at_a_time(model: Any) -> Found:
    logits = torch.cat([model(input_ids=one[None].to("cuda"), use_cache=False).logits[0] for one in documents()])
    _loss(logits).backward()
    return _cpu(logits, gradients(model))


def _loss(logits: Tensor) -> Tensor:
    return loss_of(logits.float().cpu())


def _cpu(logits: Tensor, found: dict[str, Tensor]) -> Found:
    return logits.detach().float().cpu(), {name: tensor.float().cpu() for name, tensor in found.items()}


def _apart(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().mean())
