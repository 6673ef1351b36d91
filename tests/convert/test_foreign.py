"""Checkpoints that another program of Megatron could have saved: folders, names, and what is refused of them."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.megatron_folder import TRACKER, checkpoint_folder
from rlhpc.checkpoint.formats.torch_archive import read_file
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.plan import describe
from rlhpc.convert.sides import read_side
from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, index_bytes, plan, to_huggingface, to_megatron, write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture
def theirs(model: Path, tmp_path: Path) -> Path:
    """Without our record, config and tokenizer, at iteration 350 and at 20."""
    ours, folder = to_megatron(model, tmp_path / "ours"), tmp_path / "theirs"
    for iteration in (20, 350):
        shutil.copytree(ours / "release", folder / f"iter_{iteration:07d}")
    (folder / TRACKER).write_text("350\n")
    return folder


def rename_keys(checkpoint: Path, rename: Callable[[str], str]) -> None:
    """Gives tensors other keys."""
    index = read_index(checkpoint)
    tensors = {rename(key): saved for key, saved in index.tensors.items()}
    (checkpoint / ".metadata").write_bytes(index_bytes(tensors, index.objects))


@pytest.mark.parametrize("where", [".", "iter_0000350"])
def test_the_folder_and_the_one_in_it_are_the_same_model(theirs: Path, model: Path, tmp_path: Path, where: str) -> None:
    assert not differing(model, to_huggingface(theirs / where, tmp_path / "back", model=model))


def test_a_step_is_another_iteration_than_the_tracker_s(theirs: Path, model: Path) -> None:
    assert read_side(theirs, model=model).folder.name == "iter_0000350"
    assert read_side(theirs, 20, model).folder.name == "iter_0000020"
    with pytest.raises(UserError, match="no checkpoint in 'iter_0000030'; choose one of iter_0000020, iter_0000350"):
        read_side(theirs, 30, model)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("release", "no checkpoint in 'release', which latest_checkpointed_iteration.txt names; choose one of iter_0"),
        ("three", "latest_checkpointed_iteration.txt: is neither a number nor 'release': 'three'"),
        ("", "is neither a number nor 'release': ''"),
        ("-1", "is neither a number nor 'release': '-1'"),
    ],
)
def test_a_tracker_that_names_nothing_is_an_error(theirs: Path, text: str, message: str) -> None:
    (theirs / TRACKER).write_text(text)
    with pytest.raises(UserError, match=message):
        checkpoint_folder(theirs)


def test_a_folder_without_config_asks_for_a_model(theirs: Path) -> None:
    with pytest.raises(
        UserError, match="pass the HuggingFace folder of the model, or that training started from, as --m"
    ):
        read_side(theirs)


@pytest.mark.heavy
def test_recut_it_keeps_its_iteration_and_gets_values_for_megatron_s_loader(
    theirs: Path, model: Path, tmp_path: Path
) -> None:
    again = to_megatron(theirs, tmp_path / "again", model=model, tp=2)
    assert (again / TRACKER).read_text() == "350"
    import torch

    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(again / "iter_0000350" / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (350, 3.0)
    args = common["args"]
    assert (args.tensor_model_parallel_size, args.num_layers) == (2, read_side(model).num_layers)
    assert not differing(model, to_huggingface(again, tmp_path / "back"))


def test_optimizer_states_of_others_are_refused_or_left_out(theirs: Path, model: Path, tmp_path: Path) -> None:
    checkpoint = theirs / "iter_0000350"
    index = read_index(checkpoint)
    states = {f"optimizer.distributed.{number}": saved for number, saved in enumerate(index.tensors.values())}
    (checkpoint / ".metadata").write_bytes(index_bytes({**index.tensors, **states}, index.objects))
    with pytest.raises(
        UserError, match="has optimizer states of another program, which are not read; convert it to a H"
    ):
        plan(theirs, "megatron", model=model)
    lines = describe(plan(theirs, "hf", model=model), 10**9, 1)
    assert any("optimizer states are left out" in line for line in lines)
    assert not differing(model, to_huggingface(theirs, tmp_path / "back", model=model))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "was written by an older rlhpc"),
        (
            "mlp.linear_fc1.weight",
            "mlp.linear_fc1.weight_w",
            r"gate and up projections apart \(singleton_local_shards\)",
        ),
        (
            "mlp.linear_fc2.weight",
            "mlp.fc2.weight",
            r"has no 'decoder\.layers\.mlp\.linear_fc2\.weight', which .* requires",
        ),
    ],
)
def test_other_names_are_refused_in_one_line(theirs: Path, model: Path, old: str, new: str, message: str) -> None:
    rename_keys(theirs / "iter_0000350", lambda key: key.replace(old, new))
    with pytest.raises(UserError, match=message):
        read_side(theirs, model=model)


def test_values_of_a_release_are_read_without_classes_of_megatron(model: Path, tmp_path: Path) -> None:
    """As inert placeholders: a login node has neither torch nor megatron-core."""
    ours = to_megatron(model, tmp_path / "ours")
    common = read_file(ours / "release" / "common.pt")
    assert common["iteration"] == 0
    assert not isinstance(common["args"], Namespace)
