"""The measuring parts of acceptance as on a GPU, at tiny sizes: what they report there and not on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench.acceptance import mfu, mfu_peers, several_ranks
from bench.acceptance.results import Context, Goal
from bench.shapes import model_shape
from rlhpc.models.flops import training_flops
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.sharding.shards import num_parameters
from tests.bench.acceptance.part_runs import Results, figures, missed, skipped
from tests.fake_cuda.part_runs import CONTEXT_GIB, EARLIER_GIB, collect_on_gpu, install_flash_attention
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, cpu_only]
GIB = 1 << 30
WEIGHTS = 2 * num_parameters(model_shape("tiny"))  # bytes in bfloat16


def in_a_rank(folder: Path, *calls: tuple[str, dict[str, Any]], **options: bool) -> list[Results]:
    return run_ranks(_collect, 1, folder, calls, options, join=False)[0]


def _collect(folder: Path, calls: list[tuple[str, dict[str, Any]]], options: dict[str, bool]) -> list[Results]:
    with mock.patch.object(mfu, "_TINY", mfu._TINY[:1]):
        return collect_on_gpu(folder, *calls, **options)


@pytest.mark.vllm
def test_weight_sync_reports_what_sleep_gives_back(tmp_path: Path) -> None:
    (results,) = in_a_rank(tmp_path, ("weights:measure", {"shape": "tiny"}), engine=True)
    found = figures(results)
    assert not missed(results)
    assert not skipped(results)
    assert (found["tiny: libraries"].value, found["tiny: libraries"].unit) == (CONTEXT_GIB, "GiB")
    assert found["tiny: weights"].value == pytest.approx(WEIGHTS / 1e9)
    freed = found["tiny: memory freed by sleep"]
    assert (freed.value, freed.goal, freed.unit) == (pytest.approx(1.0), Goal(">=", 0.95), "")
    asleep = found["tiny: engine asleep"]
    assert asleep.unit == "GiB"
    assert 0 <= asleep.value < 0.0625, "the engine's cache is not held"


@pytest.mark.vllm
def test_sharing_frees_the_engine_s_own_weights(tmp_path: Path) -> None:
    """The share that is in common, and all memory of it; log-probs in bfloat16 are held to the case's tolerance."""
    (results,) = in_a_rank(tmp_path, ("weights:check", {"name": "shared weights"}), engine=True)
    found = figures(results)
    assert not missed(results)
    assert not skipped(results)
    common = found["shared weights: share of weights shared"].value
    assert 0.5 < common < 1
    freed = found["shared weights: memory freed by sharing"]
    assert (freed.value, freed.unit) == (pytest.approx(common * WEIGHTS / GIB), "GiB")
    whole = found["shared weights: freed share of the shared weights"]
    assert (whole.value, whole.goal) == (pytest.approx(1.0), None), "no goal at tiny sizes"
    for number in (1, 2):
        difference = found[f"shared weights: shared, sync {number}, logprob_diff_mean"]
        assert 0 < difference.value < 0.02
        assert difference.goal == Goal("<", 0.02)


@pytest.mark.vllm
def test_installation_names_what_was_chosen_for_the_gpu(tmp_path: Path) -> None:
    (results,) = in_a_rank(tmp_path, ("install:run", {}), engine=True)
    found = figures(results)
    assert not missed(results)
    assert "CUDA" not in skipped(results)
    values = {name: figure.value for name, figure in found.items()}
    assert values["torch sees a GPU"] is True
    assert found["torch sees a GPU"].goal == Goal("==", True)
    assert (values["NCCL of torch"], values["compute capability"]) == ("2.27.5", "9.0")
    assert isinstance(values["CUDA of torch"], str)
    assert values["attention in training"] == "flash-attn"
    assert found["grouped product vs. single products"].met


def test_mfu_reports_memory_kernels_and_the_data_sheet_s_peak(tmp_path: Path) -> None:
    own, beside = in_a_rank(tmp_path, ("mfu:measure", {"model": "1.5b"}), ("mfu_peers:measure_beside_peer", {}))
    (size,), (row,), peak = mfu.packings(tiny=True)[:1], mfu_peers.rows(tiny=True), 1e12 * GPUS["h100"].tflops
    shape = model_shape("tiny")
    for results, label, lengths, count in (
        (own, size.label, size.lengths, size.microbatches),
        (beside, f"rlhpc, {row.label}", row.lengths, row.microbatches),
    ):
        found = figures(results)
        assert not missed(results)
        assert not skipped(results)
        assert found["matrix product"].unit == "TFLOP/s"
        operations = training_flops(shape, lengths) * count
        seconds = found[f"{label}: forward and backward"].value
        assert found[f"{label}: MFU"].value == pytest.approx(operations / seconds / peak)
        measured, planned = (found[f"{label}: {name} memory"] for name in ("peak", "planned"))
        assert (measured.unit, planned.unit) == ("GiB", "GiB")
        state = 9 * WEIGHTS / GIB  # weights, and in float32 gradients, master weights and two moments
        assert state < measured.value < EARLIER_GIB, "of the update alone"
        assert planned.value > state
        shares = [figure.value for name, figure in found.items() if name.startswith(f"{label}: share of")]
        assert sum(shares) == pytest.approx(1)
        kernels = [figure.note for name, figure in found.items() if name.startswith(f"{label}: kernel")]
        assert kernels
        assert all(note.endswith("_kernel") for note in kernels), "neither operators nor ranges"


def test_fsdp_s_memory_is_measured_beside_megatron_s(tmp_path: Path) -> None:
    """Whole runs of the part compare what these two report."""
    ways = [("mfu_peers:measure_fsdp", {"way": way}) for way in ("FSDP2", "Megatron")]
    (size,), peak = mfu.packings(tiny=True)[:1], 1e12 * GPUS["h100"].tflops
    own, other = (figures(results) for results in in_a_rank(tmp_path, *ways))
    operations = training_flops(model_shape("tiny"), size.lengths) * size.microbatches
    seconds = own[f"FSDP2, {size.label}: forward and backward"].value
    assert own[f"FSDP2, {size.label}: MFU"].value == pytest.approx(operations / seconds / peak)
    assert not [name for name in other if "MFU" in name or "tokens" in name]
    state = 8 * WEIGHTS / GIB  # in float32 weights, gradients and two moments
    for way, found in (("FSDP2", own), ("Megatron", other)):
        measured, planned = (found[f"{way}, {size.label}: {name} memory"].value for name in ("peak", "planned"))
        assert state < measured < EARLIER_GIB
        assert state < planned


def test_plain_transformers_train_on_the_gpu(tmp_path: Path) -> None:
    (results,) = in_a_rank(tmp_path, ("mfu_peers:measure_peer", {}), flash=False)
    found, (row,) = figures(results), mfu_peers.rows(tiny=True)
    assert not skipped(results)
    peaks = []
    for way in ("bfloat16", "float32 weights"):
        label = f"transformers, {way}, {row.label}"
        operations = row.operations(model_shape("tiny"))
        expected = operations / found[f"{label}: update"].value / (1e12 * GPUS["h100"].tflops)
        assert found[f"{label}: MFU with optimizer"].value == pytest.approx(expected)
        assert found[f"{label}: update"].note.endswith("sdpa attention")
        peaks.append(found[f"{label}: peak memory"].value)
    state = 4 * WEIGHTS / GIB  # weights, gradients and two moments
    assert peaks[0] > state
    assert peaks[1] > 2 * state
    assert peaks[0] < peaks[1] < EARLIER_GIB, "each peak is its own"


def test_ranks_that_share_a_gpu_communicate_through_gloo(tmp_path: Path) -> None:
    """Tensor parallelism against one rank, within the tolerances of bfloat16."""
    ((one, backends, _),) = run_ranks(_train_axes, 1, tmp_path, [{}], False, join=False)
    assert backends[0] == "cpu:gloo,cuda:nccl"
    several = run_ranks(_train_axes, 2, tmp_path, [{"tp": 2}], True, join=False)
    for _, backends, devices in several:
        assert backends[0] == "gloo"
        assert devices == [0]
    results: Results = []
    context = Context(tmp_path, "tiny", True, results.append)
    with FakeCuda():
        several_ranks.report_axis(context, "dense", "tp", one[0], [numbers[0] for numbers, _, _ in several])
        several_ranks.report_axis(context, "moe", "etp", one[0], [numbers[0] for numbers, _, _ in several])
    assert not missed(results)
    for name, limit in (("dense, tp", 0.02), ("moe, etp", 0.05)):
        for figure in ("logprob_diff_mean before", "loss, relative difference", "grad_norm, relative difference"):
            assert figures(results)[f"{name}: {figure}"].goal == Goal("<", limit)


def _train_axes(folder: Path, axes: list[dict[str, Any]], share_gpu: bool) -> tuple[list[Any], list[Any], list[int]]:
    """What each axis gives, the backends that were asked for, and the devices that were selected."""
    install_flash_attention()
    with FakeCuda() as cuda:
        context = Context(folder, "tiny", True, lambda result: None)
        found = several_ranks.train_axes(context, "dense", axes, share_gpu=share_gpu, updates=0)
        return found, cuda.backends, [call[1] for call in cuda.calls if call[0] == "set_device"]
