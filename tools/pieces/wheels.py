"""Wheel files: reads metadata, packs the running rlhpc as a wheel, trims wheels, and cuts them into pieces with the
manifest by which a bare machine joins and verifies them."""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

import rlhpc
from rlhpc.core.errors import UserError, did_you_mean

_WHEEL = "Wheel-Version: 1.0\nGenerator: rlhpc\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LARGE = 1 << 20  # bytes from which LZMA is worth its time
MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 20

# Files that a use does not need, from vLLM 0.25.0: each of these kernels is imported with ImportError suppressed, and
# headers are read only when a kernel is compiled at run time.
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        # FlashAttention 2 (Hopper uses 3) and kernels for Blackwell
        "hopper": ("vllm/vllm_flash_attn/_vllm_fa2_C*.so", "vllm/_qutlass_C*.so", "vllm/third_party/fmha_sm100/*"),
        "offline": ("vllm/vllm-rs",),  # the server's front end
        "bf16": ("vllm/third_party/deep_gemm/include/*",),  # headers of DeepGEMM, which multiplies in FP8
        "dense": ("vllm/_moe_C*.so",),  # routing and grouped products of mixture-of-experts models
    }
}


@dataclass(frozen=True)
class Wheel:
    """A wheel with its name and metadata."""

    path: Path
    name: str  # canonical
    version: str
    requires: tuple[str, ...]
    tags: frozenset[Tag]

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's name, version, requirements and tags."""
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (file,) = (entry for entry in archive.namelist() if _is_metadata(entry))
            headers = HeaderParser().parsestr(archive.read(file).decode("utf-8"))
    except (InvalidWheelFilename, zipfile.BadZipFile, ValueError) as error:
        raise UserError(f"invalid wheel: {error}", where=str(path)) from error
    return Wheel(path, name, str(version), tuple(headers.get_all("Requires-Dist") or ()), tags)


def _is_metadata(entry: str) -> bool:
    folder, _, file = entry.partition("/")
    return folder.endswith(".dist-info") and file == "METADATA"


def path_files(path: Path) -> list[str]:
    """Names of the wheel's ``.pth`` files, which Python reads only in ``site-packages``."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return [name for name in names if name.endswith(".pth") and (name.count("/") == 0 or ".data/" in name)]


def write_wheel(folder: Path, stem: str, files: Iterable[tuple[str, bytes]]) -> Path:
    """Write ``<folder>/<stem>.whl`` with RECORD from (name in the wheel, content)."""
    path = folder / f"{stem}.whl"
    info = "{}-{}.dist-info".format(*stem.split("-")[:2])
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
            rows.append([name, f"sha256={_record_hash(content)}", str(len(content))])
        archive.writestr(f"{info}/RECORD", _record([*rows, [f"{info}/RECORD", "", ""]]))
    return path


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _record(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def pack_rlhpc(folder: Path) -> Wheel:
    """Pack the running rlhpc as a wheel: all files of the package, with the metadata of its installation."""
    package, installed = Path(rlhpc.__file__).parent, distribution("rlhpc")
    metadata = installed.read_text("METADATA") or installed.read_text("PKG-INFO")  # of an egg-info
    assert metadata, "an installed package has metadata"
    stem, info = f"rlhpc-{rlhpc.__version__}-py3-none-any", f"rlhpc-{rlhpc.__version__}.dist-info"
    files = [
        (f"{info}/METADATA", metadata.encode()),
        (f"{info}/WHEEL", _WHEEL.encode()),
        (f"{info}/entry_points.txt", (installed.read_text("entry_points.txt") or "").encode()),
    ]
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            files.append((f"rlhpc/{file.relative_to(package).as_posix()}", file.read_bytes()))
    return read_wheel(write_wheel(folder, stem, files))


@dataclass(frozen=True)
class Trimmed:
    """Files omitted from a wheel: their number, and their packed and unpacked bytes."""

    name: str
    globs: tuple[str, ...]
    files: int
    packed_bytes: int
    unpacked_bytes: int


def trim(path: Path, globs: Sequence[str], folder: Path, *, lzma: bool = False) -> Trimmed:
    """Write the wheel to ``folder`` without the files that match ``globs``, and update its RECORD. ``lzma``: recompress
    large files."""
    where = "--trim"
    wheel = read_wheel(path)
    with zipfile.ZipFile(path) as source:
        out = [entry for entry in source.infolist() if _matches(entry.filename, globs)]
        unmatched = [glob for glob in globs if not any(fnmatch.fnmatchcase(entry.filename, glob) for entry in out)]
        if unmatched:
            raise UserError(f"no file of {path.name} matches {unmatched[0]!r}", where=where, remedy="correct the glob")
        if any(_essential(entry.filename) for entry in out):
            raise UserError("matches the wheel's own metadata", where=where, remedy="use a narrower glob")
        left_out = {entry.filename for entry in out}
        with zipfile.ZipFile(folder / path.name, "w", zipfile.ZIP_DEFLATED) as trimmed:
            _copy(source, trimmed, left_out, lzma=lzma)
    sizes = sum(entry.compress_size for entry in out), sum(entry.file_size for entry in out)
    return Trimmed(wheel.name, tuple(globs), len(out), *sizes)


def has_large_files(path: Path) -> bool:
    """True if the wheel has files for which LZMA is worth its time."""
    with zipfile.ZipFile(path) as archive:
        return any(entry.file_size >= LARGE for entry in archive.infolist())


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _essential(name: str) -> bool:
    return name.split("/")[0].endswith(".dist-info") and name.rsplit("/")[-1] in ("METADATA", "WHEEL", "RECORD")


def _copy(source: zipfile.ZipFile, trimmed: zipfile.ZipFile, left_out: set[str], *, lzma: bool) -> None:
    """Copy all entries except ``left_out``, with their modes, and drop their rows of RECORD."""
    for entry in source.infolist():
        if entry.filename in left_out:
            continue
        content = source.read(entry)
        if entry.filename.endswith(".dist-info/RECORD"):
            rows = csv.reader(io.StringIO(content.decode("utf-8")))
            content = _record(row for row in rows if row and row[0] not in left_out).encode()
        copied = zipfile.ZipInfo(entry.filename, entry.date_time)
        copied.external_attr = entry.external_attr
        method = zipfile.ZIP_LZMA if lzma and len(content) >= LARGE else zipfile.ZIP_DEFLATED
        trimmed.writestr(copied, content, method)


# ---- what a use does not need


@dataclass(frozen=True)
class Trim:
    """Wheel to trim, with globs of the files to omit. Each glob must match."""

    name: str  # canonical
    globs: tuple[str, ...]
    text: str


def parse_trims(texts: Iterable[str]) -> list[Trim]:
    """Trims from ``NAME:USE,USE`` or ``NAME:GLOB,GLOB``. Those of one wheel are merged."""
    trims: dict[str, Trim] = {}
    for text in texts:
        name, _, wanted = text.partition(":")
        name = canonicalize_name(name.strip())
        words = [word.strip() for word in wanted.split(",") if word.strip()]
        if not name or not words:
            raise UserError(f"{text!r} names no files", where="--trim", remedy="write vllm:hopper or NAME:GLOB")
        globs = [glob for word in words for glob in _globs(name, word)]
        before = trims.get(name, Trim(name, (), ""))
        trims[name] = Trim(name, (*before.globs, *globs), " ".join(filter(None, (before.text, text))))
    return list(trims.values())


def _globs(name: str, word: str) -> tuple[str, ...]:
    uses = USES.get(name, {})
    if word in uses:
        return uses[word]
    if not any(sign in word for sign in "*?[/."):
        raise UserError(f"unknown use of {name}: {word!r}", where="--trim", remedy=did_you_mean(word, uses))
    return (word,)


# ---- pieces


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_pieces(wheels: Sequence[Wheel], folder: Path, limit: int) -> list[dict[str, Any]]:
    """Cut the concatenated wheels into files of ``limit`` bytes, the last possibly smaller."""
    total = sum(wheel.bytes for wheel in wheels)
    count = max(1, -(-total // limit))
    stream = _blocks(wheels, limit)
    pieces = []
    for number in range(1, count + 1):
        path = folder / f"piece-{number:02d}-of-{count:02d}"
        size, digest = 0, hashlib.sha256()
        with path.open("wb") as file:
            while size < limit and (block := next(stream, b"")):
                size += file.write(block)
                digest.update(block)
        pieces.append({"file": path.name, "bytes": size, "sha256": digest.hexdigest()})
    return pieces


def _blocks(wheels: Sequence[Wheel], limit: int) -> Iterator[bytes]:
    """Contents of all wheels in blocks that do not cross a multiple of ``limit``."""
    written = 0
    for wheel in wheels:
        with wheel.path.open("rb") as file:
            while block := file.read(min(_BLOCK, limit - written % limit)):
                written += len(block)
                yield block


def write_manifest(
    folder: Path, fields: dict[str, Any], wheels: Sequence[Wheel], pieces: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write and return the manifest; ``fields``: those that describe the target and the set."""
    rows = [
        {"file": wheel.path.name, "name": wheel.name, "version": wheel.version}
        | {"bytes": wheel.bytes, "sha256": sha256_of(wheel.path)}
        for wheel in wheels
    ]
    document = {"format": FORMAT, **fields, "wheels": rows, "pieces": pieces}
    (folder / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return document
