"""Arithmetic of acceptance: number of layers that fit, kinds of kernels, goals of axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.acceptance import mfu, several_ranks
from bench.acceptance.mfu import RECOMPUTE, most_layers, planned_bytes
from bench.acceptance.results import Context
from bench.device_time import Kernel, by_kind
from bench.shapes import model_shape
from rlhpc.sharding.shards import num_parameters
from tests.bench.acceptance.part_runs import Results, missed

GIB = 1 << 30


@pytest.mark.parametrize(("gib", "least", "most"), [(78, 8, 10), (139, 18, 21)])
def test_layers_of_8b_that_train_without_recomputation(gib: int, least: int, most: int) -> None:
    limit = int(0.94 * gib * GIB)
    layers = most_layers(lambda count: model_shape("8b", min(count, 32)), 16384, limit)
    assert least <= layers <= most
    assert planned_bytes(model_shape("8b", layers), 16384, RECOMPUTE[0]) <= limit
    assert planned_bytes(model_shape("8b", layers + 1), 16384, RECOMPUTE[0]) > limit


def test_a_model_that_fits_whole_is_not_cut() -> None:
    assert most_layers(lambda count: model_shape("1.5b", min(count, 28)), 4096, 1 << 50) == 28


def test_recomputation_is_the_least_that_fits() -> None:
    whole = model_shape("1.5b")
    ways = [mfu.Subject(whole).fitting(16384, gib * GIB)[0].recompute for gib in (139, 73, 40, 1)]
    assert ways == ["none", "none", "selective", "full"]


def test_the_cut_of_30b_a3b_keeps_its_proportions() -> None:
    cut, whole = mfu.with_share_of_vocabulary(6), model_shape("30b-a3b")
    assert cut.vocab_size / whole.vocab_size == pytest.approx(cut.num_layers / whole.num_layers, rel=0.01)
    assert cut.experts is not None
    assert whole.experts is not None
    assert cut.experts.num_experts == whole.experts.num_experts


def test_operations_of_an_update_are_six_for_each_weight_and_token_and_attention() -> None:
    shape, update = model_shape("1.5b"), mfu.Packing("4k", (2048, 1024, 512, 512), microbatches=8)
    weights = num_parameters(shape)  # the tied embedding counts once
    assert update.operations(shape) == pytest.approx(6 * weights * 8 * 4096, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("void cutlass::device_kernel<at::cuda::detail::GroupedGemm>", "expert products"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>", "element-wise and others"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str) -> None:
    assert by_kind([Kernel(name, 2.0, 3), Kernel(name, 1.0, 1)]) == {kind: 3.0}


def test_an_axis_with_other_numbers_misses_its_goals() -> None:
    """A rank whose numbers are off by 10% is detected at any position."""
    results: Results = []
    context = Context(Path(), "tiny", False, results.append)
    right: dict[str, Any] = {"loss": 2.0, "grad_norm": 1.0, "log_probs": {"before": {"0": [-1.0, -2.0], "1": [-3.0]}}}
    whole = right["log_probs"]["before"]
    halves = [{**right, "log_probs": {"before": {key: whole[key]}}} for key in whole]
    several_ranks.report_axis(context, "dense", "right", right, halves)
    assert not missed(results)
    halves[1] = {"loss": 2.0, "grad_norm": 1.1, "log_probs": {"before": {"1": [-3.1]}}}
    several_ranks.report_axis(context, "dense", "wrong", right, halves)
    assert missed(results) == ["dense, wrong: logprob_diff_mean before", "dense, wrong: grad_norm, relative difference"]
