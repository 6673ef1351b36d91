"""The FSDP2 back end trains as plain transformers does, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.fsdp import backend_cases as cases
from tests.backends.fsdp.architecture_updates import try_kind
from tests.backends.fsdp.backend_cases import Case
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import UNDESCRIBED, make_model

pytestmark = pytest.mark.ranks

KINDS = ("llama", "qwen2_tied", "qwen3")
OTHERS = ("qwen2", "mixtral", "qwen3moe", "dsv3", *UNDESCRIBED)


@pytest.fixture(scope="session")  # sharing models brings no test into a tier
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return run_ranks(cases.make_references, 1, tmp_path_factory.mktemp("references"), KINDS)[0]


def _check(references: dict[str, Path], ranks: int, tried: list[Case]) -> None:
    for rank in run_ranks(cases.try_cases, ranks, references, tried):
        for case, found in zip(tried, rank, strict=True):
            assert found.is_small, f"{case} on {ranks} ranks: {found}"


ON_TWO_RANKS = [*(Case(kind) for kind in KINDS), Case("llama", cp=2)]
MORE_ON_TWO_RANKS = [Case("llama", cp=2, cp_method="all_gather"), Case("qwen2_tied", memory={"cpu_offload": True})]


@pytest.mark.parametrize(
    "tried", [ON_TWO_RANKS, pytest.param(MORE_ON_TWO_RANKS, marks=pytest.mark.long)], ids=["some", "more"]
)
def test_two_ranks_train_as_one_process_of_transformers(references: dict[str, Path], tried: list[Case]) -> None:
    _check(references, 2, tried)


def test_four_ranks_and_one(references: dict[str, Path]) -> None:
    tried = [Case("qwen3"), Case("qwen2_tied", dp_replicate=2), Case("llama", cp=2)]
    _check(references, 4, [*tried, Case("qwen3", dp_replicate=2, memory={"accumulation": "keep"})])
    _check(references, 1, [Case("llama"), Case("llama", memory={"cpu_offload": True})])


def test_passes_without_gradient_leave_no_trace(references: dict[str, Path]) -> None:
    """A reference computes nothing else for a whole run."""
    assert run_ranks(cases.passes_remembered, 1, references["llama"]) == [(0, 0)]


RECOMPUTED = {  # parts of a layer that run twice in an update, for each choice; others run once
    "none": set(),
    "full": {"attention", "self_attn", "mlp.gate", "mlp.experts", "input_layernorm"},
    "core_attn": {"attention"},
    "moe": {"mlp.gate", "mlp.experts"},
}


def test_recomputation_runs_what_it_names_twice_and_changes_no_result(
    references: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path, "qwen3moe")
    memories = [
        {"recompute": name} if name in ("none", "full") else {"recompute": "selective", "recompute_modules": [name]}
        for name in RECOMPUTED
    ]
    (counts,) = run_ranks(cases.count_recomputed, 1, folder, memories)
    for twice, found in zip(RECOMPUTED.values(), counts, strict=True):
        for part in sorted(set.union(*RECOMPUTED.values())):
            assert found[part] == (2 if part in twice else 1), (twice, found)
    selective = {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}
    _check(references, 2, [Case("llama", memory={"recompute": "full"}), Case("qwen3", cp=2, memory=selective)])


@pytest.mark.long
def test_every_architecture_with_shards_and_context_parallelism(tmp_path: Path) -> None:
    """dp_shard 2 x cp 2, in which architectures without a table are known by their folders alone."""
    references = run_ranks(cases.make_references, 1, tmp_path, OTHERS)[0]
    _check(references, 4, [Case(kind, cp=2) for kind in OTHERS])


@pytest.mark.long
def test_compiled_layers_are_one_graph_without_breaks(references: dict[str, Path]) -> None:
    tried = [Case("llama", compiled=True), Case("qwen3", cp=2, memory={"recompute": "full"}, compiled=True)]
    compiler = {"TORCHDYNAMO_DISABLE": "0"}
    for rank in run_ranks(cases.compiled_graphs, 2, references, tried, environ=compiler, fresh=True):
        for case, (distance, graphs) in zip(tried, rank, strict=True):
            assert distance.is_small, f"{case}: {distance}"
            # With and without gradient.
            assert (graphs["forward"], graphs["breaks"]) == (2, 0), f"{case}: {graphs}"


@pytest.mark.parametrize("kind", ["gpt_neox", pytest.param("gemma3", marks=pytest.mark.long)])
def test_models_whose_files_are_converted_by_their_class(kind: str) -> None:
    """FSDP gives the model another class."""
    found = try_kind(kind)
    assert found["equal"], found
