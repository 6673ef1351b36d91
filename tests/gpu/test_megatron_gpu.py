"""The Megatron actor on one GPU: the kernels it takes there, bfloat16, and the same numbers as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.config.training import OptimizerSection
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.compat import megatron_device
from rlhpc.parallel.groups import join
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import logits_of, make_actor, negative_log_likelihood, packed_batch

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

LENGTHS = (11, 3, 40, 7, 200, 22, 64, 5)
KINDS = ("llama", "qwen2", "qwen2_tied", "qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits_are_as_near_to_float32_as_huggingfaces(tmp_path: Path, kind: str) -> None:
    ((ours, theirs),) = run_ranks(_distances, 1, make_model(tmp_path / kind, kind), join=False)
    assert ours < 1.5 * theirs + 1e-3


def test_training_lowers_the_loss_and_resumes_bit_equal(tmp_path: Path) -> None:
    folder, saved = make_model(tmp_path / "model", "qwen3"), tmp_path / "saved"
    saved.mkdir()
    ((losses, after, resumed),) = run_ranks(_train, 1, folder, saved, join=False)
    assert losses[-1] < 0.7 * losses[0]
    assert after == resumed


def test_nothing_of_torch_is_patched_while_megatron_runs() -> None:
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "synchronize", "stream")}
    with megatron_device():
        assert {name: getattr(torch.cuda, name) for name in before} == before
        assert torch.ones(1, device="cuda").is_cuda


def _actor(folder: Path, optimizer: Any = None) -> Any:
    join(RankInfo.from_environ())
    return make_actor(folder, optimizer, dtype="bfloat16")


def _distances(folder: Path) -> tuple[float, float]:
    """Mean distance to HuggingFace's float32 logits: of our bfloat16 ones, and of HuggingFace's own."""
    from transformers import AutoModelForCausalLM

    backend, batch = _actor(folder), packed_batch(LENGTHS)
    (logits,) = logits_of(backend, [batch])
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    ours = theirs = 0.0
    start = 0
    for sequence in batch.tokens.split(LENGTHS):
        with torch.no_grad():
            expected = exact(sequence[None].cuda()).logits[0]
            other = half(sequence[None].cuda()).logits[0].float()
        mine = logits[start : start + len(sequence), : expected.size(-1)].float()
        ours += float((mine - expected).abs().mean())
        theirs += float((other - expected).abs().mean())
        start += len(sequence)
    return ours / len(LENGTHS), theirs / len(LENGTHS)


def _train(folder: Path, saved: Path) -> tuple[list[float], list[float], list[float]]:
    backend, batch = _actor(folder, OptimizerSection(learning_rate=1e-3)), packed_batch(LENGTHS)
    tokens = float(batch.loss_weight.sum())

    def steps(count: int) -> list[float]:
        return [
            backend.train([batch], negative_log_likelihood, tokens, 1.0, 1e-3).sums["loss"] / tokens
            for _ in range(count)
        ]

    losses = steps(20)
    backend.save(saved)
    after = steps(2)
    backend.load(saved)
    return losses, after, steps(2)
