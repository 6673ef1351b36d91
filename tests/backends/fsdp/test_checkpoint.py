"""Checkpoints of sharded models: bit-equal on the same ranks and on others, whole after any failure, safe to load."""

from __future__ import annotations

import json
import pickle
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.checkpoint.formats.described import describe_model
from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.checkpoint.formats.torch_chunks import open_chunk
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.sides import read_side
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.backends.fsdp import checkpoint_cases as cases
from tests.backends.fsdp.sharded_cases import MODELS
from tests.convert.helpers import Code, archive, index_bytes, tensors_of, to_huggingface, to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

TWO = {"dp_shard": 2}
SOME = ("qwen3_tied", "qwen3moe", "dsv3")
MESHES = [
    (TWO, tuple(MODELS)),
    ({"dp_replicate": 2, "dp_shard": 2}, SOME),
    pytest.param({}, SOME, marks=pytest.mark.long),
    pytest.param({"dp_shard": 4}, SOME, marks=pytest.mark.long),
    pytest.param({"dp_shard": 2, "cp": 2}, tuple(MODELS), marks=pytest.mark.long),
]
Saved = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="session")  # sharing models brings no test into a tier
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {name: make_model(top / name, kind, **changes) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Checkpoints and exports of two ranks, and what these had then."""
    target = tmp_path_factory.mktemp("saved")
    return target, run_ranks(cases.save_all, 2, folders, target, TWO)


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
def test_any_mesh_loads_every_element(
    sizes: dict[str, int], names: tuple[str, ...], folders: dict[str, Path], saved: Saved, tmp_path: Path
) -> None:
    """Weights, and moments and steps of AdamW; the next update on the same ranks is bit-equal too."""
    path, expected = saved
    some = {name: folders[name] for name in names}
    for rank, found in enumerate(run_ranks(cases.load_all, prod(sizes.values()), some, path, sizes, tmp_path)):
        for name in names:
            before, after, _ = expected[0][name]
            assert found[name][0].keys() == before.keys()
            wrong = [key for key, value in before.items() if not torch.equal(found[name][0][key], value)]
            assert not wrong, (name, rank)
            if sizes == TWO:
                assert found[name][1] == after, name
    for name in names:
        assert read_index(tmp_path / name).tensors.keys() == read_index(path / name).tensors.keys()
        assert _written(tmp_path / name) == _indexed(tmp_path / name), "each copy of the weights has written them"


def _written(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.distcp"))


def _indexed(folder: Path) -> int:
    """Bytes of values in the index, which has each element once."""
    index = read_index(folder)
    chunks = (chunk for tensor in index.tensors.values() for chunk in tensor.chunks)
    return sum(chunk.length for chunk in chunks) + sum(length for *_, length in index.objects.values())


def test_a_checkpoint_converts_to_what_the_model_has(folders: dict[str, Path], saved: Saved, tmp_path: Path) -> None:
    """In the model's dtype, and in float32 the master weights; tied and stacked weights by HuggingFace's names."""
    path, ranks = saved
    for name, model in folders.items():
        trained = {key: value for key, value in ranks[0][name][0].items() if " of " not in key}
        for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"dtype": "float32"})):
            folder = to_huggingface(path / name, tmp_path / f"{name}-{dtype}", model=model, **options)
            found, own = tensors_of(folder), tensors_of(model)
            assert found.keys() == own.keys() == trained.keys()
            assert any(not torch.equal(found[key].float(), own[key].float()) for key in own)
            for key, value in found.items():
                kept = dtype if name == "gemma2" and not key.endswith("_bias") else torch.float32
                assert torch.equal(value, trained[key].to(kept)), key


def test_a_conversion_is_verified(folders: dict[str, Path], saved: Saved, tmp_path: Path) -> None:
    """Of a family and of none; a flipped bit of the checkpoint is found, and an expert in another's place."""
    for name in ("gemma2", "qwen3moe"):
        folder = to_huggingface(saved[0] / name, tmp_path / name, model=folders[name])
        report = verify(saved[0] / name, folder, 1, model=folders[name])
        assert not report.faults
        assert "are equal bit for bit" in report.notes[0]
    harmed = Path(shutil.copytree(saved[0] / "qwen3moe", tmp_path / "harmed"))
    chunk = read_index(harmed).tensors["model.norm.weight"].chunks[0]
    array = open_chunk(harmed, chunk)
    data = bytearray(array.path.read_bytes())
    data[array.start] ^= 1
    array.path.write_bytes(data)
    (fault,) = verify(harmed, folder, 1, model=folders[name]).faults
    assert fault.startswith(f"{array.path}: the chunk at byte {chunk.start} is damaged (Bad CRC-32 for file")
    table = json.loads((saved[0] / name / "weights.json").read_text())
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in (0, 1)]
    one, two = (weight for weight in table["weights"] if weight["name"] in names)
    one["pieces"], two["pieces"] = two["pieces"], one["pieces"]
    swapped = Path(shutil.copytree(saved[0] / "qwen3moe", tmp_path / "swapped"))
    (swapped / "weights.json").write_text(json.dumps(table))
    faults = verify(swapped, folder, 1, model=folders[name]).faults
    assert f"{one['name']}: contains {two['name']}" in faults


def test_an_export_is_the_conversion_byte_for_byte(folders: dict[str, Path], saved: Saved, tmp_path: Path) -> None:
    for name, model in folders.items():
        converted = to_huggingface(saved[0] / name, tmp_path / name, model=model)
        (converted / "conversion.json").unlink()
        exported = saved[0] / f"{name}-hf"
        assert {file.name for file in exported.iterdir()} == {file.name for file in converted.iterdir()}
        for file in exported.iterdir():
            assert file.read_bytes() == (converted / file.name).read_bytes(), (name, file.name)


@pytest.mark.parametrize("name", ["qwen3_tied", "gemma2", "qwen3moe"])
def test_transformers_opens_an_export(name: str, saved: Saved) -> None:
    from transformers import AutoModelForCausalLM

    path, ranks = saved
    model = AutoModelForCausalLM.from_pretrained(path / f"{name}-hf", attn_implementation="sdpa")
    with torch.no_grad():
        logits = model.lm_head(model.model(torch.tensor([cases.TOKENS])).last_hidden_state)
    assert logits.dtype is (torch.bfloat16 if name == "gemma2" else torch.float32)
    assert float(logits.abs().max()) > 0.3
    assert float((logits.float() - ranks[1][name][2].float()).abs().max()) < (1e-2 if name == "gemma2" else 1e-5)


@pytest.fixture(scope="module")
def otherwise(folders: dict[str, Path], saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    megatron = to_megatron(folders["llama"], tmp_path_factory.mktemp("megatron") / "llama")
    return run_ranks(cases.load_otherwise, 2, folders, saved[0], megatron)


def test_a_critic_starts_from_a_language_model(otherwise: list[dict[str, Any]], saved: Saved) -> None:
    for rank in otherwise:
        for critic, name in (("critic", "llama"), ("tied critic", "qwen3_tied")):
            trained = saved[1][0][name][0]
            found = rank[critic]
            assert not found.pop("score.weight").any()
            assert all(torch.equal(value, trained[key]) for key, value in found.items())
        assert (rank["critic again"]["score.weight"] == 0.25).all()


def test_a_frozen_model_loads_master_weights(otherwise: list[dict[str, Any]], saved: Saved) -> None:
    for rank in otherwise:
        assert all(
            torch.equal(value, saved[1][0]["qwen3moe"][0][key].bfloat16()) for key, value in rank["frozen"].items()
        )


def test_what_is_not_of_the_model_is_refused(otherwise: list[dict[str, Any]], folders: dict[str, Path]) -> None:
    for rank in otherwise:
        assert "the checkpoint has no 'score.weight', which the model requires" in rank["no head"]
        assert "'model.embed_tokens.weight' has shape [67, " in rank["other model"]
        assert (
            "is a checkpoint of train.backend megatron, which fsdp cannot load; convert it with" in rank["megatron's"]
        )
        assert "has no optimizer state" in rank["no optimizer"]


def test_megatron_refuses_a_sharded_checkpoint(folders: dict[str, Path], saved: Saved) -> None:
    (error,) = run_ranks(cases.load_by_megatron, 1, folders["llama"], saved[0] / "llama")
    assert "is a checkpoint of train.backend fsdp, which megatron cannot load; convert it with" in error


def test_training_continues_and_none_of_it_gets_into_the_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two models' writers are held up until further updates are done."""
    for rank in run_ranks(cases.save_beside_training, 2, folders["qwen3moe"], tmp_path):
        assert rank["done"] == ([False, False], [True, True])
        assert rank["others"]
        assert rank["saved"]
        assert rank["resumed"]


def test_a_failed_write_is_the_file_system_s_error_on_every_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    """At once and in the background; what passes is written again, whole."""
    for found in run_ranks(cases.fail_to_write, 2, folders["llama"], tmp_path):
        for way in (False, True):
            for name in ("__1_0.distcp", ".metadata.tmp"):
                assert found[f"full {name} {way}"].startswith("OSError: [Errno 28] No space left on device"), name
            assert found[f"again {way}"] == sorted(cases.FSYNC_FAILS)
            assert found[f"whole {way}"]
        for name in cases.FSYNC_FAILS:
            assert found[f"lost {name}"].startswith("StorageError: [Errno 5] Input/output error"), name


def test_a_checkpoint_that_would_run_code_is_refused(folders: dict[str, Path], saved: Saved, tmp_path: Path) -> None:
    """In the index, in the place of a tensor, and in the optimizer's values."""
    (tmp_path / "ran").mkdir()
    poisoned = {}
    for name in ("index", "tensor", "value"):
        poisoned[name] = Path(shutil.copytree(saved[0] / "llama", tmp_path / name))
        _poison(name, poisoned[name], Code(tmp_path / "ran" / name))
    for rank in run_ranks(cases.load_poisoned, 2, folders["llama"], poisoned):
        assert "names posix.mkdir, which is not part of the format: it is not opened" in rank["index"]
        assert "cannot be read (" in rank["tensor"]
        assert "names posix.mkdir, which is not part of a checkpoint's objects" in rank["value"]
    assert not list((tmp_path / "ran").iterdir())


def _poison(name: str, folder: Path, code: Code) -> None:
    if name == "index":
        (folder / ".metadata").write_bytes(pickle.dumps(code))
        return
    index, data = read_index(folder), archive(code)
    (folder / "poison.distcp").write_bytes(data)
    place = ("poison.distcp", 0, len(data))
    if name == "value":
        (folder / ".metadata").write_bytes(index_bytes(index.tensors, {**index.objects, "optimizer": place}))
        return
    chunk = index.tensors["model.norm.weight"].chunks[0]
    with open(folder / chunk.file, "r+b") as file:
        file.seek(chunk.start)
        file.write(data.ljust(chunk.length, b"\0")[: chunk.length] if len(data) > chunk.length else data)


def test_the_check_before_a_run_reads_the_format(folders: dict[str, Path], saved: Saved) -> None:
    """Of a known family, and of another, whose tensors are those of the folder of its config."""
    for name in ("qwen3moe", "gemma2"):
        found = check_weights(saved[0] / name, describe_model(folders[name]))
        assert found.shapes == {key: tuple(tensor.shape) for key, tensor in tensors_of(folders[name]).items()}
        assert found.total_bytes == _written(saved[0] / name)
    with pytest.raises(UserError, match=r"requires \[67, 128\]; use the config.json that belongs to these weights"):
        check_weights(saved[0] / "qwen3moe", describe_model(folders["llama"]))


def test_a_table_that_cannot_be_true_is_refused(folders: dict[str, Path], saved: Saved, tmp_path: Path) -> None:
    def harmed(**changes: Any) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(saved[0] / "qwen3moe", folder)
        table = json.loads((folder / "weights.json").read_text())
        table["weights"][1].update(changes)
        (folder / "weights.json").write_text(json.dumps(table))
        with pytest.raises(UserError) as error:
            read_side(folder, model=folders["qwen3moe"])
        return str(error.value)

    assert "does not consist of its pieces" in harmed(shape=[1, 1])
    assert "which the checkpoint has not" in harmed(pieces=[[[0], [16], "absent", [0]]], shape=[16])
    assert "is not in 'model.norm.weight'" in harmed(pieces=[[[0], [16], "model.norm.weight", [999]]], shape=[16])
    assert "has dtype 'complex'" in harmed(dtype="complex")
    assert "is damaged (TypeError)" in harmed(pieces=None)
