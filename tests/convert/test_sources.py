"""A source that changes while it is converted, or is damaged, is named; nothing of it is published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.checkpoint.formats.arrays import FileArray
from rlhpc.checkpoint.formats.torch_chunks import open_chunk
from rlhpc.convert.execute import convert
from rlhpc.convert.plan import plan_conversion, plan_layout
from rlhpc.convert.progress import Progress
from rlhpc.convert.sides import MegatronSide, read_side
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import plan
from tests.helpers.plain_model import write_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of random numbers."""
    folder = write_model(tmp_path / "source")
    rewrite(folder / "model.safetensors", seed=0)
    return folder


def rewrite(file: Path, seed: int) -> None:
    """Other numbers in place, of the same size."""
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    numbers = np.random.default_rng(seed).standard_normal((len(data) - header) // 4, np.float32)
    with open(file, "r+b") as opened:
        opened.seek(header)
        opened.write(numbers.tobytes())


def replaced(file: Path) -> None:
    """By another file of the same size and time."""
    before = file.stat()
    shutil.copy(file, file.with_suffix(".new"))
    rewrite(file.with_suffix(".new"), seed=1)
    os.utime(file.with_suffix(".new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(file.with_suffix(".new"), file)


class At(Progress):
    """``Progress`` that acts before the first file, or after the last."""

    def __init__(self, last: bool, act: Callable[[], None]) -> None:
        self._last, self._act = last, act

    def update(self, done: int, total: int) -> None:
        if done == (total if self._last else 0):
            self._act()


@pytest.mark.parametrize("last", [False, True], ids=["before the first file", "after the last file"])
@pytest.mark.parametrize(
    "change", [lambda file: rewrite(file, 1), replaced, os.remove], ids=["rewritten", "replaced", "gone"]
)
def test_a_source_that_changes_while_it_is_read_is_not_published(
    tmp_path: Path, source: Path, change: Callable[[Path], None], last: bool
) -> None:
    target, weights = tmp_path / "target", source / "model.safetensors"
    with pytest.raises(
        UserError, match=r"has changed since the conversion began.*run the command with --force"
    ) as caught:
        convert(plan(source, "megatron"), target, workers=1, progress=At(last, lambda: change(weights)))
    assert caught.value.where == str(weights)
    assert not target.exists()
    if weights.exists() and change is not replaced:
        with pytest.raises(UserError, match=r"is an unfinished conversion of the source as it was before \(source "):
            convert(plan(source, "megatron"), target, workers=1)
        assert convert(plan(source, "megatron"), target, workers=1, force=True)
        assert not verify(source, target, workers=1).faults


def test_a_header_that_changes_before_the_plan_is_made_is_noticed(tmp_path: Path, source: Path) -> None:
    side = read_side(source)
    weights = source / "model.safetensors"
    data, (one, other) = weights.read_bytes(), (f"layers.{layer}.mlp.gate_proj".encode() for layer in (0, 1))
    weights.write_bytes(
        data.replace(one, b"layers.x.mlp.gate_proj").replace(other, one).replace(b"layers.x.mlp.gate_proj", other)
    )
    with pytest.raises(UserError, match="has changed since the conversion began"):
        convert(plan_conversion(side, "megatron", plan_layout(side, {})), tmp_path / "target", workers=1)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_files_that_are_copied_are_those_of_the_plan(tmp_path: Path, source: Path, name: str) -> None:
    def change() -> None:
        (source / name).write_bytes((source / name).read_bytes() + b"\n")

    with pytest.raises(UserError, match="has changed since the conversion began") as caught:
        convert(plan(source, "megatron"), tmp_path / "target", workers=1, progress=At(True, change))
    assert caught.value.where == str(source / name)
    assert not (tmp_path / "target").exists()


# --- bits


def flip(array: FileArray) -> None:
    """Flips the lowest bit of an array's middle number, and keeps the file's time."""
    before = array.path.stat()
    with open(array.path, "r+b") as file:
        at = array.start + 4 * (int(np.prod(array.shape)) // 2)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(array.path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.heavy
@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_a_flipped_bit_of_a_torch_dist_checkpoint_is_not_converted(tmp_path: Path, source: Path, target: str) -> None:
    convert(plan(source, "megatron", tp=2), tmp_path / "megatron", workers=1)
    side = read_side(tmp_path / "megatron")
    assert isinstance(side, MegatronSide)
    for number, key in enumerate(sorted(side.tensors)):
        chunk = side.tensors[key].chunks[-1]
        whole = (side.folder / chunk.file).read_bytes()
        flip(open_chunk(side.folder, chunk))
        with pytest.raises(UserError, match=r"is damaged .Bad CRC-32 for file .*; copy or save the") as caught:
            convert(plan(tmp_path / "megatron", target), tmp_path / f"target-{number}", workers=1)
        assert caught.value.where == str(side.folder / chunk.file)
        (side.folder / chunk.file).write_bytes(whole)


def test_a_checkpoint_saved_without_crc_is_converted(tmp_path: Path) -> None:
    import torch

    from rlhpc.checkpoint.formats.torch_dist_metadata import Chunk
    from rlhpc.sharding.shards import Box

    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "chunk")
    finally:
        torch.serialization.set_crc32_options(True)
    chunk = Chunk(Box((0, 0), (2, 3)), "chunk", 0, (tmp_path / "chunk").stat().st_size)
    array = open_chunk(tmp_path, chunk, checked=True)
    assert array.read(Box((1, 0), (2, 3))).tolist() == [[3.0, 4.0, 5.0]]
