"""Checks the target of a conversion: it must not overlap the source, and replaces only results of conversions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD
from rlhpc.convert.sides import Side
from rlhpc.convert.staging import Staging
from rlhpc.core.errors import UserError
from rlhpc.core.files import contains, is_same, read_json, resolved
from rlhpc.core.folder import RunFolder


def check_overlap(source: Side, target: Path) -> None:
    """Refuses a target, or its staging folder, that is the source, is inside it or contains any of it.

    Raises UserError.
    """
    root, staging, links = _source_root(source), Staging.beside(target), list(_linked_files(source))
    for path in (target, staging.path, *staging.folders):
        for folder in dict.fromkeys((root, source.home, source.folder, source.model_folder)):
            if is_same(path, folder):
                raise _overlap(target, path, f"is the source {str(folder)!r}")
            if contains(path, folder):
                raise _overlap(target, path, f"contains the source {str(folder)!r}")
        if contains(root, path):
            raise _overlap(target, path, f"is inside the source {str(root)!r}")
        for file in links:
            if contains(path, file):
                raise _overlap(target, path, f"contains {str(file)!r}, a link target of the source {str(root)!r}")


def check_replaceable(target: Path) -> None:
    """Refuses to replace anything but an empty folder or one that contains only files of a conversion.

    A subfolder that its record does not list is foreign, so nothing else is removed. Raises UserError.
    """
    if not os.path.lexists(target):
        return
    if os.path.ismount(target):
        raise UserError(
            "is a mount point, which cannot be replaced", where=str(target), remedy="name a new folder in it"
        )
    reason = _foreign(target)
    if reason:
        raise UserError(
            f"{reason}; --force replaces only what a conversion wrote",
            where=str(target),
            remedy="choose another folder, or move this one away",
        )


def is_replaceable(target: Path) -> bool:
    """Whether --force may replace the target."""
    return not os.path.ismount(target) and not _foreign(target)


def record_of(target: Path) -> dict[str, Any]:
    """Record of the conversion that wrote the folder; empty for any other folder."""
    try:
        record = read_json(target / RECORD)
    except (OSError, ValueError):
        return {}
    complete = (
        isinstance(record, dict) and isinstance(record.get("files"), dict) and isinstance(record.get("digest"), str)
    )
    return record if complete else {}


def _foreign(target: Path) -> str:
    """Reason why the target is not the result of a conversion; empty if it is."""
    if not target.is_dir():
        return "is not a folder"
    if not os.listdir(target):
        return ""
    record = record_of(target)
    if not record:
        return "was not written by a conversion"
    known = {RECORD, MANIFEST, *record["files"]}
    folders = {name.rpartition("/")[0] for name in known} - {""}
    for name, is_folder in _entries(target, folders):
        if is_folder != (name in folders) or (not is_folder and name not in known):
            return f"contains {name!r}, which no conversion wrote"
    return ""


def _entries(target: Path, folders: set[str]) -> Iterator[tuple[str, bool]]:
    """Relative names in a folder and in its known subfolders, and whether each is a folder."""
    for name in ("", *sorted(folders)):
        folder = target / name
        if name and (folder.is_symlink() or not folder.is_dir()):
            continue
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            yield (f"{name}/" if name else "") + entry.name, entry.is_dir(follow_symlinks=False)


def _source_root(source: Side) -> Path:
    """Folder of the source; for a checkpoint of a run, the folder of all its checkpoints."""
    folder = resolved(source.home)
    above = folder.parent.parent
    return above if folder.name == "actor" and above == RunFolder(above.parent).checkpoints else folder


def _linked_files(source: Side) -> Iterator[Path]:
    """Targets of the links in the source's folders, such as the blobs of HuggingFace's cache."""
    for folder in dict.fromkeys((source.home, source.folder, source.model_folder)):
        yield from (resolved(Path(entry.path)) for entry in os.scandir(folder) if entry.is_symlink())


def _overlap(target: Path, path: Path, reason: str) -> UserError:
    if path != target:
        reason = f"the staging folder {str(path)!r} {reason}"
    return UserError(reason, where=str(target), remedy="choose a destination that does not overlap the source")
