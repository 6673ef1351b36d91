"""Vocabulary-parallel log-probs and entropy against PyTorch's softmax, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_to_softmax_with_gradients(world_size: int) -> None:
    for forward, backward in run_ranks(_differences, world_size):
        assert forward < 1e-5
        assert backward < 1e-5


def _differences() -> tuple[float, float]:
    from rlhpc.backends.megatron import log_probs

    log_probs._CHUNK_ELEMENTS = 4096  # several chunks, the last one short
    group = dist.group.WORLD
    torch.manual_seed(0)
    rows, vocabulary, padding = 257, 509, 3  # columns that no token has, and that must not matter
    selected = torch.randperm(rows)[:200].sort().values
    targets, a, b = torch.randint(0, vocabulary, (200,)), torch.randn(200), torch.randn(200)
    forward = backward = 0.0
    for temperature, with_entropy in ((1.0, True), (0.7, True), (0.7, False)):
        full = (torch.randn(rows, vocabulary) * 4).requires_grad_()
        expected = torch.log_softmax(full / temperature, -1)[selected]
        picked = expected.gather(-1, targets[:, None])[:, 0]
        entropy = -(expected.exp() * expected).sum(-1)
        (picked * a + (entropy * b if with_entropy else 0)).sum().backward()
        padded = torch.nn.functional.pad(full.detach(), (0, padding), value=9.0)
        part = padded.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
        stats = log_probs.token_stats(part, log_probs.Rows(selected, targets, vocabulary), group, temperature)
        (stats.log_probs * a + (stats.entropy * b if with_entropy else 0)).sum().backward()
        forward = max(forward, _far(stats.log_probs, picked), _far(stats.entropy, entropy))
        gradient = torch.nn.functional.pad(full.grad, (0, padding)).chunk(group.size(), -1)[group.rank()]
        backward = max(backward, _far(part.grad, gradient))
    return forward, backward


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())
