"""Registry of the user's submitted runs: job.json in each run folder, and a list of the folders in the home."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import asdict, dataclass, fields
from getpass import getuser
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.errors import UserError, nearest
from rlhpc.core.files import names_in, read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import NONE, Patience, say

_RUNS = Path("runs")  # where a run's folder is by default
_MOST_NAMES = 200  # that completion reads


@dataclass(frozen=True)
class JobRecord:
    """Contents of job.json: the job a run was last submitted as. ``workdir``: relative paths of its config start there;
    ``log``: output of its batch step."""

    job_id: str = ""
    cluster: str = ""
    submitted: float = 0.0
    user: str = ""
    name: str = ""
    workdir: str = ""
    log: str = ""
    rollout_job: str = ""  # id of its rollout jobs, of an array if there are several


@dataclass(frozen=True)
class RunEntry:
    """A run folder with the job it was last submitted as, None if it never was."""

    folder: RunFolder
    job: JobRecord | None

    @property
    def name(self) -> str:
        return self.job.name if self.job else self.folder.path.name


def read_run(path: Path, patience: Patience | None = None) -> RunEntry:
    """The run in a folder."""
    folder = RunFolder(path)
    try:
        known = read_json(folder.job, patience)
    except (FileNotFoundError, ValueError):
        return RunEntry(folder, None)
    names = [field.name for field in fields(JobRecord)]
    return RunEntry(folder, JobRecord(**{name: known[name] for name in names if name in known}))


def register(folder: RunFolder, record: JobRecord) -> None:
    """Writes job.json, and adds the folder to this user's list; failure to write the list is only a warning."""
    write_json(folder.job, asdict(record))
    try:
        _state().mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(str(folder.path).encode()).hexdigest()[:16]
        write_json(_state() / f"{name}.json", {"folder": str(folder.path), "name": record.name})
    except OSError as error:
        say(f"warning: `rlhpc status` will not list this run: {error}")


def new_record(job_id: str, name: str, workdir: Path, log: Path, cluster: str = "", rollout_job: str = "") -> JobRecord:
    """The record of a job that was submitted now."""
    return JobRecord(job_id, cluster, time.time(), getuser(), name, str(workdir), str(log), rollout_job)


def all_runs() -> list[RunEntry]:
    """This user's runs, the last submitted first. Deleted folders are removed from the list.

    A folder that cannot be read stays in the list and is omitted here, with a warning.
    """
    runs = []
    for name in names_in(_state(), "*.json"):
        file = _state() / name
        try:
            run = read_run(Path(read_json(file)["folder"]), NONE)
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            _forget(file)
        except OSError as error:
            say(f"warning: a run is not shown: {error}")
        else:
            if run.job is None:
                _forget(file)
            else:
                runs.append(run)
    return sorted(runs, key=lambda run: run.job.submitted if run.job else 0.0, reverse=True)


def local_runs() -> list[RunEntry]:
    """Runs in the default folder of runs that never were jobs, the last started first. Other users' are left out."""
    found = []
    for name in names_in(_RUNS, patience=NONE):
        with contextlib.suppress(OSError):
            run = read_run(_RUNS / name, NONE)
            if run.job is None:
                found.append((run.folder.attempts.stat().st_mtime, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def known_names() -> list[str]:
    """Names of this user's runs, for completion: from the list and the default folder alone, no run folder is read."""
    names = set(names_in(_RUNS, "[!.]*", NONE))
    for name in names_in(_state(), "*.json", NONE)[:_MOST_NAMES]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            entry = read_json(_state() / name, NONE)
            names.add(str(entry.get("name") or Path(entry["folder"]).name))
    return sorted(name for name in names if name.isprintable())


def find_runs(text: str) -> list[RunEntry]:
    """The run with this folder, name or job id; all elements for the id of an array."""
    path = Path(text)
    for folder in (path, _RUNS / text):
        if (folder / "config.yaml").is_file() or (folder / "job.json").is_file():
            return [read_run(folder)]
    known = all_runs()
    by_job = [run for run in known if run.job and text in (run.job.job_id, run.job.job_id.partition("_")[0])]
    if by_job:
        return sorted(by_job, key=_element)
    named = [run for run in known if run.name == text]
    if len(named) > 1:
        folders = ", ".join(str(run.folder.path) for run in named[:4])
        raise UserError(f"{len(named)} runs have this name: {folders}", where=text, remedy="give the folder")
    if named:
        return named
    close = nearest(text, {run.name for run in known})
    remedy = f"did you mean {close[0]!r}?" if close else "give a folder, a name or a job id, see `rlhpc status`"
    raise UserError("no such run", where=text, remedy=remedy)


def find_run(text: str) -> RunEntry:
    """The one run with this folder, name or job id."""
    runs = find_runs(text)
    if len(runs) > 1:
        ids = ", ".join(run.job.job_id for run in runs if run.job)
        raise UserError(f"is an array of {len(runs)} runs", where=text, remedy=f"choose one of {ids}")
    return runs[0]


def _element(run: RunEntry) -> int:
    index = run.job.job_id.partition("_")[2] if run.job else ""
    return int(index) if index.isdecimal() else 0


def _forget(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _state() -> Path:
    """Folder of the list, by the XDG base directory specification."""
    base = os.environ.get(env.XDG_STATE_HOME) or ""
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return root / "rlhpc" / "runs"
