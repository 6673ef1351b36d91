"""Random numbers of a batch's tokens, from (seed of the token, index in the vocabulary), in a kernel for all requests.

vLLM's V1 runner fills the noise of each request by a kernel of its own (v1/sample/ops/topk_topp_sampler.py,
``random_sample``). Here it is a hash, so that a batch takes one kernel where functions are compiled, and no request's
noise depends on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled

_ENTRIES = 1 << 24  # at once where functions are not compiled: bounds what the hash holds
# Signed 32-bit forms of the golden ratio, and of the constants of Wellons' lowbias32, a hash with nearly no bias.
_GOLDEN, _FIRST, _SECOND = -0x61C88647, 0x7FEB352D, -0x7B935975


class TokenNoise:
    """Samples the rows of a batch by the seeds of their tokens, in place of vLLM's ``random_sample``."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        """``original``: vLLM's function, for batches without seeds."""
        self._original = original
        self.seeds: dict[int, int] = {}  # 63 bits, by row of the batch

    def __call__(self, probs: Tensor, generators: Mapping[int, torch.Generator], *rest: Any) -> Int64[Tensor, " rows"]:
        """Returns a token for each row of ``probs``, which may be overwritten. Rows without a seed are greedy: their
        token is not used."""
        if not generators:
            return self._original(probs, generators, *rest)
        assert generators.keys() <= self.seeds.keys(), "a sampled row has no seed for its token"
        return sample(probs, [self.seeds.get(row, 0) for row in range(len(probs))])


def sample(probs: Float[Tensor, "rows vocab"], seeds: list[int]) -> Int64[Tensor, " rows"]:
    """Returns for each row a token with that row's probabilities, determined by its seed of up to 64 bits."""
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32)
    if probs.is_cuda:
        words = words.pin_memory().to(probs.device, non_blocking=True)
    tokens = torch.arange(probs.shape[-1], dtype=torch.int32, device=probs.device)
    rows = len(probs) if _compiles(probs) else max(1, _ENTRIES // probs.shape[-1])
    parts = zip(probs.split(rows), words.split(rows), strict=True)
    return torch.cat([_first_to_arrive(some, seed, tokens) for some, seed in parts])


def _compiles(probs: Tensor) -> bool:
    return probs.is_cuda and _first_to_arrive.compiles


@compiled
def _first_to_arrive(
    probs: Float[Tensor, "rows vocab"], words: Int32[Tensor, "rows 2"], tokens: Int32[Tensor, " vocab"]
) -> Int64[Tensor, " rows"]:
    """Index of the first of exponentially distributed times with rates ``probs``: distributed as they are."""
    return (probs / exponential(words, tokens)).argmax(dim=-1)


def exponential(words: Int32[Tensor, "rows 2"], tokens: Int32[Tensor, " vocab"]) -> Float[Tensor, "rows vocab"]:
    """Exponentially distributed numbers > 0. Small ones, which decide, are the most precise."""
    bits = _mixed(tokens * _GOLDEN + words[:, :1])
    bits = _mixed(bits ^ words[:, 1:])
    uniform = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    return -torch.log1p(-uniform)


def _mixed(bits: Int32[Tensor, "*any"]) -> Int32[Tensor, "*any"]:
    """lowbias32. Shifts are of unsigned numbers: the sign's copies are masked."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FIRST
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _SECOND
    return bits ^ ((bits >> 16) & 0xFFFF)


def seed_words(seed: int) -> tuple[int, int]:
    """Both halves of a seed as signed 32-bit numbers."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)
