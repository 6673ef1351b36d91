"""Writes the files of a torch_dist checkpoint with torch.save: chunks, index, and values other than tensors."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from rlhpc.checkpoint.formats.megatron_folder import TRACKER, common_values, tracker_text
from rlhpc.checkpoint.formats.stream import Stream
from rlhpc.checkpoint.formats.torch_chunks import check_archive
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, TORCH_DTYPES, Chunk, Index, SavedTensor
from rlhpc.convert.plan import ConversionPlan, NewChunk, copied_objects, states_of
from rlhpc.convert.readers import Reader
from rlhpc.convert.sides import MegatronSide, known_shape
from rlhpc.convert.target import Places
from rlhpc.core.storage import os_error_in
from rlhpc.parallel.checkpoint_io import torch_metadata


def save_chunk(stream: Stream, reader: Reader, item: NewChunk) -> tuple[int, int]:
    """Writes a chunk; its start and length."""
    start, values = stream.at, reader.chunk(item)
    tensor = torch.from_numpy(values).view(getattr(torch, TORCH_DTYPES[item.dtype]))
    try:
        torch.save(tensor.view(item.parameter.in_key(item.box).shape), stream)
    except RuntimeError as error:  # hides the stream's
        found = os_error_in(error)
        if found is None:
            raise
        raise found from None
    return start, stream.at - start


def write_index(plan: ConversionPlan, home: Path, places: Sequence[Places]) -> None:
    """Writes the index, the values other than tensors, the two small files of megatron.core.dist_checkpointing, and
    Megatron-LM's tracker file. ``places``: those of the chunks of each output."""
    (home / TRACKER).write_text(tracker_text(plan.source.iteration), encoding="utf-8")
    folder = home / plan.checkpoint
    chunks: dict[str, tuple[NewChunk, list[Chunk]]] = {}
    for output, found in zip(plan.outputs, places, strict=True):
        for item, (start, length) in zip(output.items, found, strict=True):
            assert isinstance(item, NewChunk)
            chunk = Chunk(item.parameter.in_key(item.box), PurePosixPath(output.file).name, start, length)
            chunks.setdefault(item.key, (item, []))[1].append(chunk)
    tensors = {
        key: SavedTensor(key, item.dtype, item.parameter.global_shape, tuple(found))
        for key, (item, found) in chunks.items()
    }
    objects = _write_objects(plan, folder, f"__{len(plan.outputs)}_0.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps(torch_metadata(Index(tensors, objects))))
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")
    _write_common(plan, folder)


def _write_common(plan: ConversionPlan, folder: Path) -> None:
    """Copies the values of a run's checkpoint, the optimizer's among them, or writes those of the model."""
    source = plan.source
    if isinstance(source, MegatronSide) and source.iteration is not None and source.is_ours:
        check_archive((source.folder / COMMON).read_bytes(), source.folder / COMMON)
        shutil.copyfile(source.folder / COMMON, folder / COMMON)
        return
    chunks = (item for output in plan.outputs for item in output.items if isinstance(item, NewChunk))
    rows = next(chunk.parameter.global_shape[0] for chunk in chunks if chunk.parameter.pads)
    common = common_values(known_shape(source), plan.layout, plan.source.iteration, rows)
    common["args"] = Namespace(**common["args"])
    (folder / COMMON).write_bytes(_archive({**common, "content_metadata": {}}))


def _write_objects(plan: ConversionPlan, folder: Path, name: str) -> dict[str, tuple[str, int, int]]:
    """Writes the empty states of modules, and copies other objects of a run's checkpoint; their places."""
    values = dict.fromkeys(states_of(plan), _archive([None]))
    for key in copied_objects(plan):
        assert isinstance(plan.source, MegatronSide)
        path, begin, length = plan.source.objects[key]
        with open(plan.source.folder / path, "rb") as saved:
            saved.seek(begin)
            values[key] = saved.read(length)
        check_archive(values[key], plan.source.folder / path)
    places = {}
    with open(folder / name, "wb") as file:
        for key, data in values.items():
            places[key] = (name, file.tell(), len(data))
            file.write(data)
    return places


def _archive(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()
