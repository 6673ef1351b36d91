"""An engine serves models that rlhpc has no table of: as trained after every weight sync, and verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.rollout.any_architecture import serving
from tests.rollout.any_architecture.serving import BY_TRANSFORMERS, NATIVE, Served
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]
FEW = ("gemma2", "gpt_oss", "olmo2")
MANY = tuple(kind for kind in NATIVE + BY_TRANSFORMERS if kind not in FEW)
FAULTY = "model.layers.1.self_attn.o_proj.weight"
SETS = [
    pytest.param((FEW, 1), id="few"),
    pytest.param((MANY, 1), id="many", marks=pytest.mark.long),
    pytest.param(((*FEW, "qwen3moe", "dsv3", "phi3"), 2), id="cut", marks=pytest.mark.long),
]


def make_models(folder: Path, kinds: tuple[str, ...]) -> Path:
    for kind in kinds:
        for seed in range(serving.SYNCS):
            serving.make(folder / kind / str(seed), kind, seed)
    return folder


@pytest.fixture(scope="module", params=SETS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Served]]:
    """What each rank found of each architecture."""
    kinds, tp = request.param
    models = make_models(tmp_path_factory.mktemp("models"), kinds)
    return run_ranks(serving.serve, tp, models, kinds, tp, timeout=1800)


def test_log_probs_are_those_of_plain_transformers_after_each_weight_sync(served):
    for rank in served:
        for kind, found in rank.items():
            assert len(found.distances) == serving.SYNCS
            assert max(*found.distances, found.early) < 1e-5, kind


def test_the_same_weights_again_answer_the_same_to_the_last_bit(served):
    assert all(found.repeated for rank in served for found in rank.values())


def test_blocks_written_by_the_discovered_layout_equal_what_the_loader_writes(served):
    assert all(found.direct for rank in served for found in rank.values())


def test_each_tensor_reaches_each_rank_once(served):
    for rank in served:
        for kind, found in rank.items():
            assert found.streamed == [found.whole] * serving.SYNCS, kind


def test_whole_tensors_come_one_at_a_time(served):
    """vLLM's loaders of experts keep a view of the last one until they have the next."""
    for rank in served:
        for kind, found in rank.items():
            assert found.alive == (2 if kind in ("gpt_oss", "qwen3moe") else 1), kind


def test_a_row_that_changes_on_its_way_is_found(served):
    for rank in served:
        for kind, found in rank.items():
            assert found.fault.startswith(f"weights differ after a weight sync: rank 0: {FAULTY}"), kind


def test_parameters_are_as_many_as_planned(served):
    for rank in served:
        for kind, found in rank.items():
            real, planned = found.numel
            assert abs(real - planned) <= (0 if len(served) == 1 else 0.02 * real), kind


def test_vllm_uses_transformers_classes_where_it_has_no_own(served):
    for rank in served:
        assert all(found.by_transformers == (kind in BY_TRANSFORMERS) for kind, found in rank.items())


def test_models_built_before_and_after_an_engine_of_their_class_train(tmp_path):
    folder = serving.make(tmp_path / "olmo2", "olmo2")
    (found,) = run_ranks(serving.train_and_serve, 1, folder)
    assert found["by_transformers"]
    assert all(found["equal"])
    assert max(found["distances"]) < 1e-5


@pytest.mark.long
def test_parameters_that_vllm_has_in_float32_get_what_the_trainer_computes_with(tmp_path):
    folder = serving.make(tmp_path / "glm4_moe", "glm4_moe")
    (found,) = run_ranks(serving.in_bfloat16, 1, folder)
    name = serving.FLOAT32_ROUTER_WEIGHT
    assert found[name] == "torch.float32"
    assert found["model.layers.1.self_attn.o_proj.weight"] == "torch.bfloat16"
    assert found["same"]
    assert found["fault"] == f"weights differ after a weight sync: rank 0: {name}"
