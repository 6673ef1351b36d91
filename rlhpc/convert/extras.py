"""What a folder contains beyond its model: files that no record or index lists, keys that the model has not, and chunks
that overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD
from rlhpc.convert.manifest import files_of, read_manifest
from rlhpc.convert.sharded_side import ShardedSide
from rlhpc.convert.sides import HuggingFaceSide, MegatronSide, Side

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
    """Whether programs that read the folder may take the file for weights of the model."""
    if isinstance(side, HuggingFaceSide):
        ours = "/" not in name and name.startswith("model") and name.endswith(".safetensors")
        return ours and side.folder / name not in side.files
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
