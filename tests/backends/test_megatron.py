"""The Megatron actor against HuggingFace and PyTorch, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import KINDS, make_model

pytestmark = pytest.mark.slow

LENGTHS = (11, 3, 40, 7, 7, 22, 64, 5)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_equal_huggingface(tmp_path: Path, tp: int) -> None:
    """Every family; at tp 4 the two key-value heads are cut."""
    folders = {kind: make_model(tmp_path / kind, kind) for kind in KINDS}
    for differences in run_ranks(_logits_differences, tp, folders, tp):
        assert all(difference < 1e-5 for difference in differences.values()), differences


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_update_equals_torch_adamw(tmp_path: Path, world_size: int, tp: int) -> None:
    """Loss, gradient norm, and every weight after three clipped AdamW updates, against HuggingFace under PyTorch."""
    folder = make_model(tmp_path / "model", "qwen3")
    for loss, norm, weight in run_ranks(_update_difference, world_size, folder, tp):
        assert loss < 1e-5
        assert norm < 1e-4
        assert weight < 1e-5


def test_checkpoint_resumes_bit_equal_and_in_another_layout(tmp_path: Path) -> None:
    folder, saved = make_model(tmp_path / "model", "qwen2"), tmp_path / "saved"
    saved.mkdir()
    straight = run_ranks(_save_then_go_on, 2, folder, saved, 2)
    again = run_ranks(_load_and_go_on, 2, folder, saved, 2)
    elsewhere = run_ranks(_load_and_go_on, 1, folder, saved, 1)
    assert again == straight
    for moved, stayed in zip(elsewhere[0], straight[0], strict=True):
        assert moved == pytest.approx(stayed, rel=1e-5)


def _actor(folder: Path, tp: int, optimizer: Any = None) -> Any:
    from megatron.core import parallel_state

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.schema import ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.plan.layout import ParallelLayout

    info = RankInfo.from_environ()
    layout = ParallelLayout(info.world_size, tp=tp)
    if not parallel_state.model_parallel_is_initialized():
        build_groups(layout, seed=1)
    backend = MegatronBackend(read_model(folder), layout, info, "float32", ParallelSection(tp=tp), optimizer)
    backend.load_pretrained(folder)
    return backend


def _sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (length,), generator=generator) for length in LENGTHS]


def _batch(sequences: list[torch.Tensor]) -> Any:
    from rlhpc.data.collate import pack_batch

    return pack_batch([(s.numpy(), 1) for s in sequences], sample_ids=range(len(sequences)))


def _logits_differences(folders: dict[str, Path], tp: int) -> dict[str, float]:
    return {kind: _logits_difference(folder, tp) for kind, folder in folders.items()}


def _logits_difference(folder: Path, tp: int) -> float:
    from transformers import AutoModelForCausalLM

    backend, sequences = _actor(folder, tp), _sequences()
    (logits,) = backend.logits([_batch(sequences)])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst, start = 0.0, 0
    for sequence in sequences:
        with torch.no_grad():
            expected = reference(sequence[None]).logits[0]
        ours = logits[start : start + len(sequence), : expected.size(-1)]
        worst = max(worst, float((ours - expected).abs().max()))
        start += len(sequence)
    return worst


def _section() -> Any:
    from rlhpc.config.schema import OptimizerSection

    return OptimizerSection(learning_rate=1e-3, weight_decay=0.1, clip_gradient=0.5, epsilon=1e-5)


def _negative_log_likelihood(stats: Any, batch: Any) -> Any:
    from rlhpc.api import LossSums

    loss = -(stats.log_probs * batch.loss_weight).sum()
    return LossSums(loss, {"loss": loss.detach()})


def _train(backend: Any, steps: int) -> list[tuple[float, float]]:
    layout, sequences = backend.layout, _sequences()
    rank = layout.coord(torch.distributed.get_rank())["dp"]
    mine = sequences[rank :: layout.dp]
    batches = [_batch(part) for part in (mine[:1], mine[1:])]
    tokens = sum(LENGTHS) - len(LENGTHS)
    stats = [backend.train(batches, _negative_log_likelihood, tokens, 1.0, 1e-3) for _ in range(steps)]
    return [(s.sums["loss"] / tokens, s.gradient_norm) for s in stats]


def _update_difference(folder: Path, tp: int) -> tuple[float, float, float]:
    from transformers import AutoModelForCausalLM

    section = _section()
    backend = _actor(folder, tp, section)
    ours = _train(backend, 3)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = dict(reference.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=section.learning_rate, betas=(section.beta1, section.beta2), eps=section.epsilon
    )
    theirs = []
    for _ in range(3):
        adamw.zero_grad()
        loss = torch.zeros(())
        for sequence in _sequences():
            log_probs = reference(sequence[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - log_probs.gather(-1, sequence[1:, None]).sum()
        loss = loss / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), section.clip_gradient)
        adamw.step()
        theirs.append((float(loss), float(norm)))
    full = dict(backend.full_tensors())
    assert set(full) == set(params)
    weight = max(float((full[name] - param).abs().max()) for name, param in params.items())
    losses = max(abs(a[0] - b[0]) / b[0] for a, b in zip(ours, theirs, strict=True))
    norms = max(abs(a[1] - b[1]) / b[1] for a, b in zip(ours, theirs, strict=True))
    return losses, norms, weight


def _save_then_go_on(folder: Path, saved: Path, tp: int) -> list[tuple[float, float]]:
    backend = _actor(folder, tp, _section())
    _train(backend, 2)
    backend.save(saved)
    return _train(backend, 2)


def _load_and_go_on(folder: Path, saved: Path, tp: int) -> list[tuple[float, float]]:
    backend = _actor(folder, tp, _section())
    backend.load(saved)
    return _train(backend, 2)
