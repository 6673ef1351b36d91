"""Optimizers of sharded models: updates of a whole model in every layout, bit-equal after a checkpoint."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.backends.fsdp import optimizer_cases as cases
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

LION = "docs.examples.my_optimizer:Lion"  # the page's example
# Of four ranks, one has no expert.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 67},
    "qwen3moe": {"num_experts": 3, "tie_word_embeddings": True},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 3},
}
long = pytest.mark.long
LAYOUTS = [
    pytest.param({}, marks=long),
    pytest.param({"dp_shard": 2}, marks=long),
    {"dp_shard": 4},
    pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=long),
    pytest.param({"dp_shard": 2, "cp": 2}, marks=long),
]


@pytest.fixture(scope="session")  # sharing models brings no test into a tier
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: make_model(tmp_path_factory.mktemp(kind), kind, **changes) for kind, changes in MODELS.items()}
    return {**made, "gpt_neox": cases.make_joined(tmp_path_factory.mktemp("gpt_neox"), "gpt_neox")}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_updates_are_those_of_a_whole_model(sizes: dict[str, int], folders: dict[str, Path]) -> None:
    pairs = [("gpt_oss", "adamw"), *((kind, "muon") for kind in folders)]
    found, *_ = run_ranks(cases.distances, prod(sizes.values()), folders, sizes, pairs)
    assert set(found) == set(pairs)
    for (kind, name), errors in found.items():
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-6, (kind, name, worst)


@pytest.mark.parametrize(
    "sizes", [pytest.param({"dp_shard": 4}, marks=long), {"dp_replicate": 2, "dp_shard": 2}], ids=str
)
def test_training_with_muon_does_not_depend_on_the_layout(sizes: dict[str, int], folders: dict[str, Path]) -> None:
    (one,) = run_ranks(cases.trained_weights, 1, folders["qwen3moe"], {})
    many, *_ = run_ranks(cases.trained_weights, 4, folders["qwen3moe"], sizes)
    for name, tensor in one.items():
        assert (many[name] - tensor).abs().max() < 1e-5, name


def _sections() -> dict[str, Any]:
    own = cases.section("adamw", function=LION, arguments={"beta2": 0.98})
    return {**{name: cases.section(name) for name in ("adamw", "adamw8bit", "muon")}, "own": own}


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("qwen3moe", "rlhpc"),
        pytest.param("qwen3moe", "torch", marks=long),
        pytest.param("llama", "rlhpc", marks=long),
        pytest.param("llama", "torch", marks=long),
    ],
)
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "own"])
def test_the_update_after_a_checkpoint_is_bit_equal(
    name: str, kind: str, by: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    for rank in run_ranks(cases.resume_facts, 2, folders[kind], {"dp_shard": 2}, _sections()[name], tmp_path, by):
        assert not rank["differ"]


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=long), "muon", pytest.param("own", marks=long)])
def test_a_checkpoint_continues_on_another_number_of_ranks(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, optimizer = folders["qwen3moe"], _sections()[name]
    first, _ = run_ranks(cases.resume_facts, 2, folder, {"dp_shard": 2}, optimizer, tmp_path, "rlhpc")
    for weights in run_ranks(cases.resumed, 4, folder, {"dp_shard": 4}, optimizer, tmp_path, "rlhpc"):
        for key, tensor in first["whole"].items():
            assert (weights[key] - tensor).abs().max() < 1e-6, key


def test_state_that_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, sections = folders["llama"], _sections()
    run_ranks(cases.resume_facts, 2, folder, {"dp_shard": 2}, sections["adamw8bit"], tmp_path, "rlhpc")
    (error,) = run_ranks(cases.error_of_loading, 1, folder, {}, sections["adamw8bit"], tmp_path)
    assert "has 8-bit moments of 2 shards, which fit no other number; resume on 2 ranks for each copy" in error
    for name in ("adamw", "muon"):
        (error,) = run_ranks(cases.error_of_loading, 1, folder, {}, sections[name], tmp_path)
        assert "has ['exp_avg', 'exp_avg_sq', 'step'] of another optimizer for" in error, name


def test_joined_queries_keys_and_values_are_matrices_of_their_own(tmp_path: Path) -> None:
    folders = {kind: cases.make_joined(tmp_path / kind, kind, layers=1) for kind in cases.JOINED_FAMILIES}
    (found,) = run_ranks(cases.joined_facts, 1, folders)
    assert len(found) == 5
    for kind, facts in found.items():
        assert all(facts.values()), (kind, facts)


def test_state_is_sharded_and_there_before_the_first_update(folders: dict[str, Path]) -> None:
    """A checkpoint before the first update contains it too, and memory does not grow later."""
    for rank in run_ranks(cases.state_facts, 2, folders["qwen3moe"], {"dp_shard": 2}):
        assert rank["adamw"] == 2 * rank["parameters"]
        assert rank["muon"] == 2 * rank["parameters"] - rank["matrices"]
        assert rank["matrices"] > rank["parameters"] / 2


def test_an_optimizer_that_cannot_work_is_refused(folders: dict[str, Path]) -> None:
    def own(function: str) -> Any:
        return cases.section("adamw", function=function)

    refused = [
        (cases.section("adamw8bit"), "actor.optimizer.name: adamw8bit needs the package torchao"),
        (own("builtins:str"), "actor.optimizer.function: builtins:str returned a str, not a torch.optim.Optimizer"),
        (own("torch.optim:Missing"), "actor.optimizer.function: "),
        (
            own("tests.backends.fsdp.optimizer_cases:unsharded"),
            "unsharded stores ['mean'] for a parameter, which a checkpoint cannot contain; store tensors made with",
        ),
    ]
    sections = [section for section, _ in refused]
    for errors in run_ranks(cases.errors_of_updates, 2, folders["llama"], {"dp_shard": 2}, sections):
        for (_, expected), error in zip(refused, errors, strict=True):
            assert expected in error


def test_the_work_is_balanced_over_ranks() -> None:
    """Experts stay where they are, until a rank has its share; others go to the rank with the least work."""
    from rlhpc.backends.fsdp.matrices import Matrix, assign

    experts = [Matrix("experts", 8, index, (range(64),), range(32)) for index in range(8)]
    dense = [Matrix(f"q{index}", 64, None, (range(64),), range(64)) for index in range(6)]
    alone = assign(experts, 4)
    assert [[matrix.index for matrix in some] for some in alone] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    few = assign(experts[:1] + dense, 4)
    assert sorted(len(some) for some in few) == [1, 2, 2, 2]
    assert sorted(map(hash, (m for some in few for m in some))) == sorted(map(hash, experts[:1] + dense))
