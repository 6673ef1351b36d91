"""Reads archives of torch.save without torch and without running code from them.

A pickle may contain only names that its reader lists, and each stands for a plain value or an inert record; any other
name is refused. Ranks and the checks before them read objects of a checkpoint by this file alone.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from rlhpc.core.errors import UserError
from rlhpc.core.storage import patiently

_COPY_AGAIN = "copy or save the checkpoint again"
DISTRUST = "the file may be an attack: get the model from a source that you trust"

# Element types of torch's storages.
STORAGES = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_DTYPES = (*STORAGES.values(), "float8_e4m3fn", "float8_e5m2")


class Inert:
    """Instance of a class of the file whose contents no one uses."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class RestrictedUnpickler(pickle._Unpickler):
    """Unpickler for the names of one format.

    ``names``: value of each (module, name) that the pickle may contain; ``part``: what they are part of, for the error.
    """

    def __init__(self, file: IO[bytes], names: Mapping[tuple[str, str], Any], part: str) -> None:
        super().__init__(file)
        self._names, self._part = names, part

    def find_class(self, module: str, name: str) -> Any:
        return listed(self._names, module, name, self._part)


def listed(names: Mapping[tuple[str, str], Any], module: str, name: str, part: str) -> Any:
    """Value of a name in a pickle. Raises UserError if the format has no such name."""
    key = ("builtins" if module == "__builtin__" else module), name
    if key not in names:
        raise UserError(f"names {module}.{name}, which is not part of {part}: it is not opened")
    found = names[key]
    # A pickle can set attributes of what it has named: those of a function would outlive it.
    return (lambda *arguments: found(*arguments)) if isinstance(found, FunctionType) else found


class Values:
    """Makes element types and tensors of a file; here neither is used."""

    def dtype(self, name: str) -> Any:
        """Element type by torch's name."""
        return name

    def tensor(self, dtype: str, data: bytes, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Tensor in a storage of elements ``data``, from element ``first`` on."""
        return Inert()


def read_file(path: Path, start: int = 0, length: int | None = None, values: Values | None = None) -> Any:
    """Value that torch.save wrote into ``length`` bytes of a file, by default all. Raises UserError."""

    def read() -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    return read_bytes(patiently(read, path), path, values)


def read_bytes(data: bytes, path: Path, values: Values | None = None) -> Any:
    """Value in the bytes of an archive, which are part of the file ``path``. Raises UserError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _ObjectReader(archive, values or Values()).load()
    except UserError as error:
        raise UserError(error.message, where=str(path), remedy=DISTRUST) from None
    except Exception as error:  # a damaged archive fails in any way
        raise UserError(f"is damaged ({type(error).__name__})", where=str(path), remedy=_COPY_AGAIN) from None


class _ObjectReader(RestrictedUnpickler):
    def __init__(self, archive: zipfile.ZipFile, values: Values) -> None:
        self._archive, self._values = archive, values
        self._records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        names = {**_NAMES, ("torch._utils", "_rebuild_tensor_v2"): self._tensor}
        names |= {("torch", name): values.dtype(name) for name in _DTYPES}
        super().__init__(io.BytesIO(self._read("data.pkl")), names, "a checkpoint's objects")

    def persistent_load(self, value: Any) -> tuple[str, bytes]:
        _, dtype, key, _, _ = value
        return dtype, self._read(f"data/{key}")

    def _read(self, name: str) -> bytes:
        record = self._records[name]
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("torch.save does not compress")  # what is compressed may be larger than memory
        return self._archive.read(record)

    def _tensor(self, storage: tuple[str, bytes], first: int, shape: Any, strides: Any, *_: Any) -> Any:
        return self._values.tensor(*storage, first, tuple(shape), tuple(strides))


def _text_bytes(text: str = "", encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(encoding)
    return text.encode("latin1")


def _inert(module: str, *names: str) -> dict[tuple[str, str], Any]:
    return {(module, name): Inert for name in names}


# Beside plain values: what Megatron's own checkpoints contain (megatron/core/safe_globals.py). None of it is used.
_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("builtins", "bytes"): _text_bytes,
    ("_codecs", "encode"): _text_bytes,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    **{("torch", storage): dtype for storage, dtype in STORAGES.items()},
    **_inert("builtins", "bytearray"),
    **_inert("io", "BytesIO"),
    **_inert("_io", "BytesIO"),
    **_inert("argparse", "Namespace"),
    **_inert("types", "SimpleNamespace"),
    **_inert("pathlib", "PosixPath"),
    **_inert("pathlib._local", "PosixPath"),
    **_inert("signal", "Signals"),
    **_inert("numpy", "ndarray", "dtype"),
    **_inert("numpy.dtypes", "UInt32DType"),
    **_inert("numpy.core.multiarray", "_reconstruct"),
    **_inert("numpy._core.multiarray", "_reconstruct"),
    **_inert("megatron.core.enums", "ModelType"),
    **_inert("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    **_inert("megatron.core.rerun_state_machine", "RerunDiagnostic", "RerunMode", "RerunState"),
    **_inert(
        "megatron.core.transformer.enums", "AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"
    ),
    **_inert("torch._C", "Generator"),
}
