"""The measuring parts of acceptance on one GPU, at tiny sizes: goals on correctness and memory are reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.acceptance import weights
from bench.acceptance.results import Size
from rlhpc.core import env
from tests.bench.acceptance.part_runs import Results, collect, figures, missed, with_goal
from tests.helpers.distributed import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

COMPILED = {env.TORCHDYNAMO_DISABLE: "0"}


def on_gpu(folder: Path, function: str, size: Size = "tiny", **arguments: object) -> Results:
    call = (folder, f"bench.acceptance.{function}", arguments, True, size)
    return run_ranks(collect, 1, *call, join=False, environ=COMPILED)[0]


@pytest.mark.parametrize("case", [case.name for case in weights.CASES])
def test_engine_and_trainer_agree_after_each_sync(tmp_path: Path, case: str) -> None:
    results = on_gpu(tmp_path, "weights:check", name=case)
    assert not missed(results)
    assert sum(name.endswith("logprob_diff_mean") for name in with_goal(results)) >= 2


def test_shared_weights_free_the_engine_s_own(tmp_path: Path) -> None:
    """At full width, 10 GB: tiny weights are less than a page of the driver."""
    results = on_gpu(tmp_path, "weights:check", "full", name="shared weights")
    assert not missed(results)
    assert "shared weights: freed share of the shared weights" in with_goal(results)


def test_sleep_gives_memory_back(tmp_path: Path) -> None:
    results = on_gpu(tmp_path, "weights:measure", shape="tiny")
    assert not missed(results)
    assert "tiny: memory freed by sleep" in with_goal(results)


@pytest.mark.parametrize("way", ["FSDP2", "FSDP2 compiled", "Megatron"])
def test_memory_of_both_back_ends_is_measured(tmp_path: Path, way: str) -> None:
    found = figures(on_gpu(tmp_path, "mfu_peers:measure_fsdp", way=way))
    assert found[f"{way}, 128: peak memory"].value > 0
    assert (f"{way}, 128: tokens per second" in found) == (way != "Megatron")


@pytest.mark.parametrize("model", ["1.5b", "moe"])
def test_kernels_of_an_update_are_named(tmp_path: Path, model: str) -> None:
    found = figures(on_gpu(tmp_path, "mfu:measure", model=model))
    assert found["128: share of matrix products"].value > 0
    assert found["128: peak memory"].value > 0
    assert found["128: kernel 01"].value > 0
