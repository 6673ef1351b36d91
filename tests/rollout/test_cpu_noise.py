"""Random numbers on a CPU from the seeds of a batch: distributed as they should be, and independent of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.rollout.cpu_noise import CpuNoise, cpu_noise, sample
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.test_token_noise import excess, seeds_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]
VOCAB, COUNT, SEEDS = 50, 40_000, {0: 12345, 2: 77}
OTHERS = {
    "next position": seeds_of(1, 4001)[1:],
    "other request": seeds_of(2, 4000),
    "next seed": [seed + 1 for seed in seeds_of(1, 4000)],
}


def noise_of(sampler: Any) -> CpuNoise | None:
    return cpu_noise(SimpleNamespace(sampler=SimpleNamespace(topk_topp_sampler=sampler)))


def use_sampler() -> dict[str, Any]:
    """Of vLLM's own sampler: log-probs before and after, and tokens."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    torch.manual_seed(0)
    logits, generators = torch.randn(4, 60), {row: torch.Generator() for row in SEEDS}
    top_k, top_p = torch.tensor([5, 60, 60, 60]), torch.tensor([1.0, 1.0, 0.3, 1.0])

    def run(seeded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return own.forward(logits.clone(), generators if seeded else {}, top_k, top_p)

    own = TopKTopPSampler(logprobs_mode="processed_logprobs")
    found: dict[str, Any] = {"vllm": run()[1]}
    noise = noise_of(own)
    assert noise is not None
    with pytest.raises(AssertionError, match="no seed"):
        run()
    noise.seeds = SEEDS
    found["tokens"], found["log_probs"] = run()
    found["alone"] = {row: sample(found["vllm"][row : row + 1], [seed]).item() for row, seed in SEEDS.items()}
    found["unseeded"] = [run(seeded=False)[0].tolist() for _ in range(8)]
    precise, native = TopKTopPSampler(use_fp64_gumbel=True), TopKTopPSampler()
    native.forward = native.forward_native
    found["in another way"] = [noise_of(precise), noise_of(native), cpu_noise(SimpleNamespace())]
    return found


def sample_all() -> dict[str, Any]:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    logits = 3 * torch.randn(VOCAB)
    logits[7] = -torch.inf
    same, rows, seeds = torch.zeros(4000, 16), torch.randn(40, 5_000), seeds_of(5, 40)
    return use_sampler() | {
        "expected": logits.double().softmax(0).numpy() * COUNT,
        "drawn": np.bincount(sample(logits.expand(COUNT, -1), seeds_of(4, COUNT)).numpy(), minlength=VOCAB),
        "first": sample(same, seeds_of(1, 4000)).numpy(),
        "others": {name: sample(same, others).numpy() for name, others in OTHERS.items()},
        "together": sample(rows, seeds).tolist(),
        "each": [sample(rows[i : i + 1], seeds[i : i + 1]).item() for i in range(40)],
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(sample_all, 1)[0]


def test_tokens_have_their_probabilities(found):
    assert found["drawn"][7] == 0
    frequent = found["expected"] > 5
    assert abs(excess(found["drawn"][frequent], found["expected"][frequent])) < 4


@pytest.mark.parametrize("other", ["next position", "other request", "next seed"])
def test_rows_are_independent(found, other):
    pairs = np.histogram2d(found["first"], found["others"][other], 16)[0]
    assert abs(excess(pairs, pairs.mean())) < 4.5


def test_a_rows_token_does_not_depend_on_the_batch(found):
    assert len(set(found["together"])) > 35
    assert found["together"] == found["each"]


def test_a_batch_is_sampled_as_vllm_samples_it_but_for_the_seeds(found):
    """Greedy rows have no seed, the others cuts of their own; log-probs and batches without seeds are vLLM's."""
    assert torch.equal(found["log_probs"], found["vllm"])
    assert {row: int(found["tokens"][row]) for row in SEEDS} == found["alone"]
    assert any(one != found["unseeded"][0] for one in found["unseeded"])


def test_generators_are_seeded_where_vllm_samples_in_another_way(found):
    assert found["in another way"] == [None, None, None]
