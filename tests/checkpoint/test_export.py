"""An export on one rank: atomic, fenced off, complete after an error of the disk, and removed with its checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc.api import RunState
from rlhpc.checkpoint import export as module
from rlhpc.checkpoint.export import plan_export, write_export
from rlhpc.checkpoint.formats.safetensors_headers import read_folder
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.core.attempts import export_folder, exported_steps
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder, Superseded
from rlhpc.core.storage import Patience, use
from rlhpc.models import read_model
from rlhpc.sharding.shards import model_tensors
from tests.helpers.checkpoints import begin_attempt, checkpoint_names, writes
from tests.helpers.plain_model import write_model

pytestmark = pytest.mark.usefixtures("alone")


def test_an_export_goes_with_its_checkpoint_but_the_newest_stays(tmp_path: Path) -> None:
    """By steps saved, with those exported too: checkpoints and exports on disk."""
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    found = []
    cases = ((1, 1, True), (2, 1, True), (3, 3, False), (4, 3, True), (5, 5, True), (6, 5, False), (7, 5, False))
    for step, best, exports in cases:
        store.save(RunState(step=step, best_step=best), writes(f"at {step}"))
        if exports:
            store.export(step, writes(f"at {step}"))
        found.append(
            [name.replace("step-0000000", "").replace("hf-0000000", "hf") for name in checkpoint_names(tmp_path)]
        )
    assert found == [
        ["hf1", "1"],
        ["hf1", "hf2", "1", "2"],
        ["hf2", "3"],
        ["hf4", "3", "4"],
        ["hf5", "5"],
        ["hf5", "5", "6"],
        ["hf5", "5", "7"],
    ]
    assert not list((tmp_path / "checkpoints").glob(".writing-*/*")), "nothing of those that are removed"


def test_an_export_replaces_that_of_the_same_step(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    assert not store.has_export(4)
    for text in ("first", "second"):
        folder = store.export(4, writes(text))
    assert store.has_export(4)
    assert (folder / "weights").read_text() == "second"
    assert exported_steps(RunFolder(tmp_path)) == (4,)


def test_a_full_disk_is_one_line_and_leaves_no_export(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    store.save(RunState(step=1), writes("saved"))

    def full(folder: Path) -> None:
        writes("half")(folder)
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    remedy = r"free disk space or quota, then resume the run; the checkpoint is intact"
    with pytest.raises(UserError, match=rf"hf-00000001: cannot export the model \(No space left on device\); {remedy}"):
        store.export(1, full)
    assert checkpoint_names(tmp_path) == ["step-00000001"]
    store.export(1, writes("whole"))  # what the failure left behind is replaced
    assert (export_folder(RunFolder(tmp_path), 1) / "weights").read_text() == "whole"


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_orphan_of_an_earlier_attempt_exports_nothing_more(tmp_path: Path, moment: str) -> None:
    orphan = CheckpointStore(begin_attempt(tmp_path), keep=1)
    orphan.export(1, writes("at 1"))

    def write(folder: Path) -> None:
        if moment == "during":
            begin_attempt(tmp_path)
        writes("the orphan's")(folder)
        if moment == "after":
            begin_attempt(tmp_path)

    if moment == "before":
        begin_attempt(tmp_path)
    with pytest.raises(Superseded):
        orphan.export(1, write)
    assert checkpoint_names(tmp_path) == ["hf-00000001"]
    assert (export_folder(RunFolder(tmp_path), 1) / "weights").read_text() == "at 1"


# --- the files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


def _tensors(model: Path) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(t.name, torch.randn(t.shape, generator=generator)) for t in model_tensors(read_model(model))]


def test_tensors_are_written_in_slabs_and_files_of_the_size_asked_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(module, "_SLAB_BYTES", 1000)
    tensors, target = _tensors(model), tmp_path / "target"
    target.mkdir()
    write_export(plan_export(model_tensors(read_model(model)), model, "float32", 50_000), target, iter(tensors), 1)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == dict(tensors).keys() == read_folder(target).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (model / name).read_bytes()


def test_an_error_of_the_disk_is_raised_when_all_tensors_are_taken(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks would wait for this one in the next gather."""
    taken = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _tensors(model):
            taken.append(name)
            yield name, tensor

    plan = plan_export(model_tensors(read_model(model)), model, "float32")
    with pytest.raises(FileNotFoundError):
        write_export(plan, tmp_path / "absent", tensors(), 1)
    assert len(taken) == len(_tensors(model))
    taken.clear()
    write_export(plan, None, tensors(), 1)
    assert len(taken) == len(_tensors(model))


def test_a_tensor_is_written_again_after_a_transient_error(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, target, flushes = _tensors(model), tmp_path / "target", []
    target.mkdir()
    stream = module.Stream

    class Failing(stream):
        def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
            super().__exit__(kind, *rest)
            flushes.append(0)
            if len(flushes) == 3:
                raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(module, "Stream", Failing)
    use(Patience(5.0))
    try:
        write_export(plan_export(model_tensors(read_model(model)), model, "float32"), target, iter(tensors), 1)
    finally:
        use(Patience())
    assert len(flushes) == len(tensors) + 2, "one more than tensors and the header"
    assert read_folder(target).keys() == dict(tensors).keys()
