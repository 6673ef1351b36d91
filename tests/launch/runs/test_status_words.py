"""What a status says of a job, where Slurm does not answer and while it is suspended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.status import queue_words, run_status
from rlhpc.launch.runs.status_view import details, show
from rlhpc.launch.runs.submit import check_free
from rlhpc.launch.slurm.commands import clock
from rlhpc.launch.slurm.queue import parse_scontrol, parse_squeue, read_jobs
from tests.launch.runs.test_status import make_run

# As on Slurm 22.05, of a job of five minutes that was suspended after a second.
SQUEUE = "7|SUSPENDED|2026-11-25T17:53:02|2026-11-25T17:58:02|4:59|node1|None"
SCONTROL = (
    "JobId=7 JobName=x JobState=SUSPENDED Reason=None Requeue=1 Restarts=0 ExitCode=0:0 RunTime=00:00:01 "
    "TimeLimit=00:05:00 StartTime=2026-11-25T17:53:02 EndTime=2026-11-25T17:58:02 SuspendTime=2026-11-25T17:53:03 "
    "NodeList=node1"
)
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes commands of Slurm that print a text, or fail with an error."""

    def make(**printed: tuple[str, str]) -> None:
        for name, (out, err) in printed.items():
            lines = ["#!/bin/sh", *([f"echo '{out}'"] if out else []), *([f"echo '{err}' >&2; exit 1"] if err else [])]
            (tmp_path / name).write_text("\n".join([*lines, ""]))
            (tmp_path / name).chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


@pytest.mark.parametrize(("asked", "words"), [(True, "no longer known to Slurm"), (False, "Slurm does not answer")])
def test_a_controller_that_is_down_has_not_forgotten_the_job(tmp_path, capsys, asked, words):
    show(details(run_status(make_run(tmp_path / "run"), None, asked=asked)))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job ")]
    assert line.split(maxsplit=1)[1] == f"7: {words}"


def test_a_controller_that_goes_down_between_two_commands_is_an_error(commands):
    commands(squeue=("", "slurm_load_jobs error: Invalid job id specified"), scontrol=("", AWAY), sacct=("", AWAY))
    with pytest.raises(UserError, match="scontrol failed: slurm_load_jobs error: Unable to contact slurm controller"):
        read_jobs(["7"])


def test_a_status_without_an_answer_is_from_the_folders(tmp_path, commands, monkeypatch, capsys):
    """The controller answers the first command only."""
    commands(sbatch=("", ""), scontrol=("Slurmctld(primary) at node1 is UP", ""), squeue=("", AWAY))
    run = make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main.main(["status", str(run.folder.path)])
    assert not ended.value.code
    printed = capsys.readouterr()
    assert "rlhpc: the following is from the run folders alone" in printed.err
    assert "7: Slurm does not answer" in printed.out


@pytest.mark.parametrize("job", [parse_squeue(SQUEUE)["7"], parse_scontrol(SCONTROL)["7"]], ids=["squeue", "scontrol"])
def test_the_end_of_a_suspended_job_is_unknown(job):
    """Slurm shows the one from before, and moves it when the job continues."""
    assert (job.end, job.time_left) == (None, None)
    assert job.start is not None
    assert queue_words(job, job.start) == f"suspended, started at {clock(job.start, job.start)} on node1"


@pytest.mark.parametrize(("waits", "where"), [(True, "slurm.sbatch_options.dependency"), (False, "run_dir")])
def test_a_job_that_would_wait_for_the_runs_own_is_refused_for_that(tmp_path, commands, waits, where):
    commands(squeue=("7|RUNNING|2026-11-25T17:53:02|2026-11-25T17:58:02|4:59|node1|None", ""))
    with pytest.raises(UserError) as refused:
        check_free(make_run(tmp_path / "run").folder, again=True, waits=waits)
    assert refused.value.where == where
    assert ("even if it waits for its end" in refused.value.message) is waits
    assert ("rlhpc cancel" in refused.value.remedy) is not waits
