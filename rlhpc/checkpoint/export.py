"""Writes a model into a HuggingFace folder, from its tensors one by one.

The result equals that of ``rlhpc convert megatron-to-hf`` or ``fsdp-to-hf``, without that command's record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.checkpoint.formats.model_files import changed_fields, config_text, model_files, read_fields
from rlhpc.checkpoint.formats.safetensors_headers import (
    DTYPES,
    FILE_BYTES,
    INDEX,
    ITEM_BYTES,
    NewFile,
    index_text,
    plan_files,
)
from rlhpc.checkpoint.formats.stream import Stream
from rlhpc.core.files import flush, write_atomic
from rlhpc.core.heartbeat import touch
from rlhpc.core.storage import patiently
from rlhpc.models.rope import fix_fields
from rlhpc.sharding.shards import TensorSpec

_SLAB_BYTES = 32 << 20  # copied to CPU memory at once


@dataclass(frozen=True)
class ExportPlan:
    """Contents of the folder. ``model``: folder whose config and tokenizer are copied; ``fields``: those of config.json
    if they change."""

    model: Path
    files: tuple[NewFile, ...]
    fields: Mapping[str, Any] | None


def plan_export(
    tensors: Iterable[TensorSpec],
    model: Path,
    dtype: str,
    file_bytes: int = FILE_BYTES,
    rope_tokens: int | None = None,
) -> ExportPlan:
    """Plan for a model of ``dtype``, in torch's name; ``file_bytes``: maximum size of a file with several tensors;
    ``rope_tokens``: tokens at which dynamic RoPE is fixed."""
    stored = [(t.name, "F32" if t.float32 else DTYPES[dtype], t.shape) for t in tensors]
    given = patiently(lambda: read_fields(model), model)
    fixed = given if rope_tokens is None else fix_fields(given, rope_tokens)
    fields = changed_fields(fixed, model, dtype) or (fixed if fixed != given else None)
    return ExportPlan(model, tuple(plan_files(stored, file_bytes)), fields)


def write_export(plan: ExportPlan, folder: Path | None, tensors: Iterable[tuple[str, Tensor]], step: int) -> None:
    """Writes all files into an existing empty folder; they are on disk when it returns. ``folder``: None on a rank that
    only takes part in gathering ``tensors``; ``step``: for the heartbeat.

    Takes every tensor even after an error, which it raises at the end: other ranks gather them too.
    """
    places = {name: (file.name, dtype, start) for file in plan.files for name, dtype, _, start in file.tensors}
    failure: OSError | None = None
    for name, tensor in tensors:
        touch("exporting the model", step)
        if folder is None or failure is not None:
            continue
        file, dtype, start = places.pop(name)
        assert tensor.element_size() == ITEM_BYTES[dtype], f"{name} is {tensor.dtype}, not {dtype}"
        try:
            _write_tensor(folder / file, start, tensor)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    if folder is not None:
        assert not places, f"the model lacks {sorted(places)[:4]}"
        _write_rest(plan, folder)


def _write_tensor(path: Path, start: int, tensor: Tensor) -> None:
    data = tensor.detach().reshape(-1).view(torch.uint8)

    def write() -> None:
        with Stream(path, truncate=False) as stream:
            stream.seek(start)
            for at in range(0, len(data), _SLAB_BYTES):
                # A copy also on a CPU: numpy() would pin the weights' storage.
                stream.write(memoryview(data[at : at + _SLAB_BYTES].to("cpu", copy=True).numpy()))

    patiently(write, path)


def _write_rest(plan: ExportPlan, folder: Path) -> None:
    """Writes headers, index, config and tokenizer."""
    for new in plan.files:
        patiently(functools.partial(_write_header, folder / new.name, new.header), folder / new.name)
    if len(plan.files) > 1:
        write_atomic(folder / INDEX, index_text(plan.files))
    for file in patiently(lambda: model_files(plan.model), plan.model):
        write_atomic(folder / file.name, patiently(file.read_bytes, file))
    if plan.fields is not None:
        write_atomic(folder / "config.json", config_text(plan.fields))
    patiently(lambda: flush(folder), folder)


def _write_header(path: Path, header: bytes) -> None:
    with Stream(path, truncate=False) as stream:
        stream.write(header)
