"""SHA256SUMS of a converted folder: the SHA-256 of each file, as ``sha256sum -c`` reads them.

Pieces of a file are written in any order, past the page cache, so that files are read again for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from rlhpc.checkpoint.formats.model_files import MANIFEST
from rlhpc.convert.pool import run_tasks
from rlhpc.core.files import write_atomic

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
    """As coreutils write it: a backslash in front marks a name with escapes."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        found = re.fullmatch(r"(\\?)([0-9a-f]{64}) [ *](.+)", line)
        if found:
            name = re.sub(r"\\([\\nr])", lambda escape: _ESCAPES[escape[1]], found[3]) if found[1] else found[3]
            yield name, found[2]
