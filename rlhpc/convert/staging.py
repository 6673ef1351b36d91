"""Hidden folder beside the target, in which conversions work until they are complete.

.NAME.converting/lock, lock-3        of a conversion, and of each share (rlhpc.convert.locks)
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
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.convert.jobs import has_ended, is_job, own_job
from rlhpc.convert.plan import ConversionPlan
from rlhpc.core.errors import UserError

_JOBS, _TARGET, _PIECES = _PARTS = ("jobs", "target", "pieces")
Items = list[list[int]]  # for each item of a piece: start in the file, length, CRC-32 of its elements
SEEN_SECONDS = 3.0  # age of a view after which what another process made is seen, or is not there
FORMER = "former"  # in a process's folder: briefly, the folder that the target replaces


@dataclass(frozen=True)
class PlanFolder:
    """What belongs to one plan."""

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
        """Whether all processes that worked on it have certainly ended."""
        return all(map(has_ended, _names(self.jobs)))

    def is_abandoned(self) -> bool:
        """Whether all processes that worked on it have certainly ended, and none left a former target."""
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
        """The same after a process that was killed between publishing and removing."""
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
    """Whether it is a file with one hard link, or was moved or removed by another process in the meantime."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
