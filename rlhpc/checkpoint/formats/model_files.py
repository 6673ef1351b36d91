"""Files of a model's folder besides its weights, to copy beside new ones, and the fields of its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.megatron_folder import TRACKER
from rlhpc.checkpoint.formats.safetensors_headers import INDEX
from rlhpc.checkpoint.formats.torch_dist_metadata import TABLE
from rlhpc.core.errors import UserError

RECORD = "conversion.json"
MANIFEST = "SHA256SUMS"
FP8_BLOCK = 128
_FP8_BLOCKS = ([FP8_BLOCK, FP8_BLOCK], (FP8_BLOCK, FP8_BLOCK))
_FORMAT_FILES = {
    ".metadata",
    "metadata.json",
    "common.pt",
    TRACKER,
    TABLE,
    RECORD,
    MANIFEST,
    INDEX,
    "pytorch_model.bin.index.json",
}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"}
_MAX_BYTES = 1 << 28  # a tokenizer is smaller


def model_files(folder: Path) -> list[Path]:
    """Files of a model besides its weights: config, tokenizer, generation config, templates, license."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in _FORMAT_FILES
        and file.suffix not in _WEIGHTS
        and file.stat().st_size <= _MAX_BYTES
    )


def read_fields(folder: Path) -> dict[str, Any]:
    """Fields of a model's config.json."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError("no config.json", where=str(folder), remedy="pass a folder in HuggingFace's format")
    return read_object(file)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises UserError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"is not a JSON document ({error})", where=str(path), remedy="restore the file") from None
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", where=str(path), remedy="restore the file")
    return value


def unquantised(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of the model with dequantized weights. Raises UserError for unsupported quantization."""
    found = dict(fields)
    quantization = found.pop("quantization_config", None)
    if not quantization:
        return found
    if not isinstance(quantization, dict):
        raise UserError(
            f"quantization_config = {repr(quantization)[:80]} is not an object",
            where=str(folder / "config.json"),
            remedy="restore the file",
        )
    method, fmt, block = (quantization.get(name) for name in ("quant_method", "fmt", "weight_block_size"))
    if method != "fp8" or fmt not in (None, "e4m3") or block not in _FP8_BLOCKS:
        raise UserError(
            f"weights quantized by {repr(method)[:80]} (fmt {repr(fmt)[:80]}, blocks {repr(block)[:80]}) are not "
            "supported",
            where=str(folder / "config.json"),
            remedy="dequantize them first; supported: fp8 e4m3 in blocks of 128 x 128",
        )
    return found


def changed_fields(
    fields: Mapping[str, Any], folder: Path, dtype: str, *, keeps_dtype: bool = False
) -> dict[str, Any] | None:
    """Fields of config.json for weights of ``dtype``, in torch's name, if they differ; None to copy the file.

    ``keeps_dtype``: another dtype alone is no reason to change them.
    """
    found = unquantised(fields, folder)
    key = next((key for key in ("dtype", "torch_dtype") if key in found), "torch_dtype")
    if found == dict(fields) and (found.get(key) in (dtype, None) or keeps_dtype):
        return None
    return {**found, key: dtype}


def config_text(fields: Mapping[str, Any]) -> str:
    """Contents of config.json."""
    return json.dumps(fields, indent=2) + "\n"
