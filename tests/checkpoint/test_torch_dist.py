"""Checkpoints of Megatron's format: boxes that hold every element once, and indices that are not to be believed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.checkpoint.formats.model_files import read_fields
from rlhpc.checkpoint.formats.safetensors_reader import TorchDistFolder
from rlhpc.checkpoint.formats.torch_dist import checkpoint_parameters, cut_box, extra_states, tiles
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.plan import describe
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.sharding.shards import Box
from tests.convert.helpers import plan, tensors_of, to_huggingface, to_megatron
from tests.helpers.movement import SHAPES
from tests.helpers.tiny_models import make_model


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7, 11, 12, 30, 1000])
@pytest.mark.parametrize("box", [Box((2, 1), (7, 7)), Box((0, 3, 1), (1, 8, 7)), Box((4,), (13,)), Box((), ())])
def test_a_box_in_parts_holds_each_element_once(box: Box, most: int) -> None:
    parts = cut_box(box, most)
    assert all(part.volume <= most for part in parts)
    moved = [
        Box(*(tuple(a - b for a, b in zip(at, box.start, strict=True)) for at in (p.start, p.stop))) for p in parts
    ]
    assert tiles(box.shape, moved)
    if most >= box.volume:
        assert parts == [box]


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (4, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (2, 3)), ((2, 1), (4, 3))], True),
        ([((0, 0), (2, 3)), ((2, 0), (4, 2))], False),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ([((0, 0), (3, 3)), ((1, 0), (2, 3))], False),
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], False),
        ([((0, 0), (2, 3)), ((3, 0), (5, 3))], False),
        ([((0,), (4,))], False),
    ],
    ids=["rows", "column and rows", "hole", "twice", "one over another", "one into another", "beyond", "dimensions"],
)
def test_whether_boxes_hold_each_element_once(boxes: list[Any], whole: bool) -> None:
    assert tiles((4, 3), [Box(*box) for box in boxes]) is whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    return to_megatron(make_model(folder / "model", "qwen2"), folder / "megatron") / "release"


def test_states_that_modules_ask_for() -> None:
    """Transformer Engine's modules, norms and attention too; Megatron's own linear layers. The embedding has none, and
    the head's is left out by Megatron itself."""
    parameters = checkpoint_parameters(SHAPES["qwen2"])
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")

    def of_layers(*names: str) -> set[str]:
        return {f"decoder.layers.{name}._extra_state/shard_{at}_4" for name in names for at in range(4)}

    assert {*extra_states(parameters, linear=True)} == of_layers(*linears)
    every = of_layers(*linears, "self_attention.core_attention") | {"decoder.final_layernorm._extra_state/shard_0_1"}
    assert {*extra_states(parameters)} == every


def test_experts_have_a_state_each() -> None:
    """In one stack where every layer has experts, else layer by layer."""
    name = "mlp.experts.experts.linear_fc2._extra_state/shard"
    stacked = extra_states(checkpoint_parameters(SHAPES["mixtral"]))
    assert {f"decoder.layers.{name}_{at}.{expert}_4.4" for at in range(4) for expert in range(4)} <= {*stacked}
    single = extra_states(checkpoint_parameters(SHAPES["qwen3_moe"]))
    found = {key for key in single if name in key}
    assert found == {f"decoder.layers.{at}.{name}_{expert}_8" for at in (0, 1, 3) for expert in range(8)}


@pytest.mark.parametrize(
    ("dtype", "changed"),
    [({}, []), ({"dtype": "float32"}, []), ({"dtype": "bfloat16"}, ["float32 tensors are rounded to BF16"])],
)
def test_a_dry_run_reports_what_is_rounded(tmp_path: Path, dtype: dict[str, str], changed: list[str]) -> None:
    lines = describe(plan(make_model(tmp_path / "model", "qwen2"), "megatron", **dtype), 10**9, 2)
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("changed")] == changed


@pytest.mark.parametrize(("text", "message"), [("{", "is not a JSON document"), ("[1]", "is not a JSON object")])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json: {message}"):
        read_fields(tmp_path)


def test_the_path_of_an_index_is_a_plain_value(saved: Path, tmp_path: Path) -> None:
    """PyTorch's own writer names the folder."""
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    document = pickle.loads((folder / ".metadata").read_bytes())
    document.storage_meta.checkpoint_id = folder
    (folder / ".metadata").write_bytes(pickle.dumps(document))
    assert b"PosixPath" in (folder / ".metadata").read_bytes()
    assert read_index(folder).tensors.keys() == read_index(saved).tensors.keys()


def _outside(document: Any) -> None:
    index = next(each for each in document.storage_data if each.offset is not None)
    document.storage_data[index] = replace(document.storage_data[index], relative_path="../elsewhere.distcp")


def _absolute(document: Any) -> None:
    index = next(each for each in document.storage_data if each.offset is not None)
    document.storage_data[index] = replace(document.storage_data[index], relative_path="/etc/passwd")


def _before(document: Any) -> None:
    index = next(each for each in document.storage_data if each.offset is not None)
    document.storage_data[index] = replace(document.storage_data[index], offset=-8)


def _twice(document: Any) -> None:
    tensor = next(each for each in document.state_dict_metadata.values() if len(getattr(each, "chunks", ())) > 1)
    tensor.chunks[1] = tensor.chunks[0]


def _nowhere(document: Any) -> None:
    document.storage_data.clear()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_outside, r"\.metadata: '.*' is outside the checkpoint, in '\.\./elsewhere\.distcp'; "),
        (_absolute, r"is outside the checkpoint, in '/etc/passwd'; "),
        (_before, r"\.metadata: '.*' is at byte -8 of '.*', with \d+ bytes; "),
        (_twice, r"\.metadata: the chunks of '.*' do not contain each element exactly once; "),
        (_nowhere, r"\.metadata: is damaged \(KeyError\); "),
    ],
)
def test_an_index_that_cannot_be_true_is_refused(
    saved: Path, tmp_path: Path, harm: Callable[[Any], None], message: str
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    assert read_index(folder).tensors
    document = pickle.loads((folder / ".metadata").read_bytes())
    harm(document)
    (folder / ".metadata").write_bytes(pickle.dumps(document))
    with pytest.raises(UserError, match=message):
        read_index(folder)


@pytest.mark.heavy
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_block_is_read_into_a_part_of_a_parameter(tmp_path: Path, dtype: str, into: torch.dtype) -> None:
    """Copies into the file's type or another one, between elements that stay as they are."""
    there = to_megatron(make_model(tmp_path / "model", "mixtral"), tmp_path / "there", dtype=dtype, tp=2, ep=2)
    expected = tensors_of(to_huggingface(there, tmp_path / "back"))
    with TorchDistFolder(there, read_model(there)) as files:
        for name, tensor in expected.items():
            slices = tuple(slice(size // 4, size - size // 3) for size in tensor.shape)
            whole = torch.full([size + 2 for size in tensor.shape], 7.0, dtype=into)
            part = whole[tuple(slice(1, 1 + cut.stop - cut.start) for cut in slices)]
            files.read_into(part, name, tuple(tensor.shape), slices)
            assert part.equal(tensor[slices].to(into)), name
            assert int((whole != 7.0).sum()) <= part.numel(), name
