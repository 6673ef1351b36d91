"""Draws tokens ahead of vLLM's sampler, equal to those that it draws at their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.rollout import cpu_noise
from rlhpc.rollout.requests import mixed_bits
from rlhpc.rollout.token_noise import sample
from rlhpc.rollout.token_seeds import batched_noise


class TokenDraws:
    """Draws by a request's temperature, top_k and top_p, and by its seed and a token's position. ``owners``: each row's
    request, by its row in the batch."""

    def __init__(self, runner: Any) -> None:
        """``runner``: vLLM's V1 model runner."""
        self._runner = runner

    def cut(
        self, logits: Float[Tensor, "rows vocab"], sampling: Any, owners: Sequence[int]
    ) -> Float[Tensor, "rows vocab"]:
        """Logits of the distributions that tokens are drawn from; may overwrite the given ones. vLLM's own expansion of
        a request's values to its guesses writes to a temporary on a CPU (vllm-project/vllm#55005)."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        if sampling.all_greedy:
            return logits
        rows = torch.tensor(owners, device=logits.device)
        temperature = sampling.temperature[rows]
        logits = logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])
        top_k, top_p = (None if given is None else given[rows] for given in (sampling.top_k, sampling.top_p))
        return apply_top_k_top_p(logits, top_k, top_p)

    def draw(
        self, logits: Float[Tensor, "rows vocab"], sampling: Any, owners: Sequence[int], lengths: Sequence[int]
    ) -> Int64[Tensor, " rows"]:
        """The token that each distribution yields after ``lengths`` tokens of its request; greedy without a seed."""
        greedy = logits.argmax(-1)
        generators = sampling.generators
        if not generators:
            return greedy
        batch, requests = self._runner.input_batch, self._runner.requests
        seeds = [
            mixed_bits(requests[batch.req_ids[owner]].sampling_params.seed, length) if owner in generators else 0
            for owner, length in zip(owners, lengths, strict=True)
        ]
        if batched_noise(self._runner) is not None:
            tokens = sample(logits.softmax(-1, dtype=torch.float32), seeds)
        else:
            assert not logits.is_cuda, "vLLM's sampler for GPUs has another noise than this one"
            tokens = cpu_noise.sample(logits, seeds)
        sampled = torch.tensor([owner in generators for owner in owners], device=logits.device)
        return torch.where(sampled, tokens, greedy)
