"""Blocks of tensors that ranks read from a torch_dist checkpoint into their parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.formats.safetensors_reader import TorchDistFolder
from rlhpc.models import read_model
from tests.convert.helpers import tensors_of, to_huggingface, to_megatron
from tests.helpers.tiny_models import make_model


@pytest.mark.heavy
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_block_is_read_into_a_part_of_a_parameter(tmp_path: Path, dtype: str, into: torch.dtype) -> None:
    """Of the file's type or another one, between elements that stay as they are."""
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
