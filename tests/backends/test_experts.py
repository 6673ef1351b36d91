"""Routers in training: the auxiliary loss and the bias per expert, as configured, and what routers did as metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhpc.backends.megatron.experts import biases_of, routers_of
from rlhpc.config.training import MoeSection
from rlhpc.data.collate import pack_batch
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor, gradients
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, negative_log_likelihood, optimizer_section

pytestmark = pytest.mark.ranks

EXPERTS, TOP_K = 4, 2
LENGTHS = (16, 8, 24)  # that four ranks share without filling up


def test_the_auxiliary_loss_is_that_of_one_rank_on_ranks_that_share_the_tokens(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3moe")
    ((one, _), (without, _)) = run_ranks(_router_gradients, 1, folder, [Case("qwen3moe")] * 2, [0.1, 0.0])[0]
    assert np.abs(one - without).max() > 0.01 * np.abs(one).max()
    cases = [Case("qwen3moe", tp=2, cp=2, ep=2), Case("qwen3moe", pp=2, tp=2)]
    for shared in run_ranks(_router_gradients, 4, folder, cases, [0.1, 0.1]):
        for router, _ in shared:
            assert np.abs(router - one).max() < 1e-4 * np.abs(one).max()


def test_metrics_say_what_the_routers_did(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3moe")
    ((_, one),) = run_ranks(_router_gradients, 1, folder, [Case("qwen3moe")], [0.0])[0]
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert set(one) == set(re.findall(r"^\| `(experts/\w+)`", page, re.M))
    assert 1.0 < one["experts/load_max"] <= EXPERTS / TOP_K
    assert one["experts/dropped"] == 0.0
    assert 0.0 <= one["experts/idle"] < 1.0
    assert 0.1 < one["experts/entropy"] < np.log(EXPERTS)
    for ranks in run_ranks(_router_gradients, 4, folder, [Case("qwen3moe", tp=2, cp=2, ep=2)], [0.0]):
        assert ranks[0][1] == pytest.approx(one, rel=1e-4)


def test_a_bias_moves_by_its_rate_or_not_at_all(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "dsv3")
    for frozen, moved in run_ranks(_bias_changes, 2, folder, [0.0, 0.01]):
        assert (frozen == 0).all()
        np.testing.assert_allclose(np.abs(moved[moved != 0]), 0.01, rtol=1e-4)
        assert (moved > 0).any()
        assert (moved < 0).any()


def test_routers_in_bfloat16_have_the_file_s_biases(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "dsv3")
    ((found, expected),) = run_ranks(_router_biases, 1, folder)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_array_equal(found, expected)


def _router_biases(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Those that routers compute with, after a pass, and those of the file."""
    backend = make_actor(folder, optimizer_section(), dtype="bfloat16")
    backend.log_probs([_batch()], 1.0)
    tensors = load_file(folder / "model.safetensors")
    expected = [tensors[name] for name in sorted(tensors) if name.endswith("e_score_correction_bias")]
    return tuple(
        np.concatenate([t.numpy() for t in some]) for some in (biases_of(routers_of(backend.models)), expected)
    )


def test_experts_without_tokens_have_no_gradients_regardless_of_what_the_kernel_leaves(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3moe", num_experts=16)
    cases = [Case("qwen3moe", expert_dispatch=dispatch) for dispatch in ("alltoall", "allgather")]
    (found,) = run_ranks(_with_garbage, 1, folder, cases)
    for sound, spoilt, idle in found:
        assert idle > 0.5
        assert np.abs(sound).max() > 0
        np.testing.assert_array_equal(spoilt, sound)


def _with_garbage(folder: Path, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """For each case the gradients of one update, by PyTorch's grouped product and by one that behaves as on Blackwell,
    and the share of experts without tokens."""
    results, products = [], (torch.nn.functional.grouped_mm, _blackwell_grouped_mm())
    for case in cases:
        backend, found = actor(folder, case, optimizer_section()), []
        for grouped_mm in products:
            with mock.patch("torch.nn.functional.grouped_mm", grouped_mm):
                stats = backend.differentiate([_batch((3,))], negative_log_likelihood, 2.0, 1.0)
            found.append(np.concatenate([g.flatten().numpy() for _, g in gradients(backend)]))
        results.append((found[0], found[1], stats.gauges["experts/idle"]))
    return results


def _blackwell_grouped_mm() -> Any:
    """A grouped product that leaves NaN in the gradients of weights of groups without rows."""
    real = torch.nn.functional.grouped_mm

    def product(left: Any, right: Any, *, offs: Any) -> Any:
        found = real(left, right, offs=offs)
        if right.dim() == 2:
            found[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return found

    return product


def _batch(lengths: tuple[int, ...] = LENGTHS) -> Any:
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(2, 64, (length,), generator=generator).numpy() for length in lengths]
    return pack_batch([(t, 1) for t in tokens], sample_ids=range(len(tokens)))


def _router_gradients(folder: Path, cases: list[Case], aux_losses: list[float]) -> list[tuple[np.ndarray, dict]]:
    """All routers' gradients of one update, and its gauges, for each case."""
    results = []
    for case, aux_loss in zip(cases, aux_losses, strict=True):
        backend = actor(folder, case, optimizer_section(), MoeSection(aux_loss=aux_loss))
        stats = backend.train([_batch()], negative_log_likelihood, 45.0, 1.0, 1e-3)
        routers = [g.flatten().numpy() for name, g in gradients(backend) if name.endswith("mlp.gate.weight")]
        results.append((np.concatenate(routers), stats.gauges))
    return results


def _bias_changes(folder: Path, rates: list[float]) -> list[np.ndarray]:
    changes = []
    for rate in rates:
        backend = actor(folder, Case("dsv3", ep=2), optimizer_section(), MoeSection(bias_update_rate=rate))
        before = _biases(backend)
        backend.train([_batch()], negative_log_likelihood, 90.0, 1.0, 1e-3)
        changes.append(_biases(backend) - before)
    return changes


def _biases(backend: Any) -> np.ndarray:
    found = [t.clone().numpy() for name, t in backend.full_tensors() if name.endswith("e_score_correction_bias")]
    return np.concatenate(found)
