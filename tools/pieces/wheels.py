"""Wheel files: reads metadata, packs the running rlhpc as a wheel, and trims wheels."""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

import rlhpc
from rlhpc.core.errors import UserError

_WHEEL = "Wheel-Version: 1.0\nGenerator: rlhpc\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LARGE = 1 << 20  # bytes from which LZMA is worth its time


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
    """Whether the wheel has files for which LZMA is worth its time."""
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
