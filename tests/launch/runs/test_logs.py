"""Logs of ranks that no Slurm has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.cli.status import run_over
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.exits import ExitRecord
from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.run_lock import is_locked, locked
from rlhpc.launch.runs import follow
from rlhpc.launch.runs.logs import batch_log, failed_rank, follow_log, log_files, tail
from rlhpc.launch.runs.run_registry import RunEntry, new_record, read_run, register
from tests.launch.runs.test_status import begin, make_run, verdict


def test_logs_of_a_run_on_this_machine(tmp_path: Path) -> None:
    """In the order of the ranks, and nothing else."""
    run = RunEntry(RunFolder(tmp_path / "run"), None)
    run.folder.create()
    folder = attempts.begin(
        run.folder, job_id="", restart_count=0, nodes=("here",), world_size=11, saved_step=-1, hang_timeout_seconds=60
    )
    for name in ("notes.txt", "rank-00010.log", "rank-00002.log", "rank-00000.log"):
        (folder.logs / name).write_text(name)
    found = [(log.title, log.path.name) for log in log_files(run, all_ranks=True)]
    assert found == [(f"rank {n}, attempt 1", f"rank-{n:05d}.log") for n in (0, 2, 10)]


@pytest.mark.heavy
def test_a_run_on_this_machine_is_followed_until_its_launcher_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    assert not is_locked(folder)
    folder.config.write_text("name: run\n")
    start = attempts.begin(
        folder, job_id="", restart_count=0, nodes=("here",), world_size=1, saved_step=-1, hang_timeout_seconds=60
    )
    log = start.logs / "rank-00000.log"
    log.write_text("step 1\n")
    command = [sys.executable, "-m", "rlhpc.cli.main", "logs", str(folder.path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        with locked(folder):
            assert is_locked(folder)
            assert follower.stdout is not None
            assert [follower.stdout.readline() for _ in range(2)] == [f"==> rank 0, attempt 1: {log} <==\n", "step 1\n"]
            for step in (2, 3):
                with open(log, "a") as file:
                    file.write(f"step {step}\n")
                assert follower.stdout.readline() == f"step {step}\n"
            assert follower.poll() is None
        assert follower.wait(100) == 0
    assert not is_locked(folder)


SQUEUE = """#!/bin/sh
cd "${0%/*}"
echo >> asked
if [ -e state ]; then echo "7|$(cat state)|None|N/A|N/A|1:00|node1"; exit 0; fi
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.mark.heavy
def test_a_job_is_followed_while_the_controller_is_away(tmp_path: Path, monkeypatch, capsys) -> None:
    """Jobs continue without it: its log is shown until Slurm says that the job is over."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SHORTEST_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(follow, name, 0.2)
    monkeypatch.setattr(follow, "_FOLDER_SECONDS", 0.0)
    slurm, folder = tmp_path / "slurm", RunFolder(tmp_path / "run")
    slurm.mkdir()
    (slurm / "squeue").write_text(SQUEUE)
    (slurm / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{slurm}:{os.environ['PATH']}")
    folder.create()
    folder.config.write_text("name: run\n")
    log = folder.path / "batch.log"
    log.write_text("step 1\n")
    register(folder, new_record("7", "run", tmp_path, log))
    over = run_over(read_run(folder.path))

    def ended() -> bool:
        if over():
            return True
        asked = len((slurm / "asked").read_text()) if (slurm / "asked").exists() else 0
        if asked >= 2 and log.read_text() == "step 1\n":
            log.write_text("step 1\nstep 2\n")  # while the controller is away
        elif asked >= 4:
            (slurm / "new").write_text("COMPLETED")
            (slurm / "new").rename(slurm / "state")
        return False

    assert "".join(follow_log(log, 0, ended)) == "step 1\nstep 2\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: slurm: squeue failed: ")


def write_logs(folder: AttemptFolder, ranks: int) -> None:
    for rank in range(ranks):
        (folder.logs / f"rank-{rank:05d}.log").write_text(f"I am {rank}\n")


def test_the_failed_ranks_log_comes_first(tmp_path):
    run = make_run(tmp_path / "run")
    folder = begin(run)
    write_logs(folder, 3)
    assert [log.title for log in log_files(run)] == ["rank 0, attempt 1"]
    write_json(folder.exits / "rank-00001.exit.json", vars(ExitRecord(1, "n", 1, 5.0, "error")))
    write_json(folder.exits / "rank-00002.exit.json", vars(ExitRecord(2, "n", 1, 4.0, "peer")))
    assert failed_rank(folder) == 1, "by the records"
    attempts.end(folder, verdict("crash", "stop", rank=2))
    assert [log.title for log in log_files(run, all_ranks=True)] == [f"rank {n}, attempt 1" for n in (2, 0, 1)]
    assert [log.path.read_text() for log in log_files(run, rank=1)] == ["I am 1\n"]


def test_logs_of_an_earlier_start(tmp_path):
    run = make_run(tmp_path / "run")
    write_logs(begin(run), 1)
    write_logs(begin(run), 1)
    assert log_files(run)[0].title == "rank 0, attempt 2"
    assert log_files(run, attempt=1)[0].title == "rank 0, attempt 1"
    with pytest.raises(UserError, match="--attempt 3: no such attempt; use 1 to 2"):
        log_files(run, attempt=3)
    with pytest.raises(UserError, match="rank 9: no log of it in attempt 2; use 0 to 0"):
        log_files(run, rank=9)


def test_before_the_ranks_start_it_is_the_jobs_own(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="job 7 has no log, and Slurm does not say whether it has begun; see `rlhpc st"):
        log_files(run)
    (run.folder.path / "batch.log").write_text("module: no such thing\n")
    assert log_files(run) == [batch_log(run)]


@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        ("7|PENDING|N/A|N/A|10:00||Priority", "job 7 has printed nothing yet: it is queued"),
        ("7|RUNNING|N/A|N/A|10:00|node1|None", "job 7 has printed nothing yet: it is running"),
        (
            "7|FAILED|N/A|N/A|10:00||None",
            "the log of job 7 is not there: it was deleted, or Slurm could not write it: ",
        ),
        ("", "the log of job 7 is not there: it was deleted, or"),
    ],
)
def test_why_there_is_no_log_depends_on_the_job(tmp_path, monkeypatch, squeue, words):
    for command, text in (("squeue", squeue), ("scontrol", ""), ("sacct", "")):
        (tmp_path / command).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / command).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError) as refused:
        batch_log(make_run(tmp_path / "run"))
    assert refused.value.message.startswith(words)


def test_a_log_that_was_deleted_is_not_said_to_come(tmp_path):
    run = make_run(tmp_path / "run")
    begin(run)  # by the job, which has a log by then
    with pytest.raises(UserError, match="the log of job 7 is not there: it was deleted"):
        log_files(run)


@pytest.mark.parametrize("lines", [1, 3, 100])
def test_the_tail_of_a_large_file(tmp_path, lines):
    file = tmp_path / "log"
    file.write_text("".join(f"{number:0100d}\n" for number in range(5000)) + "the last")
    expected = [f"{number:0100d}" for number in range(5001 - lines, 5000)] + ["the last"]
    text, end = tail(file, lines)
    assert text.splitlines() == expected
    assert end == file.stat().st_size
