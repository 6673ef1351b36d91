"""What a folder has beyond its model is a fault: files, keys, and a list of files that is not true."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD
from rlhpc.checkpoint.formats.safetensors_headers import INDEX
from rlhpc.convert.execute import convert
from rlhpc.convert.metadata import write_manifest
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import index_bytes, plan, tensors_of, to_huggingface, to_megatron
from tests.helpers.tiny_models import make_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("extras")
    source = make_model(folder / "source", "qwen3")
    megatron = to_megatron(source, folder / "megatron", tp=2)
    return {"source": source, "megatron": megatron, "back": to_huggingface(megatron, folder / "back", file_bytes=10**6)}


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def faults(folders: dict[str, Path], target: Path) -> list[str]:
    return verify(folders["source"], target, workers=1).faults


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "__99_0.distcp", "inside/weights.bin", ".hidden"])
@pytest.mark.parametrize("kind", ["megatron", "back"])
def test_a_file_that_the_conversion_did_not_write_is_named(
    folders: dict[str, Path], copy: Callable[[str], Path], kind: str, name: str
) -> None:
    target = copy(kind)
    (target / name).parent.mkdir(exist_ok=True)
    shutil.copy(folders["source"] / "model.safetensors", target / name)
    assert f"{target / name}: not written by the conversion" in faults(folders, target)


@pytest.mark.parametrize(
    ("kind", "name"), [("megatron", "release/__99_0.distcp"), ("back", "model-00009-of-00009.safetensors")]
)
def test_weights_outside_the_index_are_named_without_any_record(
    folders: dict[str, Path], copy: Callable[[str], Path], kind: str, name: str
) -> None:
    target = copy(kind)
    (target / RECORD).unlink()
    assert not faults(folders, target)
    shutil.copy(folders["source"] / "model.safetensors", target / name)
    assert faults(folders, target) == [f"{target / name}: not in the index"]


def test_a_file_of_tensors_that_the_model_does_not_use_is_in_the_index(
    folders: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    target = copy("back")
    (target / RECORD).unlink()
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({unused: torch.zeros(4)}, target / "model-00009-of-00009.safetensors")
    index = json.loads((target / INDEX).read_text())
    index["weight_map"][unused] = "model-00009-of-00009.safetensors"
    (target / INDEX).write_text(json.dumps(index))
    assert faults(folders, target) == [f"{unused} is only in {target}"]


def test_a_tokenizer_that_only_the_second_has_is_named(folders: dict[str, Path], copy: Callable[[str], Path]) -> None:
    target = copy("back")
    (target / RECORD).unlink()
    (target / "chat_template.jinja").write_text("{{ messages }}")
    assert faults(folders, target) == [f"{target / 'chat_template.jinja'}: not in {folders['source']}"]


def test_a_key_beyond_the_model_and_its_overlap_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """An index with one more tensor, whose chunk is another's."""
    from rlhpc.checkpoint.formats.torch_dist_metadata import read_index

    target = Path(shutil.copytree(folders["megatron"], tmp_path / "megatron"))
    (target / RECORD).unlink()
    checkpoint = target / "release"
    index = read_index(checkpoint)
    tensors = {**index.tensors, "decoder.layers.lora_A": index.tensors["decoder.final_layernorm.weight"]}
    (checkpoint / ".metadata").write_bytes(index_bytes(tensors, index.objects))
    first, second = faults(folders, target)
    assert first == f"decoder.layers.lora_A in {checkpoint} is not part of the model"
    assert ": decoder.final_layernorm.weight and decoder.layers.lora_A overlap at byte " in second


def test_a_tensor_that_the_model_does_not_use_is_named_where_added(folders: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    target = Path(shutil.copytree(folders["source"], tmp_path / "other"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors_of(target), name: torch.ones(4)}, target / "model.safetensors", metadata={"format": "pt"})
    assert faults(folders, target) == [f"{name} is only in {target}"]
    assert not verify(target, folders["megatron"], workers=1).faults, "left out by the conversion"


@pytest.mark.parametrize("way", ["another file", "a name that no file has", "a name less"])
def test_an_index_that_is_not_true_is_refused(copy: Callable[[str], Path], tmp_path: Path, way: str) -> None:
    source = copy("back")
    index = source / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    places, name = document["weight_map"], "model.norm.weight"
    if way == "another file":
        places[name] = next(file for file in places.values() if file != places[name])
    elif way == "a name less":
        del places[name]
    else:
        places["model.norm.bias"] = places[name]
    index.write_text(json.dumps(document))
    wrong = {"a name less": "does not list 'model.norm.weight'", "another file": "'model.norm.weight' in model-0"}
    with pytest.raises(UserError, match=wrong.get(way, "lists 'model.norm.bias', which no file has")):
        to_megatron(source, tmp_path / "target")


@pytest.mark.parametrize("kind", ["megatron", "hf"])
def test_coreutils_check_the_manifest(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    source, target = folders["source" if kind == "megatron" else "megatron"], tmp_path / "target"
    convert(plan(source, kind), target, workers=1)
    write_manifest(target, 2)
    listed = {line.split("  ", 1)[1] for line in (target / MANIFEST).read_text().splitlines()}
    files = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    assert listed == files.keys() - {MANIFEST}
    check = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST]
    assert subprocess.run(check, cwd=target, capture_output=True).returncode == 0
    assert not verify(folders["source"], target, workers=1).faults
    weights = max(files.values(), key=lambda file: file.stat().st_size)
    with open(weights, "r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"\x55\xaa\x55\xaa")
    found = subprocess.run(check, cwd=target, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, f"{weights.relative_to(target)}: FAILED\n")


def test_a_folder_with_a_manifest_is_replaced_as_a_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    target = to_megatron(folders["source"], tmp_path / "target")
    write_manifest(target, 1)
    to_megatron(folders["source"], target, tp=2)
    assert not (target / MANIFEST).exists()


def test_a_manifest_that_lacks_a_file_is_a_fault(folders: dict[str, Path], copy: Callable[[str], Path]) -> None:
    target = copy("source")
    write_manifest(target, 1)
    (target / "generation_config.json").unlink()
    (target / "added.json").write_text("{}")
    found = faults(folders, target)
    assert f"{target / 'added.json'}: not in {MANIFEST}" in found
    assert f"{target / 'generation_config.json'}: missing, {MANIFEST} lists it" in found


def test_odd_names_are_listed_as_coreutils_do(tmp_path: Path) -> None:
    for name in ("a\\b", "new\nline", "plain", "*star"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, 1)
    done = subprocess.run(["sha256sum", "--check", "--strict", "--quiet", MANIFEST], cwd=tmp_path, check=False)
    assert done.returncode == 0
