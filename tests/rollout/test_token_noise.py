"""Random numbers of a batch: distributed as they should be, independent of each other and of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhpc.rollout.requests import mixed_bits
from rlhpc.rollout.token_noise import TokenNoise, exponential, sample, seed_words
from tests.helpers.fake_cuda import FakeCuda

VOCAB, ROWS = 4096, 256


def noise(seeds: list[int], vocab: int = VOCAB) -> np.ndarray:
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32)
    return exponential(words, torch.arange(vocab, dtype=torch.int32)).double().numpy()


def seeds_of(request: int, count: int = ROWS) -> list[int]:
    """Of consecutive positions."""
    return [mixed_bits(request, position) for position in range(count)]


def excess(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Standard deviations by which chi-square exceeds its mean."""
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def test_numbers_are_exponentially_distributed() -> None:
    found = noise(seeds_of(1))
    assert found.min() > 0
    uniform = np.sort(-np.expm1(-found).ravel())
    distance = np.abs(uniform - (np.arange(uniform.size) + 0.5) / uniform.size).max()
    assert distance * np.sqrt(uniform.size) < 1.95  # Kolmogorov-Smirnov, 0.1%
    assert abs(excess(np.bincount((uniform * 1000).astype(int), minlength=1000), uniform.size / 1000)) < 4
    # Each row and each column by itself.
    for axis in (0, 1):
        means = found.mean(axis=axis)
        assert abs(means - 1).max() * np.sqrt(found.shape[axis]) < 5


@pytest.mark.heavy
@pytest.mark.parametrize(
    "others",
    [seeds_of(1)[1:], seeds_of(2)[:-1], [s + 1 for s in seeds_of(1)[:-1]], [s + (1 << 32) for s in seeds_of(1)[:-1]]],
    ids=["next position", "other request", "next seed", "next high word"],
)
def test_rows_are_independent(others: list[int]) -> None:
    one, other = (-np.expm1(-noise(seeds)) for seeds in (seeds_of(1)[:-1], others))
    for shift in (0, 1, 5):
        pairs = np.histogram2d(one[:, shift:].ravel(), other[:, : VOCAB - shift].ravel(), 32, [(0, 1)] * 2)[0]
        assert abs(excess(pairs, pairs.mean())) < 4.5


def test_neighbours_in_the_vocabulary_are_independent() -> None:
    found = -np.expm1(-noise(seeds_of(3)))
    for distance in (1, 2, 16, 1024):
        pairs = np.histogram2d(found[:, distance:].ravel(), found[:, :-distance].ravel(), 32, [(0, 1)] * 2)[0]
        assert abs(excess(pairs, pairs.mean())) < 4.5


def test_tokens_have_their_probabilities() -> None:
    torch.manual_seed(0)
    probs = torch.softmax(3 * torch.randn(50), dim=0)
    probs[7] = 0.0
    probs /= probs.sum()
    count = 40_000
    tokens = sample(probs.expand(count, -1).clone(), seeds_of(4, count))
    found = np.bincount(tokens.numpy(), minlength=50)
    assert found[7] == 0
    frequent = (probs * count > 5).numpy()
    assert abs(excess(found[frequent], probs.double().numpy()[frequent] * count)) < 4


def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    probs, seeds = torch.softmax(torch.randn(ROWS, 5_000), dim=-1), seeds_of(5)
    together = sample(probs.clone(), seeds)
    assert len(set(together.tolist())) > 200
    assert together.tolist() == [int(sample(probs[i : i + 1].clone(), seeds[i : i + 1])) for i in range(ROWS)]
    order = torch.randperm(ROWS)
    assert torch.equal(sample(probs[order], [seeds[i] for i in order]), together[order])


def test_a_gpu_gets_the_seeds_in_one_copy() -> None:
    probs, seeds = torch.softmax(torch.randn(8, 300), dim=-1), seeds_of(6, 8)
    expected = sample(probs.clone(), seeds)
    with FakeCuda():
        found = sample(probs.to("cuda"), seeds)
        assert found.is_cuda
    assert found.tolist() == expected.tolist()


def test_batches_without_seeds_are_vllms_and_a_missing_seed_is_refused() -> None:
    original = torch.tensor([3, 4])
    sampler = TokenNoise(lambda *_: original)
    probs = torch.full((2, 9), 1 / 9)
    assert sampler(probs, {}, False) is original
    generators = {1: torch.Generator()}
    with pytest.raises(AssertionError, match="no seed"):
        sampler(probs, generators)
    sampler.seeds = {1: 12345}
    assert int(sampler(probs.clone(), generators)[1]) == int(sample(probs[1:].clone(), [12345]))
