"""``rlhpc convert SRC DST``: kinds are those of the folders; files as transformers writes them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.checkpoint.formats.model_files import MANIFEST
from rlhpc.convert.sides import read_side
from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, tensors_of, to_megatron
from tests.helpers.commands import invoke
from tests.helpers.tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", "qwen3moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_model(tmp_path_factory.mktemp("models") / kind, kind) for kind in ("qwen2_tied", "dsv3")}


def convert(*arguments: object) -> Result:
    done = invoke("convert", *arguments, "--workers", "1")
    if isinstance(done.exception, UserError):
        raise done.exception
    return done


def done(*arguments: object) -> str:
    result = convert(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def names(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def test_kinds_are_found_in_the_folders(tmp_path: Path, model: Path) -> None:
    there = tmp_path / "there"
    done(model, there, "--tp", 2)
    assert (there / "release" / ".metadata").is_file()
    done("--from", "megatron", there, tmp_path / "back", "--to", "hf")
    assert not differing(model, tmp_path / "back")
    done(there, tmp_path / "other", "--to", "megatron", "--ep", 4)
    same = to_megatron(there, tmp_path / "same", ep=4, piece_bytes=1 << 28)
    assert names(tmp_path / "other").keys() == names(same).keys()
    done(tmp_path / "other", tmp_path / "last")
    assert not differing(model, tmp_path / "last")


def test_a_huggingface_folder_is_rewritten_in_another_type(tmp_path: Path, model: Path) -> None:
    done(model, tmp_path / "half", "--to", "hf", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (model, tmp_path / "half")]
    assert abs(sizes[0] - 2 * sizes[1]) < 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "megatron"], "is no checkpoint; pass --from hf, or leave it out"),
        (["--to", "hf", "--tp", "2"], "--tp: applies to --to megatron; add --to megatron, or remove it"),
        (["--max-shard-size", "1GB"], "--max-shard-size: applies to --to hf; add --to hf, or remove it"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, model: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert(model, tmp_path / "target", *options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf-to-megatrn"], "'hf-to-megatrn' is neither a command nor a folder. Did you mean 'hf-to-megatron'?"),
        (["auto", "--dtype", "float8_e4m3fn"], "fp8 is read but not written. Write bfloat16"),
        (["auto", "--dtype", "int8"], "'int8' is not one of"),
        (["auto", "--max-shard-size", "5"], "'5' is not a size such as 5GB"),
    ],
)
def test_words_that_mean_nothing_are_refused(tmp_path: Path, model: Path, words: list[str], message: str) -> None:
    result = convert(*words, model, tmp_path / "target")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_shows_the_short_form() -> None:
    assert "rlhpc convert SRC DST [OPTIONS]" in invoke("convert", "--help", prog_name="rlhpc").output


@pytest.mark.heavy
@pytest.mark.parametrize("largest", [100, 60_000])
@pytest.mark.parametrize("kind", ["qwen2_tied", "dsv3"])
def test_files_are_those_of_transformers(tmp_path: Path, models: dict[str, Path], kind: str, largest: int) -> None:
    """Its names, its index, and tensors in order divided as its library does; transformers reads them."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(models[kind])
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=largest)
    done(models[kind], tmp_path / "ours", "--to", "hf", "--max-shard-size", f"{largest / 1000}KB")
    theirs, ours = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text()) for folder in ("theirs", "ours")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    tensors = tensors_of(models[kind])
    in_order = {name: tensors[name] for name in read_side(models[kind]).specs}
    split = split_torch_state_dict_into_shards(in_order, max_shard_size=largest)
    assert ours["weight_map"] == split.tensor_to_filename
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(found[name].equal(tensor) for name, tensor in loaded.state_dict().items())


def test_a_manifest_lists_every_file(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "there"
    done(model, target)
    assert "already exists, made from the same" in done(model, target, "--manifest")
    listed = {line.split("  ")[1] for line in (target / MANIFEST).read_text().splitlines()}
    assert listed == set(names(target)) - {MANIFEST}
    check = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST]
    assert subprocess.run(check, cwd=target).returncode == 0
    done(model, target, "--tp", 2, "--force", "--manifest")
    assert subprocess.run(check, cwd=target).returncode == 0
