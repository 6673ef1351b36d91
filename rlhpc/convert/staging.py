"""Hidden folder beside the target, in which conversions work until they are complete.

.NAME.converting/lock, lock-3        of a conversion, and of each share (rlhpc.convert.staging)
                 DIGEST/             of one plan
                     jobs/NAME/      of one process: files that it writes, records of their pieces
                     target/         complete files; becomes the target
                     pieces/7.json   of a complete file's piece: place and CRC-32 of its items

Processes on several nodes may work here at once, see each other's files seconds late, and have locks that do not reach
other nodes. Therefore:

- a process creates and writes files only in its own folder, whose name no other process has;
- it moves a file to ``target`` once the file is complete. Processes that write the same file write the same bytes, so
  that either may replace the other's;
- it takes over the folder of another process, which must have certainly ended, by renaming it;
- it removes what belongs to a plan when it has published that plan's result. What belongs to another plan it removes
  only if all that plan's processes have certainly ended.

Names of the processes that work in a staging folder: share, host, machine, pid, start and a random part.

Locks of a staging folder, so that two conversions to one target do not repeat each other's work.

They only save work: on some file systems a lock does not reach other nodes. rlhpc.convert.staging is safe without them.

Checks the target of a conversion: it must not overlap the source, and replaces only results of conversions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD
from rlhpc.convert.plan import ConversionPlan
from rlhpc.convert.sides import Side
from rlhpc.core import owner_lock
from rlhpc.core.errors import UserError
from rlhpc.core.files import contains, is_same, read_json, resolved
from rlhpc.core.folder import RunFolder
from rlhpc.core.owner_lock import machine
from rlhpc.core.process import ProcessId

_JOBS, _TARGET, _PIECES = _PARTS = ("jobs", "target", "pieces")
Items = list[list[int]]  # for each item of a piece: start in the file, length, CRC-32 of its elements
SEEN_SECONDS = 3.0  # age of a view after which what another process made is seen, or is not there
FORMER = "former"  # in a process's folder: briefly, the folder that the target replaces


@dataclass(frozen=True)
class PlanFolder:
    """Folder of one plan."""

    path: Path

    @property
    def jobs(self) -> Path:
        return self.path / _JOBS

    @property
    def target(self) -> Path:
        return self.path / _TARGET

    @property
    def pieces(self) -> Path:
        return self.path / _PIECES

    def has_ended(self) -> bool:
        """True if all processes that worked on it have certainly ended."""
        return all(map(has_ended, _names(self.jobs)))

    def is_abandoned(self) -> bool:
        """True if all processes that worked on it have certainly ended, and none left a former target."""
        return bool(_names(self.jobs)) and self.has_ended() and not any(self.jobs.glob(f"*/**/{FORMER}"))


@dataclass(frozen=True)
class Staging:
    """Such a folder, by its path."""

    path: Path

    @classmethod
    def beside(cls, target: Path) -> Staging:
        """Staging folder of a target."""
        return cls(target.absolute().parent / f".{target.name}.converting")

    def of(self, plan: ConversionPlan) -> PlanFolder:
        """Folder of a plan."""
        return PlanFolder(self.path / plan.digest[:16])

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders in it in which files are written and removed."""
        plans = self._plans()
        return (*(plan.path for plan in plans), *(plan.path / name for plan in plans for name in _PARTS))

    def check(self) -> None:
        """Refuses an existing folder that contains anything but a conversion's own plain files.

        Raises UserError.
        """
        if not os.path.lexists(self.path):
            return
        foreign = self._foreign_entry()
        if foreign is not None:
            raise UserError(
                f"{foreign.name!r} in it is a link, has a second hard link, or was not written by a conversion",
                where=str(self.path),
                remedy="move this folder away; the conversion then starts over",
            )

    def begin(self, plan: ConversionPlan, share: str | None) -> tuple[Path, bool]:
        """Makes this process's folder for the plan, and removes abandoned plans; whether there were any."""
        folder = self.of(plan)
        for path in (self.path, folder.path, folder.jobs, folder.target, folder.pieces):
            make_folder(path)
        job = folder.jobs / own_job(share)
        job.mkdir()
        others = [other for other in self._plans() if other != folder and other.is_abandoned()]
        removed = [_remove_plan(other, job / other.path.name) for other in others]
        return job, any(removed)

    def discard(self, plan: ConversionPlan) -> None:
        """Removes what belongs to a plan whose result is published, abandoned plans, and the folder if it is empty.

        To be called without the lock: over NFS, an open file keeps its folder from being removed.
        """
        for folder in self._plans():
            if folder == self.of(plan) or folder.is_abandoned():
                shutil.rmtree(folder.path, ignore_errors=True)
        self._remove_if_empty()

    def tidy(self, plan: ConversionPlan) -> None:
        """Removes the remains of a process that was killed between publishing and removing."""
        if self._foreign_entry() is None and self.of(plan).has_ended():
            self.discard(plan)

    def _remove_if_empty(self) -> None:
        if not self._plans():
            for name in _names(self.path):
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)
        with contextlib.suppress(OSError):  # another plan is being worked on
            os.rmdir(self.path)

    def _plans(self) -> list[PlanFolder]:
        paths = (self.path / name for name in _names(self.path) if _is_digest(name))
        return [PlanFolder(path) for path in paths if _is_folder(path)]

    def _foreign_entry(self) -> Path | None:
        """An entry that no conversion has written. One that is gone by now was another process's."""
        return next((path for path in self._foreign() if os.path.lexists(path)), None)

    def _foreign(self) -> Iterator[Path]:
        """Entries that no conversion has written."""
        if not _is_folder(self.path):
            yield self.path
            return
        for name in _names(self.path):
            path = self.path / name
            if _is_digest(name) and _is_folder(path):
                yield from _foreign_in(path)
            elif not (name.startswith(("lock", ".nfs")) and is_plain(path)):
                yield path


def _remove_plan(folder: PlanFolder, aside: Path) -> bool:
    """Removes an abandoned plan, which has first to be moved aside: nobody can have begun to work on it by then."""
    try:
        os.rename(folder.path, aside)
    except FileNotFoundError:  # another process was faster
        return False
    if not PlanFolder(aside).is_abandoned():
        os.rename(aside, folder.path)
        return False
    shutil.rmtree(aside)
    return True


def _foreign_in(plan: Path) -> Iterator[Path]:
    for name in _names(plan):
        if name not in _PARTS or not _is_folder(plan / name):
            yield plan / name
    yield from (plan / _JOBS / name for name in _names(plan / _JOBS) if not is_job(name))
    for name in _PARTS:
        for folder, folders, files in os.walk(plan / name):
            inner = [entry for entry in folders if entry != FORMER]
            links = (Path(folder, entry) for entry in inner if Path(folder, entry).is_symlink())
            yield from links
            folders[:] = inner
            yield from (path for entry in files if not is_plain(path := Path(folder, entry)))


def make_folder(path: Path) -> None:
    """Makes a folder in an existing one; waits for one that another process has made to be seen here."""
    try:
        os.mkdir(path)
    except FileExistsError:
        deadline = time.monotonic() + SEEN_SECONDS
        while not path.is_dir() and time.monotonic() < deadline:
            time.sleep(0.02)


def files_below(folder: Path) -> Sequence[str]:
    """Relative names of the files in a folder and its subfolders, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not _is_folder(path))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_digest(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{16}", name) is not None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def is_plain(path: Path) -> bool:
    """True if it is a file with one hard link, or was moved or removed by another process in the meantime."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


ENDED = ".ended"  # appended by the process itself when it ends
_JOB = re.compile(
    r"(?P<share>\w+)\.[\w.-]*-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}(?P<ended>\.ended)?"
)


def own_job(share: str | None) -> str:
    """A name for this process, which writes a share or all, that no other process has had."""
    process = ProcessId.own()
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{share or 'all'}.{host}-{_machine()}-{process.pid}-{process.start}-{secrets.token_hex(4)}"


def is_job(name: str) -> bool:
    """True if it is the name of a process."""
    return _JOB.fullmatch(name) is not None


def share_of(name: str) -> str:
    """Share that the process writes."""
    found = _JOB.fullmatch(name)
    return found["share"] if found else ""


def has_ended(name: str) -> bool:
    """True if the process has certainly ended: by its own word, or because it ran on this machine and is gone."""
    found = _JOB.fullmatch(name)
    if found is None or found["ended"]:
        return found is not None
    process = ProcessId(int(found["pid"]), int(found["start"]))
    return found["machine"] == _machine() and not process.is_alive()


def _machine() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


_NO_FLOCK = (*owner_lock.NO_LOCKS, errno.ENOLCK)
_ALL = "lock"


@contextlib.contextmanager
def locked(folder: Path, share: str = "") -> Iterator[None]:
    """Locks out other conversions to the same target; with a share's name, the same share and those without share.

    Raises UserError if another process has the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            free = _take_flock(stack, folder, share)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            stack.close()
            free = _take_owner_files(stack, folder, share)
        if not free:
            raise UserError("another conversion is writing here", where=str(folder), remedy="wait for it")
        yield


def _take_flock(stack: contextlib.ExitStack, folder: Path, share: str) -> bool:
    """True if the locks were free. All shares hold the first one together."""
    for name, kind in [(_ALL, fcntl.LOCK_SH if share else fcntl.LOCK_EX), (f"{_ALL}-{share}", fcntl.LOCK_EX)]:
        handle = stack.enter_context((folder / name).open("w"))
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _take_owner_files(stack: contextlib.ExitStack, folder: Path, share: str) -> bool:
    """Locks where the file system has no flock. Each side takes its own lock and then looks for the others'."""
    lock = owner_lock.take(folder / (f"{_ALL}-{share}" if share else _ALL))
    if lock is None:
        return False
    stack.enter_context(lock)
    others = [folder / _ALL] if share else _locks_of_shares(folder)
    return not any(map(owner_lock.is_held, others))


def _locks_of_shares(folder: Path) -> list[Path]:
    found = (re.fullmatch(rf"({_ALL}-.+)\.owner-\d+", path.name) for path in folder.iterdir())
    return sorted({folder / match[1] for match in found if match})


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
    """True if --force may replace the target."""
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
