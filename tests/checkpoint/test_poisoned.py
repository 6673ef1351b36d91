"""Model folders whose pickles would run code: refused before the ranks start and by the ranks, and nothing runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.checkpoint.formats.torch_archive import read_file
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.torch_files import PickledCall, PickledName, archive, index_bytes, pickled
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from tests.convert.helpers import to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.plain_model import write_model
from tests.helpers.training import digest, optimizer_section

_OBJECTS = "__9_0.distcp"


def _code(sign: Path) -> PickledCall:
    """Makes the folder ``sign`` when it is unpickled."""
    return PickledCall(PickledName("os", "mkdir"), (str(sign),))


def _replace_value(folder: Path, key: str, value: Any) -> None:
    """Replaces a value of the checkpoint, a tensor too, by an object."""
    index = read_index(folder)
    tensors = {k: (t.dtype, t.shape, list(t.chunks)) for k, t in index.tensors.items() if k != key}
    data = archive([value])
    (folder / _OBJECTS).write_bytes(data)
    (folder / ".metadata").write_bytes(index_bytes(tensors, {**index.objects, key: (_OBJECTS, 0, len(data))}))


def _in_extra_state(folder: Path, code: PickledCall) -> str:
    _replace_value(folder, sorted(read_index(folder).objects)[0], code)
    return _OBJECTS


def _in_place_of_tensor(folder: Path, code: PickledCall) -> str:
    _replace_value(folder, "decoder.final_layernorm.weight", code)
    return ".metadata"  # no tensor of this name


def _in_common(folder: Path, code: PickledCall) -> str:
    (folder / "common.pt").write_bytes(archive({"content_metadata": code}))
    return "common.pt"


def _in_index(folder: Path, code: PickledCall) -> str:
    (folder / ".metadata").write_bytes(pickled(code))
    return ".metadata"


POISONS: list[Callable[[Path, PickledCall], str]] = [_in_extra_state, _in_place_of_tensor, _in_common, _in_index]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model ``hf``, ``megatron`` converted from it, and a poisoned copy of that for each of POISONS."""
    top = tmp_path_factory.mktemp("poisoned")
    to_megatron(write_model(top / "hf"), top / "megatron")
    for poison in POISONS:
        folder = Path(shutil.copytree(top / "megatron", top / poison.__name__))
        poison(folder, _code(top / "ran" / poison.__name__))
    (top / "ran").mkdir()
    return top


def _trusted(folder: Path) -> None:
    check_weights(folder, read_model(folder))


def test_an_unpoisoned_folder_passes_the_check(folders: Path) -> None:
    _trusted(folders / "megatron")
    assert read_file(folders / "megatron" / "common.pt") == {"content_metadata": {}}


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (_in_extra_state, r"__9_0\.distcp: names os\.mkdir, which is not part of a checkpoint's objects"),
        (_in_place_of_tensor, r"the checkpoint has no 'decoder\.final_layernorm\.weight'"),
        (_in_common, r"common\.pt: names os\.mkdir, which is not part of a checkpoint's objects"),
        (_in_index, r"\.metadata: names os\.mkdir, which is not part of the format"),
    ],
)
def test_the_check_refuses_a_poisoned_folder(folders: Path, poison: Callable[..., str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _trusted(folders / poison.__name__)
    assert not (folders / "ran" / poison.__name__).exists()


def load_each(top: Path) -> list[str]:
    """On each rank: the error of each poisoned folder, as a check that ran earlier would have let it pass."""
    backend: Any = actor(top / "hf", Case("qwen2", tp=2), optimizer_section())
    expected, errors = digest(backend), []
    for parameter in backend.weights.parameters():
        parameter.data.fill_(0.5)
    for poison in POISONS:
        try:
            backend.load_pretrained(top / poison.__name__)
            errors.append("none")
        except UserError as error:
            errors.append(str(error))
        except BaseException as error:  # torch's CheckpointException is no Exception
            errors.append(f"{type(error).__name__}: {error}")
    backend.load_pretrained(top / "megatron")
    assert digest(backend) == expected
    return errors


@pytest.mark.ranks
def test_ranks_refuse_a_poisoned_folder_and_run_none_of_it(folders: Path) -> None:
    for errors in run_ranks(load_each, 2, folders):
        assert not list((folders / "ran").iterdir()), errors
        found = dict(zip(POISONS, errors, strict=True))
        assert "has no attribute 'size'" in found.pop(_in_place_of_tensor)  # Megatron's check of shapes
        for (poison, error), file in zip(found.items(), (_OBJECTS, "common.pt", ".metadata"), strict=True):
            assert error.startswith(f"{folders / poison.__name__ / file}: names os.mkdir"), error
            assert error.endswith("get the model from a source that you trust")
