"""``rlhpc resume``: hand a run to Slurm again, to go on from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import Run
from rlhpc.launch.runs.submit import Plan, make_plan


def plan_again(run: Run, overrides: Sequence[str], workdir: Path) -> Plan:
    """The run's own config with ``overrides``, in its own folder. The working folder is ``workdir``, this process's."""
    folder = run.folder
    if not folder.config.is_file():
        raise UserError("holds no run", where=str(folder.path), remedy="start one with `rlhpc submit`")
    config = load_config(folder.config, overrides)
    _refuse_finished(folder, load_config(folder.config), config)
    return make_plan([config.model_copy(update={"run_dir": folder.path})], workdir)


def workdir_of(run: Run) -> Path:
    """Where the relative paths of the run's config start; this process's own folder for a run of this machine."""
    workdir = Path(run.job.workdir) if run.job and run.job.workdir else Path.cwd()
    if not workdir.is_dir():
        raise UserError(f"its working folder {str(workdir)!r} is gone", where=run.name, remedy="make it again")
    return workdir


def _refuse_finished(folder: RunFolder, before: RunConfig, after: RunConfig) -> None:
    """There is nothing to continue, unless more steps are asked for than before."""
    verdicts = [attempts.read_verdict(attempt) for attempt in attempts.folders(folder)]
    if not verdicts or verdicts[-1] is None or verdicts[-1].cause != "finished":
        return
    if _steps(after) <= _steps(before):
        raise UserError(
            "the run has finished",
            where=str(folder.path),
            remedy=f"ask for more steps to continue it, such as train.steps={max(1, 2 * before.train.steps)}",
        )


def _steps(config: RunConfig) -> int:
    return config.train.steps + (config.sft.steps if config.sft is not None else 0)
