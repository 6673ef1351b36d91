"""Transformers models sharded by FSDP2: weights bit-equal to their files, gradients those of one process."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.checkpoint.formats.safetensors_headers import StoredTensor, read_folder
from rlhpc.models import read_model
from rlhpc.sharding.shards import model_tensors
from tests.backends.fsdp import sharded_cases as cases
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "dp_shard 2": ({"dp_shard": 2}, tuple(cases.MODELS)),
    "dp_shard 4": ({"dp_shard": 4}, tuple(cases.MODELS)),
    "dp_replicate 2 x dp_shard 2": ({"dp_replicate": 2, "dp_shard": 2}, tuple(cases.MODELS)),
    "dp_shard 2 x cp 2": ({"dp_shard": 2, "cp": 2}, ("llama",)),
}
EXPERTS = ("qwen3moe", "dsv3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_model(tmp_path_factory.mktemp(name), kind, **changes)
        for name, (kind, changes) in cases.MODELS.items()
    }


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    run_ranks(cases.write_reference, 1, folders, folder)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, folders: dict[str, Path], reference: Path) -> Layout:
    sizes, names = LAYOUTS[request.param]
    ranks = run_ranks(
        cases.layout_facts, prod(sizes.values()), {name: folders[name] for name in names}, reference, sizes
    )
    return Layout(
        sizes.get("dp_shard", 1) * sizes.get("cp", 1), {name: [rank[name] for rank in ranks] for name in names}
    )


class Layout:
    """What the ranks have found for each model. ``shards``: ranks of one copy of the weights."""

    def __init__(self, shards: int, facts: dict[str, list[dict[str, Any]]]) -> None:
        self.shards, self.facts = shards, facts

    def ranks(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, rank) for name, ranks in self.facts.items() for rank in ranks]

    def copies(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Model and ranks of each copy of its weights."""
        return [
            (name, ranks[first : first + self.shards])
            for name, ranks in self.facts.items()
            for first in range(0, len(ranks), self.shards)
        ]


def test_whole_tensors_equal_the_files_bit_for_bit(layout: Layout, folders: dict[str, Path]) -> None:
    for name, rank in layout.ranks():
        assert rank["names"] == sorted(read_folder(folders[name])), name
        assert not rank["wrong_tensors"], name


def test_views_equal_the_files_blocks(layout: Layout) -> None:
    for name, rank in layout.ranks():
        assert not rank["wrong_views"], name


def test_boxes_cover_every_tensor_once_in_each_copy(layout: Layout, folders: dict[str, Path]) -> None:
    for name, copy in layout.copies():
        files = read_folder(folders[name])
        covered = {key: np.zeros(tensor.shape, int) for key, tensor in files.items()}
        for rank in copy:
            for shard in rank["shards"]:
                assert shard.box.volume, shard
                covered[shard.tensor.name][shard.box.slices] += 1
        replicated = copy[0]["replicated"]
        assert {key for key in covered if key.endswith(cases.BIAS)} == replicated
        for key, count in covered.items():
            assert (count == (len(copy) if key in replicated else 1)).all(), (name, key)


def test_tensors_are_those_of_the_family_tables(layout: Layout, folders: dict[str, Path]) -> None:
    """Weight sync matches both sides by name, shape, layer, expert and dtype."""
    for name, ranks in layout.facts.items():
        if name != "gemma2":  # no family of the tables
            found = {shard.tensor for rank in ranks for shard in rank["shards"]}
            assert found == set(model_tensors(read_model(folders[name]))), name


def test_fewer_experts_than_ranks_leave_a_rank_without(layout: Layout) -> None:
    for name, copy in layout.copies():
        if name == "qwen3moe":
            experts = [{shard.tensor.expert for shard in rank["shards"]} - {None} for rank in copy]
            assert experts == ([{0, 1}, {2}] if layout.shards == 2 else [{0}, {1}, {2}, set()])


def test_a_rank_reads_its_share(layout: Layout, folders: dict[str, Path]) -> None:
    for name, copy in layout.copies():
        files = read_folder(folders[name])
        whole = sum(tensor.size for tensor in files.values())
        again = (layout.shards - 1) * sum(files[key].size for key in copy[0]["replicated"])
        assert sum(rank["read"].total for rank in copy) == whole + again, name
        for rank in copy:
            limit = 1.02 * whole / layout.shards if name != "qwen3moe" else 0.62 * whole
            assert rank["read"].total <= limit, name
            assert rank["read"].largest_block <= _largest_share(files, layout.shards), name


def test_a_rank_allocates_its_share(layout: Layout, folders: dict[str, Path]) -> None:
    for name, rank in layout.ranks():
        whole = sum(tensor.size for tensor in read_folder(folders[name]).values())
        # The last of four ranks has memory for an expert that it does not have: shards are padded to one size.
        assert rank["allocated"] <= (1.02 * whole / layout.shards if name != "qwen3moe" else 0.62 * whole), name


def _largest_share(files: dict[str, StoredTensor], shards: int) -> int:
    """Bytes of the largest share of a tensor: an expert's are whole."""
    return max(
        tensor.size if ".experts." in name else -(-tensor.shape[0] // shards) * tensor.size // tensor.shape[0]
        for name, tensor in files.items()
    )


@pytest.mark.parametrize("accumulation", ["reduce", "keep"])
def test_gradients_equal_one_process(layout: Layout, accumulation: str) -> None:
    for name, rank in layout.ranks():
        assert rank[accumulation] < 1e-5, name


def test_a_critic_equals_one_process(layout: Layout) -> None:
    for name, rank in layout.ranks():
        assert rank["critic"]["fresh"] == 0, name
        assert rank["critic"]["values"] < 1e-5, name
        assert rank["critic"]["gradients"] < 1e-5, name


@pytest.mark.parametrize("shard_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "dsv3"])
def test_half_precision_computes_as_plain_transformers(name: str, shard_dtype: str, folders: dict[str, Path]) -> None:
    for rank in run_ranks(cases.half_precision_facts, 2, folders[name], shard_dtype):
        assert rank["same_logits"]
        assert rank["argument"] == "torch.float32"  # of the head: a temperature, say, is not rounded


def test_a_frozen_model_in_half_precision_keeps_float32_biases(folders: dict[str, Path]) -> None:
    for rank in run_ranks(cases.half_precision_facts, 2, folders["dsv3"], "bfloat16"):
        assert "lm_head.weight" in rank["gathered"]  # else the pass has not tested what follows
        assert rank["float32"] == rank["declared"] == {"model.layers.1.mlp.gate.e_score_correction_bias"}
        assert not rank["wrong"]


def test_sizes_that_are_not_those_of_the_job_are_refused(folders: dict[str, Path]) -> None:
    (error,) = run_ranks(cases.error_of, 1, {"dp_shard": 3}, folders["llama"])
    assert "dp_replicate 1 x dp_shard 3 x cp 1 = 3 ranks, but there are 1" in error


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (error,) = run_ranks(cases.error_of, 1, {}, tmp_path)
    assert error.startswith("model.path: transformers cannot build 't5'")
    assert len(error) < 500


@pytest.mark.parametrize("fault", ["missing", "quantized"])
def test_unusable_weights_are_refused(fault: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folders["llama"] / "model.safetensors")
    weight = tensors.pop(name)
    if fault == "quantized":
        tensors[name] = weight.to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    (error,) = run_ranks(cases.error_of, 1, {}, tmp_path)
    expected = {"missing": f"tensor {name!r} is missing", "quantized": f"tensor {name!r} is float8_e4m3fn"}
    assert expected[fault] in error
