"""Writes the files of a converted folder besides weights: index, config, tokenizer, record, and SHA256SUMS.

Pieces of a file are written in any order, past the page cache, so that files are read again for their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlhpc import __version__
from rlhpc.checkpoint.formats.megatron_folder import TRACKER, common_values, tracker_text
from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD, changed_fields, config_text, read_fields
from rlhpc.checkpoint.formats.safetensors_headers import DTYPES, INDEX, index_text
from rlhpc.checkpoint.formats.torch_chunks import check_archive
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, Chunk
from rlhpc.convert.plan import FORMAT, ConversionPlan, NewChunk, copied_objects, states_of
from rlhpc.convert.pool import run_tasks
from rlhpc.convert.sides import MegatronSide, known_shape
from rlhpc.convert.sources import digest_of, source_changed
from rlhpc.convert.staging import Items
from rlhpc.convert.torch_files import PickledName, PickledObject, archive, index_bytes
from rlhpc.core.files import flush, write_atomic, write_json

_NAMES = {safe: name for name, safe in DTYPES.items()}


def write_rest(plan: ConversionPlan, folder: Path, recorded: Mapping[int, Items]) -> list[str]:
    """Writes into ``folder`` what the target contains besides the pieces' files; the names of all its files.

    ``recorded``: items of each piece, by its number.
    """
    items = [recorded[piece.number] for piece in plan.pieces]
    small = _copy_model_files(plan, folder)
    if plan.target == "megatron":
        small += _write_torch_dist(plan, folder, items)
    else:
        small += _write_safetensors(plan, folder)
    sizes = {name: (folder / name).stat().st_size for name in small}
    for piece, found in zip(plan.pieces, items, strict=True):
        start, length, _ = found[-1]
        sizes[piece.file] = max(sizes.get(piece.file, 0), start + length)
    record = {
        "format": FORMAT,
        "digest": plan.digest,
        "version": __version__,
        "source": str(plan.source.folder.absolute()),
        "target": plan.target,
        "layout": plan.layout.text,
        "dtype": plan.dtype,
        "dtypes": dict(plan.dtypes),
        "files": dict(sorted(sizes.items())),
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(small)},
        "headers": {file.name: hashlib.sha256(file.header).hexdigest() for file in plan.files},
        "items": {str(p.number): {"file": p.file, "items": found} for p, found in zip(plan.pieces, items, strict=True)},
    }
    write_json(folder / RECORD, record)
    for name in small:
        flush(folder / name)
    return [*sizes, RECORD]


def new_fields(plan: ConversionPlan) -> dict[str, Any] | None:
    """Fields of config.json if their dtype or quantization changes; None to copy the file."""
    source = plan.source
    counted: Counter[str] = Counter()
    for piece in plan.pieces:
        for item in piece.items:
            counted[item.dtype] += item.size if not getattr(item, "prefix", "") else 0
    dtype = _NAMES[counted.most_common(1)[0][0]]
    keeps = plan.target == "megatron" and not plan.dtype
    changed = changed_fields(source.fields, source.model_folder, dtype, keeps_dtype=keeps)
    return changed or (dict(source.fields) if source.fields != read_fields(source.model_folder) else None)


def _copy_model_files(plan: ConversionPlan, folder: Path) -> list[str]:
    """Copies config and tokenizer; the names of the files."""
    names = []
    for name, digest in plan.sources.copied:
        shutil.copyfile(plan.source.model_folder / name, folder / name)
        if digest_of(folder / name) != digest:
            raise source_changed(plan.source.model_folder / name)
        names.append(name)
    changed = new_fields(plan)
    if changed is not None:
        (folder / "config.json").write_text(config_text(changed), encoding="utf-8")
    return names


def _write_safetensors(plan: ConversionPlan, folder: Path) -> list[str]:
    """Writes the index of several files; its name."""
    if len(plan.files) < 2:
        return []
    (folder / INDEX).write_text(index_text(plan.files), encoding="utf-8")
    return [INDEX]


def _write_torch_dist(plan: ConversionPlan, home: Path, items: list[Items]) -> list[str]:
    """Writes the index, the values other than tensors, the two small files of megatron.core.dist_checkpointing, and
    Megatron-LM's tracker file; the names of the files."""
    (home / TRACKER).write_text(tracker_text(plan.iteration), encoding="utf-8")
    folder = home / plan.checkpoint
    folder.mkdir(exist_ok=True)
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for piece, found in zip(plan.pieces, items, strict=True):
        for item, (start, length, _) in zip(piece.items, found, strict=True):
            assert isinstance(item, NewChunk)
            shape = item.parameter.global_shape
            chunk = Chunk(item.parameter.in_key(item.box), PurePosixPath(piece.file).name, start, length)
            tensors.setdefault(item.key, (item.dtype, shape, []))[2].append(chunk)
    objects = f"__{len(plan.pieces)}_0.distcp"
    (folder / ".metadata").write_bytes(index_bytes(tensors, _write_objects(plan, folder, objects)))
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")
    _write_common(plan, folder)
    return [TRACKER, *(f"{plan.checkpoint}/{name}" for name in (".metadata", "metadata.json", COMMON, objects))]


def _write_common(plan: ConversionPlan, folder: Path) -> None:
    """Copies the values of a run's checkpoint, the optimizer's among them, or writes those of the model."""
    source = plan.source
    if isinstance(source, MegatronSide) and source.iteration is not None and source.is_ours:
        check_archive((source.folder / COMMON).read_bytes(), source.folder / COMMON)
        shutil.copyfile(source.folder / COMMON, folder / COMMON)
        return
    chunks = (item for piece in plan.pieces for item in piece.items if isinstance(item, NewChunk))
    rows = next(chunk.parameter.global_shape[0] for chunk in chunks if chunk.parameter.pads)
    common = common_values(known_shape(source), plan.layout, plan.iteration, rows)
    common["args"] = PickledObject(PickledName("argparse", "Namespace"), common["args"])
    (folder / COMMON).write_bytes(archive({**common, "content_metadata": {}}))


def _write_objects(plan: ConversionPlan, folder: Path, name: str) -> dict[str, tuple[str, int, int]]:
    """Writes the empty states of modules, and copies other objects of a run's checkpoint; their places."""
    empty, places = archive([None]), {}
    with open(folder / name, "wb") as file:
        for key in states_of(plan):
            places[key] = (name, file.tell(), len(empty))
            file.write(empty)
        for key in copied_objects(plan):
            assert isinstance(plan.source, MegatronSide)
            path, begin, length = plan.source.objects[key]
            with open(plan.source.folder / path, "rb") as saved:
                saved.seek(begin)
                data = saved.read(length)
            check_archive(data, plan.source.folder / path)
            places[key] = (name, file.tell(), length)
            file.write(data)
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


_ESCAPES = {"\\": "\\", "n": "\n", "r": "\r"}


def write_manifest(folder: Path, workers: int) -> None:
    """Hashes every file of the folder, the largest first, and writes the list."""
    files = sorted(files_of(folder), key=lambda name: -(folder / name).stat().st_size)
    digests = {files[index]: digest for index, digest in run_tasks(lambda: _Digests(folder), files, workers)}
    text = "".join(_line(name, digests[name]) for name in sorted(files))
    write_atomic(folder / MANIFEST, text.encode(errors="surrogateescape"))


def files_of(folder: Path) -> list[str]:
    """Files in the folder and those below it, except the list itself."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by file of a list that ``write_manifest`` or ``sha256sum`` wrote."""
    return dict(_parsed((folder / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape")))


class _Digests:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> str:
        with open(self._folder / name, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _line(name: str, digest: str) -> str:
    """Line as coreutils write it: a backslash in front marks a name with escapes."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        found = re.fullmatch(r"(\\?)([0-9a-f]{64}) [ *](.+)", line)
        if found:
            name = re.sub(r"\\([\\nr])", lambda escape: _ESCAPES[escape[1]], found[3]) if found[1] else found[3]
            yield name, found[2]
