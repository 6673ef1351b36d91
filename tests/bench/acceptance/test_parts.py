"""The measuring parts at tiny sizes on a CPU, with the real Megatron-core, vLLM and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.acceptance import decode, mfu, mfu_peers, several_ranks, weights
from bench.acceptance.results import Context
from bench.shapes import model_shape
from rlhpc.sharding.shards import num_parameters
from tests.bench.acceptance import part_runs
from tests.bench.acceptance.part_runs import Results, collect, figures, missed, skipped, with_goal
from tests.helpers import session, warm
from tests.helpers.distributed import run_ranks
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]


def in_a_rank(folder: Path, function: str, **arguments: object) -> Results:
    return run_ranks(collect, 1, folder, f"bench.acceptance.{function}", arguments, join=False)[0]


def test_a_wrong_weight_in_the_engine_misses_goals_and_right_ones_reach_them(tmp_path: Path) -> None:
    """Each sync writes twice, the second time for checksums; the seventh write is the offload variant's second sync."""
    (results,) = run_ranks(part_runs.correctness_with_a_wrong_weight, 1, tmp_path, 7, join=False)
    wrong = ["dense: offload, sync 2, weights equal", "dense: offload, sync 2, logprob_diff_mean"]
    assert missed(results) == wrong
    assert "layers.1.self_attn.o_proj" in figures(results)[wrong[0]].note
    right = {f"dense: {v}, sync {n}, logprob_diff_mean" for v in ("resident", "offload") for n in (1, 2)} - {wrong[1]}
    assert right <= set(with_goal(results))


def test_weight_sync_reports_every_phase(tmp_path: Path) -> None:
    results = in_a_rank(tmp_path, "weights:measure", shape="tiny")
    found = figures(results)
    assert not missed(results)
    assert with_goal(results) == ["tiny: write"]
    for phase in ("wake, weights", "verify", "close", "wake, cache", "sleep", "whole sync"):
        assert 0 < found[f"tiny: {phase}"].value < 60
    assert found["tiny: write"].value < found["tiny: whole sync"].value
    assert found["tiny: weights"].value == pytest.approx(4 * num_parameters(model_shape("tiny")) / 1e9)  # float32
    assert "tiny: memory freed by sleep" in skipped(results)


def test_mfu_reports_both_packings(tmp_path: Path) -> None:
    found = figures(in_a_rank(tmp_path, "mfu:measure", model="1.5b"))
    for size in mfu.packings(tiny=True):
        seconds = found[f"{size.label}: forward and backward"].value
        assert seconds > 0
        assert found[f"{size.label}: tokens per second"].value > 0
        assert 0 < found[f"{size.label}: MFU of the measured peak"].value < 1
        shares = [f.value for name, f in found.items() if name.startswith(f"{size.label}: share of")]
        assert sum(shares) == pytest.approx(1)
        assert any("aten::" in f.note for name, f in found.items() if name.startswith(f"{size.label}: kernel"))


def test_mfu_of_fsdp_has_the_same_figures(tmp_path: Path) -> None:
    found = in_a_rank(tmp_path, "mfu_peers:measure_fsdp", way="FSDP2")
    results = figures(found)
    for size in mfu.packings(tiny=True):
        assert results[f"FSDP2, {size.label}: tokens per second"].value > 0
        assert 0 < results[f"FSDP2, {size.label}: MFU of the measured peak"].value < 1
    assert "FSDP2, 64: peak memory" in skipped(found)


# ---- parts with their own processes


def run_part(folder: Path, part: Callable[[Context], None]) -> Results:
    session.need("ranks", "vllm")
    results: Results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", str(warm.python()))
        part(Context(folder, "tiny", False, results.append))
    return results


@pytest.mark.long
def test_every_case_of_correctness_agrees(tmp_path: Path) -> None:
    results = run_part(tmp_path, weights.run_correctness)
    assert not missed(results)
    for case in weights.CASES:
        for variant in case.variants:
            assert {f"{case.name}: {variant}, sync {n}, weights equal" for n in (1, 2)} <= set(figures(results))
    assert "optimizer offload: asynchronous save, state equal" in with_goal(results)
    assert "shared weights: memory freed by sharing" in skipped(results)


@pytest.mark.long
def test_weight_sync_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    results = run_part(tmp_path, weights.run_sync)
    assert not missed(results)
    assert "tiny: write" in figures(results)


@pytest.mark.long
def test_decode_compares_both_systems(tmp_path: Path) -> None:
    results = run_part(tmp_path, decode.run)
    found = figures(results)
    assert found["tiny, eager: rlhpc"].value > 0
    ratio = found["tiny, eager: rlhpc"].value / found["tiny, eager: vLLM"].value
    assert found["tiny, eager: rlhpc / vLLM"].value == pytest.approx(ratio)
    assert list(skipped(results)) == ["CUDA graphs"]


@pytest.mark.parametrize("part", [mfu.run_moe, mfu_peers.run_peer], ids=["run_moe", "run_peer"])
def test_mfu_of_experts_and_beside_transformers(tmp_path: Path, part: Callable[[Context], None]) -> None:
    results = run_part(tmp_path, part)
    found = figures(results)
    assert not missed(results)
    if part is mfu_peers.run_peer:
        assert found["transformers, float32 weights, 2 x 32: update"].value > 0
        theirs = found["transformers, bfloat16, 2 x 32: tokens per second"].value
        ratio = found["rlhpc, 2 x 32: tokens per second"].value / theirs
        assert found["rlhpc / transformers, bfloat16, 2 x 32"].value == pytest.approx(ratio)
    else:
        assert found["128: share of expert products"].value > 0


@pytest.mark.long
def test_axes_of_two_ranks_equal_one(tmp_path: Path) -> None:
    results = run_part(tmp_path, several_ranks.run)
    assert not missed(results)
    for kind, axes in several_ranks.AXES.items():
        for axis in axes:
            name = f"{kind}, {axis.name}"
            if axis.ranks > 2:
                assert skipped(results)[name] == "needs 4 GPUs"
            else:
                assert f"{name}: logprob_diff_mean after updates" in with_goal(results)
    assert {"dense, pp to tp 2: weights equal", "moe, etp to tp 1: weights equal"} <= set(with_goal(results))
