"""Writes what a converted folder contains besides weights: index, config, tokenizer, record of the conversion."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from rlhpc import __version__
from rlhpc.checkpoint.formats.model_files import RECORD, changed_fields, config_text, model_files
from rlhpc.checkpoint.formats.safetensors_headers import DTYPES, INDEX, index_text
from rlhpc.checkpoint.formats.torch_dist_metadata import Chunk
from rlhpc.convert.plan import FORMAT, ConversionPlan, NewChunk, objects_of
from rlhpc.convert.sides import MegatronSide
from rlhpc.convert.staging import Items, Staging
from rlhpc.convert.torch_files import archive, index_bytes
from rlhpc.core.files import write_json

_NAMES = {safe: name for name, safe in DTYPES.items()}


def write_rest(plan: ConversionPlan, staging: Staging) -> None:
    """Completes the target, whose pieces have all been written."""
    folder, recorded = staging.target, [staging.items_of(piece) for piece in plan.pieces]
    items: list[Items] = [found for found in recorded if found is not None]
    assert len(items) == len(plan.pieces), "pieces are missing"
    _copy_model_files(plan, folder)
    if plan.target == "megatron":
        _write_torch_dist(plan, folder, items)
    else:
        _write_safetensors(plan, folder)
    weights = {piece.file for piece in plan.pieces}
    small = [file for file in folder.iterdir() if file.name not in weights]
    record = {
        "format": FORMAT,
        "digest": plan.digest,
        "version": __version__,
        "source": str(plan.source.folder.absolute()),
        "target": plan.target,
        "layout": plan.layout.text,
        "dtype": plan.dtype,
        "dtypes": dict(plan.dtypes),
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(small)},
        "headers": {file.name: header_digest(folder / file.name) for file in plan.files},
        "items": {str(p.number): {"file": p.file, "items": found} for p, found in zip(plan.pieces, items, strict=True)},
    }
    write_json(folder / RECORD, record)


def new_fields(plan: ConversionPlan) -> dict[str, Any] | None:
    """Fields of config.json if their dtype or quantization changes; None to copy the file."""
    source = plan.source
    counted: Counter[str] = Counter()
    for piece in plan.pieces:
        for item in piece.items:
            counted[item.dtype] += item.size if not getattr(item, "prefix", "") else 0
    dtype = _NAMES[counted.most_common(1)[0][0]]
    keeps = plan.target == "megatron" and not plan.dtype
    return changed_fields(source.fields, source.model_folder, dtype, keeps_dtype=keeps)


def _copy_model_files(plan: ConversionPlan, folder: Path) -> None:
    for file in model_files(plan.source.model_folder):
        shutil.copyfile(file, folder / file.name)
    changed = new_fields(plan)
    if changed is not None:
        (folder / "config.json").write_text(config_text(changed), encoding="utf-8")


def _write_safetensors(plan: ConversionPlan, folder: Path) -> None:
    for file in plan.files:
        descriptor = os.open(folder / file.name, os.O_WRONLY)
        try:
            os.pwrite(descriptor, file.header, 0)
        finally:
            os.close(descriptor)
    if len(plan.files) > 1:
        (folder / INDEX).write_text(index_text(plan.files), encoding="utf-8")


def _write_torch_dist(plan: ConversionPlan, folder: Path, items: list[Items]) -> None:
    """Writes the index, the values other than tensors, and the two small files of megatron.core.dist_checkpointing."""
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for piece, found in zip(plan.pieces, items, strict=True):
        for item, (start, length, _) in zip(piece.items, found, strict=True):
            assert isinstance(item, NewChunk)
            shape = item.parameter.global_shape
            chunk = Chunk(item.parameter.in_key(item.box), piece.file, start, length)
            tensors.setdefault(item.key, (item.dtype, shape, []))[2].append(chunk)
    (folder / ".metadata").write_bytes(index_bytes(tensors, _write_objects(plan, folder)))
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")
    common = plan.source.folder / "common.pt"
    if isinstance(plan.source, MegatronSide) and common.is_file():
        shutil.copyfile(common, folder / "common.pt")
    else:
        (folder / "common.pt").write_bytes(archive({"content_metadata": {}}))


def _write_objects(plan: ConversionPlan, folder: Path) -> dict[str, tuple[str, int, int]]:
    """Copies the objects of a checkpoint, or writes the empty ones of parallel linears; their places."""
    name, empty, places = f"__{len(plan.pieces)}_0.distcp", archive([None]), {}
    with open(folder / name, "wb") as file:
        for key in objects_of(plan):
            start = file.tell()
            if isinstance(plan.source, MegatronSide):
                path, begin, length = plan.source.objects[key]
                with open(plan.source.folder / path, "rb") as saved:
                    saved.seek(begin)
                    file.write(saved.read(length))
            else:
                file.write(empty)
            places[key] = (name, start, file.tell() - start)
        file.flush()
        os.fsync(file.fileno())
    return places


def header_digest(path: Path) -> str:
    """SHA-256 of a safetensors file's header, including its length."""
    with open(path, "rb") as file:
        length = file.read(8)
        return hashlib.sha256(length + file.read(min(int.from_bytes(length, "little"), 100_000_000))).hexdigest()


def crc_of(path: Path, start: int, length: int) -> int:
    """CRC-32 of a range of a file."""
    checksum, block = 0, 8 << 20
    with open(path, "rb") as file:
        file.seek(start)
        while length > 0:
            data = file.read(min(block, length))
            if not data:
                break
            checksum = zlib.crc32(data, checksum)
            length -= len(data)
    return checksum
