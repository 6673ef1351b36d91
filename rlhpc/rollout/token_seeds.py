"""Seeds each sampled token from its request's seed and its position.

vLLM's V1 runner has one generator per request, whose next number depends on how often it was used: chunks of a prompt
use it too, and a request resumed in another engine would restart its numbers. Reseeded before each token, a request
samples the same tokens regardless of chunking, preemption and resumption. vLLM's V2 runner (CUDA only) needs none of
this: it samples by (seed, position).
"""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.rollout.requests import mixed_bits


class _CpuGenerator(torch.Generator):
    """Generator with an offset, which vLLM resets after each chunk of a prompt but the last (gpu_model_runner.py,
    ``_bookkeeping_sync``). PyTorch's CPU generators have none, and reseeded ones need none."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


def seed_tokens(runner: Any) -> None:
    """Reseeds the generators of a V1 model runner, between a step's forward pass and its sampling."""
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        request = runner.requests[batch.req_ids[index]]
        if generator.device.type == "cpu" and not isinstance(generator, _CpuGenerator):
            generator = request.generator = batch.generators[index] = _CpuGenerator()
        # Length of prompt and response so far; includes the whole prompt while it is prefilled in chunks.
        generator.manual_seed(mixed_bits(request.sampling_params.seed, int(batch.num_tokens_no_spec[index])))
