"""Folder of a study: its search, Optuna's journal, and the run folders of its trials."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.config.load import absolute_paths, load_config, load_with_site
from rlhpc.config.saved import differing_keys, save_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import StudyFile
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, write_atomic, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import locked
from rlhpc.observe.alerts.configured import check_metric_name

# Of a folder whose study was interrupted before it began.
_BEFORE_THE_STUDY = {"base.yaml", "began.json", RunFolder(Path()).secrets.name}
_MAY_CHANGE = ("budget", "retries", "folder", "base")  # of a study that has begun; the base is compared by its contents


@dataclass(frozen=True)
class StudyFolder:
    """Paths of a study."""

    path: Path

    @property
    def study(self) -> Path:
        """The study's own file, as JSON."""
        return self.path / "study.json"

    @property
    def base(self) -> Path:
        """The configuration that trials differ from, with the values of the site file."""
        return self.path / "base.yaml"

    @property
    def beginning(self) -> Path:
        """Time and place of the study's beginning."""
        return self.path / "began.json"

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / "journal.log"

    def trial(self, number: int) -> RunFolder:
        """Run folder of a trial."""
        return RunFolder(self.path / "trials" / f"trial-{number:04d}")

    def locked(self) -> AbstractContextManager[None]:
        """Context that has the study to itself; waits for another process that has it."""
        return locked(RunFolder(self.path), wait=True)


@dataclass(frozen=True)
class StudyBeginning:
    """Beginning of a study. ``workdir``: that of all its commands; ``local``: trials run one after another on one
    machine."""

    time: float
    workdir: str
    local: bool


def base_of(study: StudyFile) -> RunConfig:
    """The configuration that trials differ from, with the values of the site file. Raises UserError also for a metric
    that no run of it has."""
    base = absolute_paths(load_with_site(study.base, ()).config)
    check_metric_name(study.objective.metric, base, "objective.metric")
    return base


def create(study: StudyFile, base: RunConfig, *, local: bool) -> StudyFolder:
    """Begins a study in its folder, or continues the one there. Raises UserError if that is another one."""
    folder = StudyFolder(study.path.absolute())
    if not folder.study.is_file():
        if folder.path.is_dir() and {path.name for path in folder.path.iterdir()} - _BEFORE_THE_STUDY:
            raise UserError("contains something else", where=str(study.path), remedy="choose another folder")
        folder.path.mkdir(parents=True, exist_ok=True)
        save_config(RunFolder(folder.path), base, folder.base)
        write_json(folder.beginning, asdict(StudyBeginning(time.time(), str(Path.cwd()), local)))
    else:
        _check_unchanged(folder, study, base, local=local)
    write_atomic(folder.study, study.model_dump_json(indent=2) + "\n")
    return folder


def read_beginning(folder: StudyFolder) -> StudyBeginning:
    """Time and place of a study's beginning."""
    return StudyBeginning(**read_json(folder.beginning))


def read_study(folder: StudyFolder) -> StudyFile:
    """The study of a folder. Raises UserError if there is none."""
    try:
        return StudyFile.model_validate_json(folder.study.read_bytes(), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "contains no study", where=str(folder.path), remedy="begin one with `rlhpc study run FILE`"
        ) from None
    except ValueError as error:
        raise UserError(
            f"cannot be read: {str(error).splitlines()[0]}", where=str(folder.study), remedy="restore the file"
        ) from None


def _check_unchanged(folder: StudyFolder, study: StudyFile, base: RunConfig, *, local: bool) -> None:
    if read_beginning(folder).local != local:
        began = "with" if not local else "without"
        raise UserError(f"the study began {began} it", where="--local", remedy="go on as it began")
    before = json.loads(read_study(folder).model_dump_json())
    changed = [key for key, *_ in differing_keys(before, json.loads(study.model_dump_json()), _MAY_CHANGE)]
    if changed:
        raise UserError(
            f"{', '.join(changed)} differ(s) from the study in {folder.path}, whose trials would not compare",
            where=study.name,
            remedy="restore it, or name another folder",
        )
    former = load_config(folder.base).model_dump(mode="json")
    changed = [key for key, *_ in differing_keys(former, base.model_dump(mode="json"), ())]
    if changed:
        raise UserError(
            f"{', '.join(changed[:5])} differ(s) from {folder.base}, with which the study began",
            where=str(study.base),
            remedy="restore it, or name another folder",
        )
