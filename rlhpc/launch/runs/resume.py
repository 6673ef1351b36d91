"""``rlhpc resume``: submits a run again, to continue from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.submit import Plan, make_plan


def plan_again(run: RunEntry, overrides: Sequence[str], workdir: Path, *, dry_run: bool = False) -> Plan:
    """Submission of the run's own config with ``overrides``, in its own folder. This process must be in ``workdir``."""
    folder = run.folder
    if not folder.config.is_file():
        raise UserError("contains no run", where=str(folder.path), remedy="start one with `rlhpc submit`")
    config = load_config(folder.config, overrides)
    _refuse_finished(folder, load_config(folder.config), config)
    return make_plan([config.model_copy(update={"run_dir": folder.path})], workdir, dry_run=dry_run)


def workdir_of(run: RunEntry) -> Path:
    """Folder that relative paths of the run's config start from; for a run on this machine, this process's own."""
    workdir = Path(run.job.workdir) if run.job and run.job.workdir else Path.cwd()
    if not workdir.is_dir():
        raise UserError(f"its working folder {str(workdir)!r} is gone", where=run.name, remedy="create it again")
    return workdir


def _refuse_finished(folder: RunFolder, before: RunConfig, after: RunConfig) -> None:
    """Raises UserError for a finished run, unless more steps are requested than before."""
    verdicts = [attempts.read_verdict(attempt) for attempt in attempts.folders(folder)]
    if not verdicts or verdicts[-1] is None or verdicts[-1].cause != "finished":
        return
    if _steps(after) <= _steps(before):
        raise UserError(
            "the run has finished",
            where=str(folder.path),
            remedy=f"request more steps, such as train.steps={max(1, 2 * before.train.steps)}",
        )


def _steps(config: RunConfig) -> int:
    return config.train.steps + (config.sft.steps if config.sft is not None else 0)
