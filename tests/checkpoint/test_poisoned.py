"""Checkpoints whose pickles would run code: refused before the ranks start and by the ranks, or never opened."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder
from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from tests.convert.helpers import Code, archive, differing, index_bytes, to_huggingface, to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.plain_model import write_model
from tests.helpers.training import digest, optimizer_section

_OBJECTS = "__9_0.distcp"


def _replace_value(folder: Path, key: str, value: Any) -> None:
    """Replaces a value of the checkpoint, a tensor too, by an object."""
    index = read_index(folder)
    tensors = {k: t for k, t in index.tensors.items() if k != key}
    data = archive([value])
    (folder / _OBJECTS).write_bytes(data)
    (folder / ".metadata").write_bytes(index_bytes(tensors, {**index.objects, key: (_OBJECTS, 0, len(data))}))


def _in_extra_state(folder: Path, code: Code) -> str:
    key = next(key for key in sorted(read_index(folder).objects) if "linear_fc1._extra_state" in key)
    _replace_value(folder, key, code)
    return _OBJECTS


def _in_place_of_tensor(folder: Path, code: Code) -> str:
    _replace_value(folder, "decoder.final_layernorm.weight", code)
    return ".metadata"  # no tensor of this name


def _in_common(folder: Path, code: Code) -> str:
    (folder / "common.pt").write_bytes(archive({"content_metadata": code}))
    return "common.pt"


def _in_index(folder: Path, code: Code) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(code))
    return ".metadata"


POISONS: list[Callable[[Path, Code], str]] = [_in_extra_state, _in_place_of_tensor, _in_common, _in_index]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model ``hf``, ``megatron`` converted from it, and a poisoned copy of that for each of POISONS."""
    top = tmp_path_factory.mktemp("poisoned")
    to_megatron(write_model(top / "hf"), top / "megatron")
    _poison_copies(top / "megatron", top, "")
    (top / "ran").mkdir()
    return top


def _poison_copies(source: Path, top: Path, prefix: str) -> None:
    for poison in POISONS:
        name = prefix + poison.__name__
        poison(checkpoint_folder(Path(shutil.copytree(source, top / name))), Code(top / "ran" / name))


def _trusted(folder: Path) -> None:
    check_weights(folder, read_model(folder))


@pytest.mark.parametrize("name", ["megatron", _in_extra_state.__name__, _in_common.__name__])
def test_a_folder_passes_the_check_whatever_is_in_values_that_are_never_opened(folders: Path, name: str) -> None:
    _trusted(folders / name)
    assert not list((folders / "ran").iterdir())


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (_in_place_of_tensor, r"the checkpoint has no 'decoder\.final_layernorm\.weight'"),
        (_in_index, r"\.metadata: names posix\.mkdir, which is not part of the format"),
    ],
)
def test_the_check_refuses_a_poisoned_folder(folders: Path, poison: Callable[..., str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _trusted(folders / poison.__name__)
    assert not (folders / "ran" / poison.__name__).exists()


@pytest.mark.heavy
@pytest.mark.parametrize("poison", [_in_extra_state, _in_common])
def test_a_conversion_opens_none_of_the_poison_and_copies_none(
    folders: Path, tmp_path: Path, poison: Callable[..., str]
) -> None:
    """Also of another program's folder, which has no record."""
    folder = Path(shutil.copytree(folders / poison.__name__, tmp_path / "copy"))
    (folder / "conversion.json").unlink()
    again = to_megatron(folder, tmp_path / "again", tp=2)
    assert not any(b"mkdir" in file.read_bytes() for file in again.rglob("*") if file.is_file())
    assert not differing(folders / "hf", to_huggingface(folder, tmp_path / "hf"))
    assert not list((folders / "ran").iterdir())


def load_each(top: Path) -> tuple[list[str], list[str]]:
    """On each rank: the error of each poisoned folder, as a model and as a checkpoint of a run, as a check that ran
    earlier would have let it pass; "loaded" without one."""
    import torch.distributed as dist

    backend: Any = actor(top / "hf", Case("qwen2", tp=2), optimizer_section())
    expected = digest(backend)
    if dist.get_rank() == 0:
        (top / "saved").mkdir()
    dist.barrier()
    backend.save(top / "saved", 5)
    if dist.get_rank() == 0:
        _poison_copies(top / "saved", top, "saved")
    dist.barrier()

    def error_of(load: Callable[[Path], None], folder: Path) -> str:
        for parameter in backend.weights.parameters():
            parameter.data.fill_(0.5)
        try:
            load(folder)
        except UserError as error:
            return str(error)
        except BaseException as error:  # torch's CheckpointException is no Exception
            return f"{type(error).__name__}: {error}"
        assert digest(backend) == expected
        return "loaded"

    models = [error_of(backend.load_pretrained, top / poison.__name__) for poison in POISONS]
    resumed = [error_of(backend.load, top / f"saved{poison.__name__}") for poison in POISONS]
    assert error_of(backend.load, top / "saved") == "loaded"
    return models, resumed


@pytest.mark.ranks
def test_ranks_refuse_a_poisoned_folder_or_open_none_of_the_poison(folders: Path) -> None:
    for models, resumed in run_ranks(load_each, 2, folders):
        assert not list((folders / "ran").iterdir()), (models, resumed)
        of_model, of_run = (dict(zip(POISONS, errors, strict=True)) for errors in (models, resumed))
        assert of_model.pop(_in_extra_state) == of_model.pop(_in_common) == "loaded"
        assert "the checkpoint has no 'decoder.final_layernorm.weight'" in of_model.pop(_in_place_of_tensor)
        assert "has no attribute 'size'" in of_run.pop(_in_place_of_tensor)  # Megatron's check of shapes
        _check_refused(of_model, folders, "", "release", {_in_index: ".metadata"})
        files = {_in_extra_state: _OBJECTS, _in_common: "common.pt", _in_index: ".metadata"}
        _check_refused(of_run, folders, "saved", "iter_0000005", files)


def _check_refused(errors: dict[Any, str], folders: Path, prefix: str, checkpoint: str, files: dict[Any, str]) -> None:
    assert errors.keys() == files.keys()
    for poison, error in errors.items():
        folder = folders / f"{prefix}{poison.__name__}" / checkpoint
        assert error.startswith(f"{folder / files[poison]}: names posix.mkdir"), error
        assert error.endswith("get the model from a source that you trust")
