"""Seeds each sampled token from its request's seed and its position.

vLLM's V1 runner keeps one generator for each request, whose next number depends on how often it has been used: a prompt
prefilled in chunks uses it too, and a request resumed in another engine would start its numbers again. Reseeded
before each token, a request samples the same tokens whether it is chunked, preempted, or resumed elsewhere. vLLM's V2
runner, CUDA only, has no such generators: it samples by (seed, position) itself.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.rollout.requests import mixed_bits


class _CpuGenerator(torch.Generator):
    """After each chunk of a prompt but the last, vLLM sets the generator's offset back (gpu_model_runner.py,
    ``_bookkeeping_sync``). PyTorch's CPU generators have no offset, and a reseeded one needs none."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


def seed_tokens(runner: Any) -> None:
    """Reseed the generators of a V1 model runner, between a step's forward pass and its sampling."""
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        request = runner.requests[batch.req_ids[index]]
        if generator.device.type == "cpu" and not isinstance(generator, _CpuGenerator):
            generator = request.generator = batch.generators[index] = _CpuGenerator()
        # Prompt and response so far, also while only a part of the prompt is prefilled.
        generator.manual_seed(mixed_bits(request.sampling_params.seed, int(batch.num_tokens_no_spec[index])))
