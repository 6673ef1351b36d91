"""Checks that the input files of a run exist and are complete, by sizes and headers, without reading weights."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.torch_dist_metadata import check_objects, check_tensors, is_torch_dist, read_index
from rlhpc.core.errors import UserError, nearest
from rlhpc.models import ModelShape
from rlhpc.sharding.shards import model_tensors

DATA_SUFFIXES = (".jsonl", ".parquet")
_SURELY_HAS_ROWS = 16384  # bytes; an empty table of a hundred columns is smaller
_INDEX = "model.safetensors.index.json"
_COPY_AGAIN = "copy or download the file again"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class WeightFiles:
    """Shape and file of each tensor, from the headers of a folder's safetensors."""

    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]
    total_bytes: int


def check_weights(folder: Path, shape: ModelShape) -> WeightFiles:
    """Checks that the files are complete and contain every tensor of ``shape``: safetensors, or a torch_dist checkpoint
    beside its config. Raises UserError."""
    if is_torch_dist(folder):
        return _check_torch_dist(folder, shape)
    found = _read_weights(folder)
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


def check_tokenizer(folder: Path, vocab_size: int, *, chat_template: bool | Path) -> int:
    """Checks that the tokenizer's ids are in the model's vocabulary, and that the chat template exists if required.

    Returns the largest id plus one, or 0 if there is no tokenizer.json but another format. Raises UserError.
    """
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            "no tokenizer: none of " + ", ".join(_TOKENIZERS),
            where=str(folder),
            remedy="save the tokenizer into the model folder with save_pretrained",
        )
    if isinstance(chat_template, Path):
        if not chat_template.is_file():
            raise UserError(f"no such file {str(chat_template)!r}", where="data.chat_template", remedy="correct it")
    elif chat_template and not _has_chat_template(folder):
        raise UserError(
            f"the tokenizer in {str(folder)!r} has no chat template",
            where="data.chat_template",
            remedy="set it to false, or add chat_template.jinja to the folder",
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return 0
    size = _largest_id(_read_json(file)) + 1
    if size > vocab_size:
        raise UserError(
            f"token ids go up to {size - 1}, but config.json has vocab_size {vocab_size}",
            where=str(file),
            remedy="use the tokenizer that belongs to the model",
        )
    return size


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether both folders' tokenizer.json assign the same ids to the same tokens."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    if filecmp.cmp(files[0], files[1], shallow=False):
        return True
    first, second = (_read_json(file) for file in files)
    return all(first.get(part) == second.get(part) for part in ("model", "added_tokens"))


def check_data_file(path: Path, where: str) -> None:
    """Checks that the file exists, is of a known kind, complete and not empty; ``where``: the config key that names it.

    Raises UserError.
    """
    if path.suffix not in DATA_SUFFIXES:
        raise UserError(
            f"{str(path)!r} is neither {' nor '.join(DATA_SUFFIXES)}", where=where, remedy="convert it to one of them"
        )
    if not path.is_file():
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
            shapes[name], files[name] = tuple(entry["shape"]), path
    return WeightFiles(shapes, files, sum(path.stat().st_size for path in paths))


def _check_torch_dist(folder: Path, shape: ModelShape) -> WeightFiles:
    index = read_index(folder)
    tensors = index.tensors
    check_tensors(tensors, shape, folder, folder)
    check_objects(index, shape, folder)
    files = {folder / chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    return WeightFiles(
        {key: tensor.shape for key, tensor in tensors.items()},
        {key: folder / tensor.chunks[0].file for key, tensor in tensors.items()},
        sum(file.stat().st_size for file in files),
    )


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
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(index), remedy=_COPY_AGAIN)
    paths = [folder / name for name in sorted(set(inside(weight_map, index).values()))]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(
            f"lists {len(paths)} files, of which {len(absent)} are missing: {', '.join(absent[:3])}"
            + (" …" if len(absent) > 3 else ""),
            where=str(index),
            remedy="copy or download the missing files",
        )
    return paths


def inside(weight_map: Mapping[str, Any], index: Path) -> dict[str, str]:
    """The map from tensors to files of ``index``. Raises UserError for a file that is not in the model's folder."""
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(
                f"{tensor!r} is outside the model's folder, in {name!r}", where=str(index), remedy=_COPY_AGAIN
            )
    return dict(weight_map)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Start of the data in one safetensors file, and its header; the file must have exactly the length in the header.

    Format: 8 bytes header length (little endian), the header as JSON, the data.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # The format bounds the header at 100 MB; more is not a safetensors file.
        if size < 8 or length > 100_000_000:
            raise UserError("is not a safetensors file", where=str(path), remedy=_COPY_AGAIN)
        text = file.read(length)
    if len(text) < length:
        raise UserError(f"is truncated inside its header, {length - len(text)} bytes are missing", where=str(path))
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        places = [entry["data_offsets"] for entry in header.values()]
        if any(not 0 <= first <= last for first, last in places):
            raise ValueError("negative")
        end = 8 + length + max((last for _, last in places), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError("is not a safetensors file", where=str(path), remedy=_COPY_AGAIN) from None
    if size != end:
        wrong = f"is truncated, {end - size} bytes are missing" if size < end else f"is {size - end} bytes too long"
        raise UserError(f"{wrong} ({size} of {end} bytes)", where=str(path), remedy=_COPY_AGAIN)
    return 8 + length, dict(header)


def _largest_id(tokenizer: dict[str, Any]) -> int:
    """Largest id in the vocabulary (a mapping to ids, or for unigram models a list) and the added tokens."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    largest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max([largest, *(int(token["id"]) for token in tokenizer.get("added_tokens") or [])])


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_read_json(settings).get("chat_template"))


def _check_jsonl(path: Path) -> None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise UserError(
                    "is not a JSON object", where=f"{path}:{number}", remedy='write one {"key": value, …} per line'
                )
            return
    raise UserError("has no rows", where=str(path), remedy="give a file with at least one row")


def count_rows(path: Path) -> int | None:
    """Number of rows in a data file; None if it does not exist or cannot be read."""
    try:
        if path.suffix == ".jsonl":
            with open(path, "rb") as file:
                return sum(bool(line.strip()) for line in file)
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(path).num_rows)
    except (ImportError, OSError, ValueError):
        return None


def _check_parquet(path: Path) -> None:
    """Checks magic bytes at both ends; and the footer's number of rows in files small enough to be empty.

    pyarrow takes 0.3 s to import, and a login node may lack it: ranks check again when they read the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    if head != b"PAR1" or tail != b"PAR1":
        wrong = "is truncated" if head == b"PAR1" else "is not a parquet file"
        raise UserError(wrong, where=str(path), remedy=_COPY_AGAIN)
    if size > _SURELY_HAS_ROWS:
        return
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        return
    try:
        rows = parquet.read_metadata(path).num_rows
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise UserError(f"cannot be read as parquet ({error})", where=str(path), remedy=_COPY_AGAIN) from None
    if not rows:
        raise UserError("has no rows", where=str(path), remedy="give a file with at least one row")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"is not a JSON document ({error})", where=str(path), remedy=_COPY_AGAIN) from None
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", where=str(path), remedy=_COPY_AGAIN)
    return value
