"""Compares the model in one folder with the model in another, by the files on disk, whichever program wrote them.

Files that no record or index lists, keys that the model lacks, and chunks that overlap are faults too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.arrays import CAST_ELEMENTS
from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD, model_files, read_fields, unquantised
from rlhpc.checkpoint.formats.safetensors_headers import stray_files
from rlhpc.checkpoint.formats.torch_dist import cut_box, tiles
from rlhpc.convert.metadata import files_of, read_manifest
from rlhpc.convert.pool import run_tasks
from rlhpc.convert.readers import Reader, reader_of
from rlhpc.convert.sides import HuggingFaceSide, MegatronSide, ShardedSide, Side, Step, read_record, read_side
from rlhpc.convert.sources import digest_of
from rlhpc.core.errors import UserError
from rlhpc.sharding.shards import Box

_MAY_DIFFER = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}


@dataclass
class Report:
    """``faults``: one line each, naming file, tensor or field. A side that could not be read is None."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    source: Side | None = None
    target: Side | None = None


@dataclass(frozen=True)
class Compared:
    """SHA-256 of a tensor on both sides, and the first row in which they differ."""

    name: str
    source: str
    target: str
    row: int | None
    fault: str = ""


def verify(
    source: Path,
    target: Path,
    workers: int,
    step: Step | None = None,
    model: Path | None = None,
    family: str | None = None,
) -> Report:
    """Compares two folders; ``step`` and ``model`` apply to the one that is a training checkpoint."""
    report = Report()

    def read(path: Path) -> Side | None:
        is_run, has_config = (path / "checkpoints").is_dir(), (path / "config.json").is_file()
        try:
            return read_side(path, step if is_run else None, None if has_config else model, family, any_family=True)
        except UserError as error:
            report.faults.append(str(error))
            return None

    first, second = report.source, report.target = read(source), read(target)
    for side in (first, second):
        if side is not None:
            report.faults += _record_faults(side)
    if first is not None and second is not None:
        report.faults += left_out_faults(first, second)
    homes = [side.model_folder if side else path for side, path in ((first, source), (second, target))]
    if all((home / "config.json").is_file() for home in homes):
        given = [None if side is None else side.fields for side in (first, second)]
        report.faults += _config_faults(homes, given)  # may also explain why a side cannot be read
    if first is None or second is None:
        return report
    if _shapes(first) != _shapes(second):
        report.faults += _spec_faults(first, second)
        return report
    report.faults += _coverage_faults(first) + _coverage_faults(second)
    compared = _compare_all(first, second, workers)
    faults = (item.fault or _difference(item, compared) for item in compared if item.row is not None)
    report.faults += dict.fromkeys(faults)  # a chunk may have many tensors
    report.faults += _same_experts(compared, first)
    if not report.faults:
        report.notes += _notes(first, second, compared)
    return report


# --- the record of the conversion that wrote the files


def _record_faults(side: Side) -> Iterator[str]:
    """Faults of the files that a conversion wrote, and files that it did not write."""
    folder = side.home
    try:
        record = read_record(folder)
    except UserError as error:
        yield str(error)
        return
    for name, size in record.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != size:
            yield f"{path}: has {path.stat().st_size} bytes, {size} were written"
    for name, digest in record.get("sha256", {}).items():
        if (folder / name).is_file() and digest_of(folder / name) != digest:
            yield f"{folder / name}: changed since it was written"
    yield from extra_faults(side, record)


# --- config and names


def _config_faults(homes: Sequence[Path], given: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Differences of two folders' config.json and tokenizer. ``given``: fields of a side that could be read, as it was
    trained; None to read the file."""
    first, second = homes
    try:
        pairs = zip(homes, given, strict=True)
        one, two = (unquantised(fields or read_fields(folder), folder) for folder, fields in pairs)
    except UserError:  # reported already
        return []
    files = f"{first / 'config.json'} and {second / 'config.json'}"
    faults = [
        f"{files}: {name!r} is {one.get(name)!r} in the first, {two.get(name)!r} in the second"
        for name in sorted(one.keys() | two.keys())
        if name not in _MAY_DIFFER and one.get(name) != two.get(name)
    ]
    present = {file.name for file in model_files(second)}
    for file in model_files(first):
        other = second / file.name
        if file.name not in present:
            faults.append(f"{other}: missing")
        elif file.name != "config.json" and file.read_bytes() != other.read_bytes():
            faults.append(f"{other}: differs from that in {first}")
    added = sorted(present - {file.name for file in model_files(first)})
    return faults + [f"{second / name}: not in {first}" for name in added]


def _shapes(side: Side) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in side.specs.items()}


def _spec_faults(first: Side, second: Side) -> list[str]:
    one, two = _shapes(first), _shapes(second)
    faults = [f"{name} is only in {first.folder}" for name in one if name not in two]
    faults += [f"{name} is only in {second.folder}" for name in two if name not in one]
    both = [name for name in one if name in two and one[name] != two[name]]
    return faults + [f"{name} has shape {list(one[name])} and {list(two[name])}" for name in both]


def _coverage_faults(side: Side) -> list[str]:
    """Checks that elements and places of a checkpoint correspond one to one."""
    if isinstance(side, HuggingFaceSide):
        return []
    if isinstance(side, ShardedSide):
        return list(side.coverage_faults())
    faults = []
    for name, places in side.places.items():
        if not tiles(side.specs[name].shape, [shard.box for _, shard in places]):
            faults.append(f"{name}: not every element has exactly one place in {side.folder}")
    for parameter in side.parameters:
        rows = max(shard.local_box.stop[0] for shard in parameter.shards)
        if not tiles((rows, *parameter.shape[1:]), [shard.local_box for shard in parameter.shards]):
            faults.append(f"{parameter.key}: not every element comes from exactly one place")
    return faults


# --- elements


def _compare_all(first: Side, second: Side, workers: int) -> list[Compared]:
    names = list(first.specs)

    def prepare() -> Callable[[str], Compared]:
        readers = reader_of(first), reader_of(second)
        return lambda name: _compare(first, second, readers, name)

    found = dict(run_tasks(prepare, names, workers))
    return [found[index] for index in range(len(names))]


def stored_dtype(side: Side, name: str) -> str:
    """Type of a tensor in the files; bfloat16 for fp8, which is compared dequantised, and that of the model for float32
    master weights."""
    if isinstance(side, MegatronSide):
        return side.tensors[side.places[name][0][0].key].dtype
    return side.dtype_of(name)


def _compare(first: Side, second: Side, readers: tuple[Reader, Reader], name: str) -> Compared:
    """Compares the source's elements, cast to the target's type, with the target's, bit by bit."""
    dtype, shape = stored_dtype(second, name), first.specs[name].shape
    sums, row = (hashlib.sha256(), hashlib.sha256()), None
    try:
        for box in cut_box(Box((0,) * len(shape), shape), 4 * CAST_ELEMENTS):
            blocks = [np.ascontiguousarray(reader.tensor(name, box, dtype)) for reader in readers]
            bits = [block.view(f"u{block.itemsize}") for block in blocks]
            if row is None and not np.array_equal(*bits):
                row = box.start[0] + int(np.nonzero((bits[0] != bits[1]).reshape(len(bits[0]), -1).any(1))[0][0])
            for total, block in zip(sums, blocks, strict=True):
                total.update(block)
    except UserError as error:
        return Compared(name, "", "", 0, str(error))
    return Compared(name, *(total.hexdigest() for total in sums), row)


def _difference(item: Compared, compared: list[Compared]) -> str:
    """Description of a tensor's fault; for an expert, which one is in its place."""
    other = next((one for one in compared if one.source == item.target and _kin(one.name) == _kin(item.name)), None)
    if other is not None and "*" in _kin(item.name):
        return f"{item.name}: contains {other.name}"
    return f"{item.name}: first difference in row {item.row}"


def _kin(name: str) -> str:
    """Name with ``*`` in place of the expert's number."""
    parts = name.split(".")
    at = parts.index("experts") + 1 if "experts" in parts else None
    return ".".join("*" if i == at else part for i, part in enumerate(parts))


def _same_experts(compared: list[Compared], side: Side) -> list[str]:
    """Faults of a layer's experts that are equal in the target but not in the source."""
    found: dict[tuple[str, str], list[Compared]] = defaultdict(list)
    for item in compared:
        if side.specs[item.name].expert is not None:
            found[_kin(item.name), item.target].append(item)
    return [
        f"{items[1].name}: equal to {items[0].name}"
        for items in found.values()
        if len(items) > 1 and len({item.source for item in items}) > 1
    ]


def _notes(first: Side, second: Side, compared: list[Compared]) -> list[str]:
    experts = sum(spec.expert is not None for spec in first.specs.values())
    parameters = sum(prod(spec.shape) for spec in first.specs.values())
    notes = [f"{len(compared)} tensors of {parameters:,} parameters are equal bit for bit"]
    changed = [n for n in first.specs if stored_dtype(first, n) != stored_dtype(second, n)]
    if changed:
        kinds = sorted({f"{stored_dtype(first, name)} to {stored_dtype(second, name)}" for name in changed})
        notes[0] = notes[0].replace("bit for bit", f"after casting {len(changed)} of them, {', '.join(kinds)}")
    if experts:
        notes.append(f"all {experts} expert tensors are in their places")
    notes.append("config and tokenizer are equal field by field")
    return notes


_OPTIMIZER = ("optimizer", "chained_")


def extra_faults(side: Side, record: Mapping[str, Any]) -> Iterator[str]:
    """Lines that name the files and keys. ``record``: that of the conversion that wrote the folder, if one did."""
    home = side.home
    names = files_of(home)
    if record:
        known = {RECORD, *record.get("files", ())}
        yield from (f"{home / name}: not written by the conversion" for name in names if name not in known)
    else:
        yield from (f"{home / name}: not in the index" for name in names if _is_stray(side, name))
    if (home / MANIFEST).is_file():
        listed = read_manifest(home)
        yield from (f"{home / name}: not in {MANIFEST}" for name in names if name not in listed)
        yield from (f"{home / name}: missing, {MANIFEST} lists it" for name in listed if name not in names)
    if isinstance(side, MegatronSide):
        yield from (f"{key} in {side.folder} is not part of the model" for key in _extra_keys(side))
    if not isinstance(side, HuggingFaceSide):  # a safetensors file with such tensors is not read at all
        yield from _overlaps(side)


def left_out_faults(first: Side, second: Side) -> Iterator[str]:
    """Tensors that the model does not use, in the second folder alone."""
    if isinstance(first, HuggingFaceSide) and isinstance(second, HuggingFaceSide):
        for name in second.left_out:
            if name not in first.left_out:
                yield f"{name} is only in {second.folder}"


def _is_stray(side: Side, name: str) -> bool:
    """True if programs that read the folder may take the file for weights of the model."""
    if isinstance(side, HuggingFaceSide):
        return side.folder / name in stray_files(side.folder)
    if not isinstance(side, MegatronSide) or not name.endswith(".distcp"):
        return False
    path = side.home / name
    places = {side.folder / file for file, _, _ in side.objects.values()}
    return path.parent == side.folder and path not in places and path not in side.files and path.stat().st_size > 0


def _overlaps(side: MegatronSide | ShardedSide) -> Iterator[str]:
    """Chunks of which a byte is in two."""
    places: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for key, tensor in side.tensors.items():
        for chunk in tensor.chunks:
            places[chunk.file].append((chunk.start, chunk.start + chunk.length, key))
    for file, found in sorted(places.items()):
        for (_, stop, one), (start, _, other) in pairwise(sorted(found)):
            if start < stop:
                yield f"{side.folder / file}: {one} and {other} overlap at byte {start}"


def _extra_keys(side: MegatronSide) -> Iterator[str]:
    known = {parameter.key for parameter in side.parameters}
    for key in side.tensors:
        if key not in known and not key.startswith(_OPTIMIZER):
            yield key
