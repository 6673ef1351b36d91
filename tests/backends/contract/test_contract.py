"""Both training back ends keep the contract of ``rlhpc.api.TrainBackend``, and compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.safetensors_headers import read_folder
from tests.backends.contract import programs
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

NAMES = ("megatron", "fsdp")
KINDS = ("llama", pytest.param("qwen2", marks=pytest.mark.long), pytest.param("qwen3", marks=pytest.mark.long))
Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def facts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of each rank, by back end."""
    return {name: run_ranks(programs.facts, 2, name, folder, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(params=NAMES)
def ranks(request: pytest.FixtureRequest, facts: Facts) -> list[dict[str, Any]]:
    return facts[request.param]


def test_weights_are_those_of_the_files(ranks: list[dict[str, Any]], folder: Path) -> None:
    size = sum(entry.size for entry in read_folder(folder).values()) // 4
    for rank in ranks:
        assert rank["names"]
        assert not rank["unequal"]
        assert not rank["wrong_views"]
        assert rank["read_seconds"] > 0
        assert rank["dp"] == 2
    assert sum(rank["elements"] for rank in ranks) in (size, 2 * size)  # shards, or a copy on each rank


def test_tensors_are_taken_and_copied(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["taken"] and rank["copied"] for rank in ranks)


def test_stats_are_of_trained_tokens_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["outside"] == 0.0
        assert rank["likely"]
        assert rank["blank"] == [(5,)]


def test_a_replay_and_a_skipped_update_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["differentiated"] == (False, True)
        assert rank["skipped"] == (False, False, False, True)


def test_an_update_is_applied_and_its_numbers_are_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["applied"] == (True, True, True) and rank["equal_sums"] for rank in ranks)
    assert ranks[0]["numbers"]["updates"] == ranks[1]["numbers"]["updates"]


def test_loading_resets_the_optimizer(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["reset"] for rank in ranks)


def test_one_weight_that_is_not_finite_is_seen_by_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["finite"] and rank["not_finite"] for rank in ranks)


@pytest.mark.parametrize("fact", [f"{what} {kind}" for what in ("loaded", "resumed") for kind in ("now", "background")])
def test_checkpoints_continue_bit_for_bit(ranks: list[dict[str, Any]], fact: str) -> None:
    assert all(rank[fact] for rank in ranks)


def test_a_model_starts_from_the_weights_of_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["initial weights of a checkpoint"] for rank in ranks)


def test_offloaded_state_has_no_memory_and_comes_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["offloaded"] == (True, 0)
        assert rank["offload changes nothing"]


def test_a_new_critic_predicts_zero(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["critic"]["fresh"] == 0.0 for rank in ranks)


def test_critics_of_both_back_ends_agree(facts: Facts) -> None:
    for megatron, fsdp in zip(*(facts[name] for name in NAMES), strict=True):
        ours, theirs = fsdp["critic"], megatron["critic"]
        assert ours["values"] == pytest.approx(theirs["values"], rel=1e-5, abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["sums"] == pytest.approx(theirs["sums"], rel=1e-5)


def test_three_updates_of_both_back_ends_agree(facts: Facts) -> None:
    for megatron, fsdp in zip(*(facts[name] for name in NAMES), strict=True):
        ours, theirs = fsdp["numbers"], megatron["numbers"]
        for mine, other in zip(ours["updates"], theirs["updates"], strict=True):
            assert mine == pytest.approx(other, rel=1e-5)
        for name, tensor in ours["weights"].items():
            assert float((tensor - theirs["weights"][name]).abs().max()) < 1e-5, name
