"""The target of a conversion, and the folder beside it in which its files are written.

NAME.partial/plan.json   source, options and names of files; locked by the conversion that works here
             files/      becomes the target: what has its name is finished, NAME.part is not
             chunks/     places of the chunks in each finished file of a torch_dist checkpoint
             former/     briefly, the folder that the target replaces

The target must not overlap the source, and replaces only results of conversions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import IO, Any

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD
from rlhpc.convert.plan import ConversionPlan, Output
from rlhpc.convert.sides import Side
from rlhpc.core.errors import UserError
from rlhpc.core.files import contains, flush, is_same, read_json, resolved
from rlhpc.core.folder import RunFolder

Places = list[tuple[int, int]]  # start and length of each chunk of a file
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of file systems without locks


class Partial:
    """Folder of an unfinished conversion to a target."""

    def __init__(self, target: Path) -> None:
        self.path = target.parent / f"{target.name}.partial"
        self.files = self.path / "files"
        self._plan, self._former = self.path / "plan.json", self.path / "former"

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.lstat().st_size for path in self.files.rglob("*") if path.is_file())

    # --- files

    def part(self, output: Output) -> Path:
        """Path of a file while it is written."""
        return self.files / f"{output.file}.part"

    def finish(self, output: Output, places: Places) -> None:
        """Gives a file that is on disk its name. ``places``: those of Megatron's chunks."""
        if places:
            self._chunks(output).write_text(json.dumps(places))
        os.rename(self.part(output), self.files / output.file)

    def places(self, output: Output) -> Places:
        """Places of the chunks in a finished file. Raises OSError or ValueError if there is no record of them."""
        return [(start, length) for start, length in json.loads(self._chunks(output).read_text())]

    def is_finished(self, output: Output) -> bool:
        """True if a file need not be written again."""
        try:
            return (self.files / output.file).is_file() and bool(output.header or self.places(output))
        except (OSError, ValueError):
            return False

    def _chunks(self, output: Output) -> Path:
        return self.path / "chunks" / f"{Path(output.file).name}.json"

    # --- the folder

    def check(self) -> None:
        """Refuses a folder that contains anything but a conversion's own plain files. Raises UserError."""
        foreign = next(self._foreign(), None)
        if foreign is not None:
            raise UserError(
                f"{foreign!r} in it is a link, has a second hard link, or was not written by a conversion",
                where=str(self.path),
                remedy="move this folder away; the conversion then starts over",
            )

    def _foreign(self) -> Iterator[str]:
        if os.path.lexists(self.path) and (self.path.is_symlink() or not self.path.is_dir()):
            yield self.path.name
        names = _object(self._plan).get("names", ())
        own = {"plan.json", *(f"chunks/{Path(name).name}.json" for name in names)}
        own |= {f"files/{name}{end}" for name in names for end in ("", ".part")}
        yield from _strangers(self.path, own, {"files", "chunks", "former"})
        yield from (name for name in sorted(own) if not _is_plain(self.path / name))

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO[str]]:
        """Holds the lock of the folder, which is made; its plan's file. Raises UserError if another process holds it.

        A file system without locks has none: two conversions of one plan write the same bytes.
        """
        self.path.mkdir(exist_ok=True)
        with open(self._plan, "a+", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = self._plan.stat().st_ino == os.fstat(handle.fileno()).st_ino
            except OSError as error:
                free = error.errno in _NO_FLOCK
                if not free and error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
                    raise
            if not free:
                raise UserError("another conversion is writing here", where=str(self.path), remedy="wait for it")
            yield handle
        with contextlib.suppress(OSError):  # over NFS an open file keeps its folder
            self.path.rmdir()

    def begin(self, plan: ConversionPlan, target: Path, handle: IO[str], *, force: bool) -> None:
        """Prepares the folder for a plan, whose finished files it keeps. Raises UserError if it has those of another
        plan, unless ``force``."""
        if self._former.exists() and not os.path.lexists(target):  # killed between two renames
            os.rename(self._former, target)
        former = _object(self._plan)
        if former.get("digest") != plan.digest:
            if any(path.is_file() for path in self.files.rglob("*")) and not force:
                raise _of_another(self.path, former, plan)
            for name in ("files", "chunks"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            handle.truncate(0)
            json.dump({**plan.record, "names": plan.names}, handle)
            handle.flush()
        for folder in (self.path / "chunks", self.files / plan.checkpoint):
            folder.mkdir(parents=True, exist_ok=True)

    def publish(self, target: Path, names: list[str]) -> None:
        """Renames the result, which must have these files and no others, to the target, and sets aside what had that
        name. Raises UserError if that is not what a conversion wrote."""
        if foreign := next(_strangers(self.files, {*names}), None):
            raise UserError(
                f"{foreign!r} in it was not written by this conversion", where=str(self.files), remedy="move it away"
            )
        for folder in sorted({(self.files / name).parent for name in names}, reverse=True):
            flush(folder)
        if os.path.lexists(target) and os.listdir(target):
            os.rename(target, self._former)
            try:
                check_replaceable(self._former)
            except UserError:
                os.rename(self._former, target)
                raise
        os.rename(self.files, target)
        flush(target.parent)
        self._remove()

    def tidy(self) -> None:
        """Removes the remains of a conversion that was killed after it had published its result."""
        if self.path.exists() and not self.files.exists() and next(self._foreign(), None) is None:
            with self.locked():
                self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _of_another(path: Path, former: dict[str, Any], plan: ConversionPlan) -> UserError:
    names = ("source", "target", "layout", "dtype")
    changed = next((name for name in names if former.get(name) != plan.record[name]), None)
    other = {None: "the source as it was before", "source": "another source"}.get(changed, "other options")
    words = ", ".join(f"{name} {former[name]}" for name in names if former.get(name))
    return UserError(
        f"is an unfinished conversion of {other} ({words})",
        where=str(path),
        remedy="run that one again to complete it, or start over with --force",
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def _is_plain(path: Path) -> bool:
    """True if it is a file with one hard link, or does not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _strangers(path: Path, names: Set[str], others: Set[str] = frozenset()) -> Iterator[str]:
    """Relative names in a folder, and in the subfolders of ``names``, that are neither names nor such folders.

    ``others``: further folders.
    """
    folders = {str(parent) for name in names for parent in Path(name).parents} - {"."}
    for folder in ("", *sorted(folders)):
        if (path / folder).is_dir() and not (folder and (path / folder).is_symlink()):
            for entry in sorted(os.scandir(path / folder), key=lambda entry: entry.name):
                name = f"{folder}/{entry.name}".lstrip("/")
                if name not in (folders | others if entry.is_dir(follow_symlinks=False) else names):
                    yield name


def check_overlap(source: Side, target: Path) -> None:
    """Refuses a target, or the folder beside it, that is the source, is inside it or contains any of it.

    Raises UserError.
    """
    root, partial, links = _source_root(source), Partial(target), list(_linked_files(source))
    for path in (target, partial.path, partial.files):
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
    """True if --force may replace the target."""
    return not os.path.ismount(target) and not _foreign(target)


def record_of(target: Path) -> dict[str, Any]:
    """Record of the conversion that wrote the folder; empty for any other folder."""
    record = _object(target / RECORD)
    complete = isinstance(record.get("files"), dict) and isinstance(record.get("digest"), str)
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
    name = next(_strangers(target, {RECORD, MANIFEST, *record["files"]}), None)
    return f"contains {name!r}, which no conversion wrote" if name else ""


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
        reason = f"the folder {str(path)!r} for its unfinished files {reason}"
    return UserError(reason, where=str(target), remedy="choose a destination that does not overlap the source")
