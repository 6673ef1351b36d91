"""Checks that the input files of a run exist and are complete, by sizes and headers, without reading weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.header import read_header
from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder
from rlhpc.checkpoint.formats.torch_dist_metadata import is_torch_dist, read_index, saved_parameters
from rlhpc.checkpoint.formats.weight_table import check_table, is_sharded, read_table
from rlhpc.core.errors import UserError, nearest
from rlhpc.core.inputs import COPY_AGAIN, MIB, is_file_name, open_input, read_json_object, read_lines
from rlhpc.models import ModelDescription, ModelShape, TensorHeader
from rlhpc.sharding.shards import model_tensors

DATA_SUFFIXES = (".jsonl", ".parquet")
_SURELY_HAS_ROWS = 16384  # bytes; an empty table of a hundred columns is smaller
_MOST_INDEX = 256 * MIB  # DeepSeek-V3's has 8 MB
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Shape and file of each tensor, from the headers of a folder's safetensors."""

    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]
    total_bytes: int


def check_weights(folder: Path, shape: ModelDescription) -> WeightFiles:
    """Checks that the files are complete and contain every tensor of ``shape``: safetensors, or a checkpoint. Raises
    UserError.

    Without a known family, the tensors are those in the description, which agree with the sizes in config.json.
    """
    if is_sharded(folder):
        return _check_sharded(folder, shape)
    if is_torch_dist(folder) and isinstance(shape, ModelShape):
        return _check_torch_dist(folder, shape)
    found = _read_weights(folder)
    if not isinstance(shape, ModelShape):
        _check_described(folder, shape, found)
    for tensor in model_tensors(shape):
        if tensor.name not in found.shapes:
            raise UserError(
                f"the weights have no tensor {tensor.name!r}",
                where=str(folder),
                remedy="use the weights that belong to its config.json",
            )
        if found.shapes[tensor.name] != tensor.shape:
            raise UserError(
                f"{tensor.name!r} has shape {list(found.shapes[tensor.name])}, config.json requires "
                f"{list(tensor.shape)}",
                where=str(found.files[tensor.name]),
                remedy="use the config.json that belongs to these weights",
            )
    return found


def check_data_file(path: Path, where: str) -> None:
    """Checks that the file exists, is of a known kind, complete and not empty; ``where``: the config key that names it.

    Raises UserError.
    """
    if path.suffix not in DATA_SUFFIXES:
        raise UserError(
            f"{str(path)!r} is neither {' nor '.join(DATA_SUFFIXES)}", where=where, remedy="convert it to one of them"
        )
    if not path.is_file():
        if path.exists():
            raise UserError(f"{str(path)!r} is not a regular file", where=where, remedy="give a file")
        present = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, present, 1)
        remedy = f"did you mean {close[0]!r}?" if close else "correct it; relative paths start at the working folder"
        raise UserError(f"no such file {str(path)!r}", where=where, remedy=remedy)
    if path.suffix == ".jsonl":
        _check_jsonl(path)
    else:
        _check_parquet(path)


def _read_weights(folder: Path) -> WeightFiles:
    paths = weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for name, entry in read_header(path)[1].items():
            shapes[name], files[name] = entry.shape, path
    check_weight_map(folder, files)
    return WeightFiles(shapes, files, sum(path.stat().st_size for path in paths))


def _check_described(folder: Path, shape: ModelDescription, found: WeightFiles) -> None:
    """Refuses files that lack all tensors of a layer, or have another vocabulary."""
    headers = [TensorHeader(name, size, "") for name, size in found.shapes.items()]
    held = {header.layer for header in headers}
    layer = next((layer for layer in range(shape.num_layers) if layer not in held), None)
    if layer is not None:
        raise UserError(
            f"the weights have no tensor of layer {layer}, config.json has {shape.num_layers} layers",
            where=str(folder),
            remedy="use the weights that belong to its config.json",
        )
    for header in headers:
        if header.of_vocabulary and header.shape[0] != shape.vocab_size:
            raise UserError(
                f"{header.name!r} has {header.shape[0]} rows, config.json a vocabulary of {shape.vocab_size}",
                where=str(found.files[header.name]),
                remedy="use the config.json that belongs to these weights",
            )


def _check_torch_dist(model: Path, shape: ModelShape) -> WeightFiles:
    folder = checkpoint_folder(model)
    index = read_index(folder)
    tensors = {
        parameter.key: index.tensors[parameter.key]
        for parameter in saved_parameters(index.tensors, shape, folder, model)
    }
    return WeightFiles(
        {key: tensor.shape for key, tensor in tensors.items()},
        {key: folder / tensor.chunks[0].file for key, tensor in tensors.items()},
        sum(file.stat().st_size for file in index.files(folder)),
    )


def _check_sharded(folder: Path, shape: ModelDescription) -> WeightFiles:
    index, table = read_index(folder), read_table(folder)
    check_table(table, index.tensors, folder)
    shapes = {weight.tensor.name: weight.tensor.shape for weight in table}
    for tensor in model_tensors(shape):
        if shapes.get(tensor.name) != tensor.shape:
            found = f"has shape {list(shapes[tensor.name])}" if tensor.name in shapes else "is missing"
            raise UserError(
                f"{tensor.name!r} {found}, config.json requires {list(tensor.shape)}",
                where=str(folder),
                remedy="use the config.json that belongs to these weights",
            )
    files = {weight.tensor.name: folder / index.tensors[weight.pieces[0].parameter].chunks[0].file for weight in table}
    return WeightFiles(shapes, files, sum(file.stat().st_size for file in index.files(folder)))


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of the folder, from its index if it has one."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise UserError(
                f"no model.safetensors and no {_INDEX}",
                where=str(folder),
                remedy="save the model with save_pretrained (safetensors)",
            )
        return [single]
    paths = sorted({folder / name for name in inside(read_weight_map(index), index).values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(
            f"lists {len(paths)} files, of which {len(absent)} are missing: {', '.join(absent[:3])}"
            + (" …" if len(absent) > 3 else ""),
            where=str(index),
            remedy="copy or download the missing files",
        )
    return paths


def check_weight_map(folder: Path, files: Mapping[str, Path]) -> None:
    """Checks that the folder's index, if it has one, names the file of each tensor in ``files``. Raises UserError."""
    index = folder / _INDEX
    if not index.is_file():
        return
    listed = inside(read_weight_map(index), index)
    for tensor in sorted(listed.keys() | files.keys()):
        name, file = listed.get(tensor), files.get(tensor)
        if file is None:
            wrong = f"lists {tensor!r}, which no file has"
        elif name is None:
            wrong = f"does not list {tensor!r}, which is in {file.name}"
        elif folder / name != file:
            wrong = f"lists {tensor!r} in {name}, but it is in {file.name}"
        else:
            continue
        raise UserError(wrong, where=str(index), remedy=COPY_AGAIN)


def read_weight_map(index: Path) -> dict[str, Any]:
    """Map from tensors to files in an index. Raises UserError."""
    weight_map = read_json_object(index, _MOST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(index), remedy=COPY_AGAIN)
    return dict(weight_map)


def inside(weight_map: Mapping[str, Any], index: Path) -> dict[str, str]:
    """The map from tensors to files of ``index``. Raises UserError for a file that is not in the model's folder."""
    for tensor, name in weight_map.items():
        if not is_file_name(name):
            raise UserError(
                f"{tensor!r} is outside the model's folder, in {repr(name)[:80]}",
                where=str(index),
                remedy=COPY_AGAIN,
            )
    return dict(weight_map)


def _check_jsonl(path: Path) -> None:
    first = next(read_lines(path), None)
    if first is None:
        raise UserError("has no rows", where=str(path), remedy="give a file with at least one row")
    place, line = first
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError("is not a JSON object", where=place, remedy='write one {"key": value, …} per line')


def count_rows(path: Path) -> int | None:
    """Number of rows in a data file; None if it does not exist or cannot be read."""
    try:
        if path.suffix == ".jsonl":
            return sum(1 for _ in read_lines(path))
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(path).num_rows)
    except (ImportError, OSError, ValueError):
        return None


def _check_parquet(path: Path) -> None:
    """Checks magic bytes at both ends; and the footer's number of rows in files small enough to be empty.

    pyarrow takes 0.3 s to import, and a login node may lack it: ranks check again when they read the file.
    """
    size = path.stat().st_size
    with open_input(path) as file:
        head = file.read(4)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    if head != b"PAR1" or tail != b"PAR1":
        wrong = "is truncated" if head == b"PAR1" else "is not a parquet file"
        raise UserError(wrong, where=str(path), remedy=COPY_AGAIN)
    if size > _SURELY_HAS_ROWS:
        return
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        return
    try:
        rows = parquet.read_metadata(path).num_rows
    except Exception as error:  # pyarrow raises many types for a damaged footer
        raise UserError(f"cannot be read as parquet ({error})", where=str(path), remedy=COPY_AGAIN) from None
    if not rows:
        raise UserError("has no rows", where=str(path), remedy="give a file with at least one row")
