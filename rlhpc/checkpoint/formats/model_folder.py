"""Checks that the input files of a run exist and are complete: weights, data and tokenizer.

Sizes and headers suffice; neither weights nor transformers are loaded.
"""

from __future__ import annotations

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder
from rlhpc.checkpoint.formats.safetensors_headers import check_weight_map, read_header, weight_files
from rlhpc.checkpoint.formats.torch_dist_metadata import is_torch_dist, read_index, saved_parameters
from rlhpc.checkpoint.formats.weight_table import check_table, is_sharded, read_table
from rlhpc.core.errors import UserError, nearest
from rlhpc.core.inputs import COPY_AGAIN, MIB, open_input, read_input, read_json_object, read_lines
from rlhpc.models import ModelDescription, ModelShape, TensorHeader
from rlhpc.sharding.shards import model_tensors

DATA_SUFFIXES = (".jsonl", ".parquet")
_SURELY_HAS_ROWS = 16384  # bytes; an empty table of a hundred columns is smaller
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MOST = 512 * MIB  # of a tokenizer.json; the largest published ones have 40 MB


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


def check_tokenizer(folder: Path, vocab_size: int, *, chat_template: bool | Path) -> int:
    """Checks that the tokenizer's ids are in the model's vocabulary, and that the chat template exists if required.

    Returns the largest id plus one, or 0 if there is no tokenizer.json but another format. Raises UserError.
    """
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            "no tokenizer: none of " + ", ".join(TOKENIZERS),
            where=str(folder),
            remedy="save the tokenizer into the model folder with save_pretrained",
        )
    if isinstance(chat_template, Path):
        _check_template(chat_template)
    elif chat_template and not _has_chat_template(folder):
        raise UserError(
            f"the tokenizer in {str(folder)!r} has no chat template",
            where="data.chat_template",
            remedy="set it to false, or add chat_template.jinja to the folder",
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return 0
    size = _largest_id(read_json_object(file, _MOST), file) + 1
    if size > vocab_size:
        raise UserError(
            f"token ids go up to {size - 1}, but config.json has vocab_size {vocab_size}",
            where=str(file),
            remedy="use the tokenizer that belongs to the model",
        )
    return size


def same_vocabulary(one: Path, other: Path) -> bool:
    """True if both folders' tokenizer.json assign the same ids to the same tokens."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    if filecmp.cmp(files[0], files[1], shallow=False):
        return True
    first, second = (read_json_object(file, _MOST) for file in files)
    return all(first.get(part) == second.get(part) for part in ("model", "added_tokens"))


def _largest_id(tokenizer: dict[str, Any], file: Path) -> int:
    """Largest id in the vocabulary (a mapping to ids, or for unigram models a list) and the added tokens."""
    model, added = tokenizer.get("model", {}), tokenizer.get("added_tokens") or []
    vocab = model.get("vocab", {}) if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list):
        raise UserError("has no vocabulary (model.vocab)", where=str(file), remedy=COPY_AGAIN)
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise UserError("added_tokens is not a list of tokens", where=str(file), remedy=COPY_AGAIN)
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token.get("id") for token in added]
    for number in ids:
        if type(number) is not int or number < 0:
            raise UserError(f"{str(number)[:80]} is not a token's id", where=str(file), remedy=COPY_AGAIN)
    return max(ids, default=-1)


def _check_template(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"no such file {str(path)!r}", where="data.chat_template", remedy="correct it")
    try:
        read_input(path).decode()
    except (UserError, UnicodeDecodeError) as error:
        wrong = error.message if isinstance(error, UserError) else f"is not UTF-8 ({error})"
        raise UserError(f"{str(path)!r} {wrong}", where="data.chat_template", remedy="correct the file") from None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return False
    template = read_json_object(settings).get("chat_template")
    if template is not None and not isinstance(template, str | list):
        raise UserError("chat_template is not a text", where=str(settings), remedy=COPY_AGAIN)
    return bool(template)
