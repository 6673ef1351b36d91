"""Seeds each sampled token from its request's seed and its position.

vLLM's V1 runner has one generator per request, whose next number depends on how often it was used: chunks of a prompt
use it too, and a request resumed in another engine would restart its numbers. Reseeded before each token, a request
samples the same tokens regardless of chunking, preemption and resumption. On a GPU the seeds go to ``TokenNoise``,
which needs no kernel per request, on a CPU to ``CpuNoise``, which needs no number of each generator. vLLM's V2 runner
(CUDA only) needs none of this: it samples by (seed, position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhpc.parallel.compat import replace_random_sample
from rlhpc.rollout.cpu_noise import CpuNoise
from rlhpc.rollout.requests import mixed_bits
from rlhpc.rollout.token_noise import TokenNoise

# Of vLLM's TopKTopPSampler: with seeds, the one for CUDA calls the other.
_NATIVE = ("forward_native", "forward_cuda")


class _CpuGenerator(torch.Generator):
    """Generator with an offset, which vLLM resets after each chunk of a prompt but the last (gpu_model_runner.py,
    ``_bookkeeping_sync``). PyTorch's CPU generators have none, and reseeded ones need none."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


def seed_tokens(runner: Any, guessed: Mapping[str, Sequence[int]], noise: TokenNoise | CpuNoise | None = None) -> None:
    """Reseeds the generators of a V1 model runner, between a step's forward pass and its sampling; with ``noise`` it
    gets the seeds, and the generators are not used. ``guessed``: tokens of a request before the one that is drawn
    next, by its id; their own seeds are the verifier's (``speculation``)."""
    batch, requests, seeds = runner.input_batch, runner.requests, dict[int, int]()
    ids, known = batch.req_ids, batch.num_tokens_no_spec[: batch.num_reqs].tolist()
    for index, generator in batch.generators.items():
        request = requests[ids[index]]
        if (noise is not None or generator.device.type == "cpu") and not isinstance(generator, _CpuGenerator):
            generator = request.generator = batch.generators[index] = _CpuGenerator()
        # Length of prompt and response so far; includes the whole prompt while it is prefilled in chunks.
        length = known[index] + (len(guessed.get(ids[index], ())) if guessed else 0)
        seeds[index] = mixed_bits(request.sampling_params.seed, length)
        if noise is None:
            generator.manual_seed(seeds[index])
    if noise is not None:
        noise.seeds = seeds


def batched_noise(runner: Any) -> TokenNoise | None:
    """Makes vLLM's sampler take the noise of a whole batch from seeds: ``random_sample`` fills each request's by a
    kernel (v1/sample/ops/topk_topp_sampler.py). None where it does not sample by it: generators have to be seeded."""
    from vllm.v1.sample.ops import topk_topp_sampler as module

    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    native = getattr(type(sampler), "forward_native", None)
    if getattr(getattr(sampler, "forward", None), "__name__", "") not in _NATIVE:
        return None
    if "random_sample" not in getattr(getattr(native, "__code__", None), "co_names", ()):
        return None
    if not isinstance(module.random_sample, TokenNoise):
        replace_random_sample(TokenNoise)
    return module.random_sample
