"""Random numbers of a batch's tokens on a CPU, from their seeds in one tensor.

vLLM's sampler for CPUs hashes (seed of the token, index in the vocabulary), and reads each seed from a generator of its
request (v1/sample/ops/topk_topp_sampler.py, ``forward_cpu``), which takes longer than all else of its sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class CpuNoise:
    """Stands before ``forward_cpu`` of vLLM's TopKTopPSampler."""

    def __init__(self, sampler: Any) -> None:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._original: Callable[..., tuple[Tensor, Tensor | None]] = sampler.forward
        self._cut: Callable[..., Tensor] = apply_top_k_top_p
        self._returned = sampler.logprobs_mode
        self.seeds: dict[int, int] = {}  # 63 bits, by row of the batch
        sampler.forward = self

    def __call__(
        self,
        logits: Float[Tensor, "rows vocab"],
        generators: Mapping[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Int64[Tensor, " rows"], Float[Tensor, "rows vocab"] | None]:
        """As vLLM's. Rows without a seed are greedy: their token is not used."""
        if not generators:
            return self._original(logits, generators, k, p)
        assert generators.keys() <= self.seeds.keys(), "a sampled row has no seed for its token"
        logits = self._cut(logits, k, p)
        returned = {
            "processed_logits": lambda: logits,
            "processed_logprobs": lambda: logits.log_softmax(-1, dtype=torch.float32),
        }.get(self._returned)
        tokens = sample(logits, [self.seeds.get(row, 0) for row in range(len(logits))])
        return tokens, returned() if returned else None


def cpu_noise(runner: Any) -> CpuNoise | None:
    """Makes the sampler of a V1 model runner take the seeds of a whole batch. None where it does not sample by
    ``forward_cpu`` and its kernel: generators have to be seeded."""
    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    name = getattr(getattr(sampler, "forward", None), "__name__", "")
    if name != "forward_cpu" or getattr(sampler, "use_fp64_gumbel", False):
        return None
    return CpuNoise(sampler) if hasattr(torch.ops._C, "fused_gumbel_argmax") else None


def sample(logits: Float[Tensor, "rows vocab"], seeds: Sequence[int]) -> Int64[Tensor, " rows"]:
    """Returns for each row a token of the distribution of its logits, determined by its seed of up to 63 bits."""
    tokens: Tensor = torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds, dtype=torch.long))
    return tokens.view(-1).long()
