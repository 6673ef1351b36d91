"""Faults planted in files: each is found on disk and reported by file, tensor or field."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.model_files import RECORD
from rlhpc.convert.verify import verify
from tests.convert.helpers import differing, tensors_of, to_huggingface, to_megatron
from tests.helpers.tiny_models import make_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with experts in files of several kinds; ``bare`` ones know nothing of the conversion that made them."""
    folder = tmp_path_factory.mktemp("verify")
    source = make_model(folder / "source", "dsv3", num_hidden_layers=3)
    megatron = to_megatron(source, folder / "megatron", tp=2, ep=2)
    back = to_huggingface(megatron, folder / "back", file_bytes=500_000)
    found = {"source": source, "megatron": megatron, "back": back}
    for name in ("megatron", "back"):
        found[f"bare {name}"] = Path(shutil.copytree(found[name], folder / f"bare-{name}"))
        (found[f"bare {name}"] / RECORD).unlink()
    return found


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy to do harm to."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / "copy"))


def faults(folders: dict[str, Path], target: Path) -> list[str]:
    return verify(folders["source"], target, workers=1).faults


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(at)
        (byte,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("name", ["megatron", "back", "bare megatron", "bare back"])
def test_a_whole_folder_has_no_faults(folders: dict[str, Path], name: str) -> None:
    assert not faults(folders, folders[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["megatron", "back"])
def test_any_flipped_byte_is_found(
    tmp_path: Path, folders: dict[str, Path], copy: Callable[[str], Path], name: str
) -> None:
    """Bytes of any file: weights, index, archive around the weights, config. Those in padding change nothing."""
    target, chance = copy(name), random.Random(5)
    files = sorted(file for file in target.rglob("*") if file.is_file() and file.name != RECORD)
    for number in range(60):
        file = files[number] if number < len(files) else chance.choice(files)
        at = chance.randrange(file.stat().st_size)
        flip(file, at)
        found = faults(folders, target)
        named = [fault for fault in found if str(file) in fault or fault.startswith(("model.", "lm_head."))]
        if not found:
            back = target if name == "back" else to_huggingface(target, tmp_path / "again")
            assert not differing(folders["source"], back), (file, at)
        assert bool(named) == bool(found), (file, at, found)
        flip(file, at)
    assert not faults(folders, target)


@pytest.mark.parametrize("name", ["bare megatron", "bare back"])
def test_a_flipped_byte_of_a_weight_is_named_without_any_record(
    folders: dict[str, Path], copy: Callable[[str], Path], name: str
) -> None:
    target = copy(name)
    file = max((path for path in target.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    (fault,) = faults(folders, target)
    if name == "bare back":
        assert re.match(r"model\.layers\..*: first difference in row", fault)
    else:
        assert re.match(f"{file}: the chunk at byte .* is damaged .Bad CRC-32 for file", fault)


@pytest.mark.parametrize("name", ["source", "megatron", "back"])
def test_a_missing_file_of_weights_is_named(folders: dict[str, Path], copy: Callable[[str], Path], name: str) -> None:
    target = copy("back" if name == "source" else name)
    file = sorted([*target.glob("*.safetensors"), *target.rglob("*.distcp")])[1]
    file.unlink()
    found = verify(target, folders["megatron"], 1).faults if name == "source" else faults(folders, target)
    assert any(file.name in fault for fault in found)


@pytest.mark.parametrize("name", ["megatron", "back", "bare megatron", "bare back"])
def test_a_truncated_file_is_named(folders: dict[str, Path], copy: Callable[[str], Path], name: str) -> None:
    target = copy(name)
    file = sorted([*target.glob("*.safetensors"), *target.rglob("*_0.distcp")])[0]
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 100)
    assert any(file.name in fault and "truncated" in fault for fault in faults(folders, target))


def swap(folder: Path, one: str, other: str, copy_only: bool = False) -> None:
    """Two tensors of a HuggingFace folder change places; or the first takes the other's place too."""
    from safetensors.torch import load_file, save_file

    everything = tensors_of(folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, from_name in ((one, other), (other, one)):
            if name in tensors and not (copy_only and name == one):
                tensors[name] = everything[from_name].clone()
        save_file(tensors, file, metadata={"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize("way", ["back", "megatron"])
def test_swapped_experts_are_named(
    folders: dict[str, Path], copy: Callable[[str], Path], tmp_path: Path, way: str
) -> None:
    target = copy("bare back")
    swap(target, EXPERT.format(2), EXPERT.format(5))
    if way == "megatron":
        target = to_megatron(target, tmp_path / "swapped", ep=4)
    assert sorted(faults(folders, target)) == [
        f"{EXPERT.format(2)}: contains {EXPERT.format(5)}",
        f"{EXPERT.format(5)}: contains {EXPERT.format(2)}",
    ]


def test_an_expert_that_is_there_twice_is_named(folders: dict[str, Path], copy: Callable[[str], Path]) -> None:
    target = copy("bare back")
    swap(target, EXPERT.format(2), EXPERT.format(5), copy_only=True)
    found = faults(folders, target)
    assert f"{EXPERT.format(5)}: contains {EXPERT.format(2)}" in found
    assert f"{EXPERT.format(5)}: equal to {EXPERT.format(2)}" in found


def test_another_head_count_of_the_same_shapes_is_named(tmp_path: Path) -> None:
    """Each half as wide: no tensor has another shape, only the fields differ."""
    source = make_model(tmp_path / "source", "llama")
    target = to_megatron(source, tmp_path / "megatron", tp=2)
    fields = json.loads((target / "config.json").read_text())
    changed = {**fields, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    (target / "config.json").write_text(json.dumps(changed))
    (target / RECORD).unlink()
    found = verify(source, target, workers=1).faults
    assert any("'num_attention_heads' is 4 in the first, 8 in the second" in fault for fault in found)


@pytest.mark.parametrize("name", ["megatron", "back", "bare megatron", "bare back"])
def test_another_head_count_in_the_config_is_named(
    folders: dict[str, Path], copy: Callable[[str], Path], name: str
) -> None:
    target = copy(name)
    fields = json.loads((target / "config.json").read_text())
    changed = {**fields, "num_attention_heads": 8}
    (target / "config.json").write_text(json.dumps(changed))
    assert any("'num_attention_heads' is 4 in the first, 8 in the second" in fault for fault in faults(folders, target))


def test_a_field_that_changes_the_function_alone_is_named(
    folders: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    target = copy("bare megatron")
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, "routed_scaling_factor": 1.0}))
    (fault,) = faults(folders, target)
    assert "'routed_scaling_factor' is 2.5 in the first, 1.0 in the second" in fault


@pytest.mark.ranks
def test_both_sides_run_on_the_same_tokens(folders: dict[str, Path]) -> None:
    from tests.helpers.distributed import run_ranks

    for fault in run_ranks(run_both, 1, folders["source"], folders["megatron"], join=False)[0]:
        raise AssertionError(fault)


def run_both(source: Path, target: Path) -> list[str]:
    from rlhpc.convert.logprobs import compare_logprobs

    report = verify(source, target, workers=1)
    (line,) = compare_logprobs(report)
    return report.faults or ([] if "at most" in line else [line])
