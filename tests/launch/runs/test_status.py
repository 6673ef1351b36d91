"""State of a run, from its folder and from what Slurm says of its job, and the words for it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.core import attempts, storage
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.runs import run_registry
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry, all_runs, find_run, find_runs, read_run, register
from rlhpc.launch.runs.status import as_json, queue_words, run_status, verdict_words
from rlhpc.launch.runs.status_view import details, overview, show
from rlhpc.launch.runs.submit import check_free, plan_again
from rlhpc.launch.slurm.commands import clock
from rlhpc.launch.slurm.queue import JobStatus, parse_scontrol, parse_squeue, read_jobs
from tests.helpers.plain_model import write_inputs

KNOWN = {"restart_count": 0, "nodes": ("node1", "node2"), "world_size": 4, "saved_step": -1}


def make_run(path: Path, job_id: str = "7", name: str = "tiny", submitted: float | None = None) -> RunEntry:
    folder = RunFolder(path).create()
    submitted = time.time() if submitted is None else submitted
    register(folder, JobRecord(job_id, "", submitted, "alice", name, str(path.parent), str(path / "batch.log")))
    folder.config.write_text("name: tiny\n")
    return read_run(path)


def begin(run: RunEntry, **changes: object) -> AttemptFolder:
    return attempts.begin(run.folder, **{**KNOWN, "job_id": "7", **changes})


def job(state: str, **changes: object) -> JobStatus:
    return JobStatus("7", state, **changes)


# ---- which runs there are


def test_runs_are_found_by_folder_name_and_job(tmp_path, monkeypatch):
    first, second = make_run(tmp_path / "runs" / "a", "7", "one", 1.0), make_run(tmp_path / "b", "8_1", "two", 2.0)
    third = make_run(tmp_path / "c", "8_0", "three", 3.0)
    assert [run.name for run in all_runs()] == ["three", "two", "one"], "the last submitted first"
    monkeypatch.chdir(tmp_path)
    for text in (str(first.folder.path), "a", "7", "one"):
        assert find_run(text) == first
    assert find_run("8_1") == second
    assert find_runs("8") == [third, second], "an array, in its order"
    make_run(tmp_path / "d", "77", "four", 4.0)
    assert find_run("7") == first, "a part of an id means no job"


def test_what_is_not_one_run_is_reported(tmp_path):
    make_run(tmp_path / "a", "8_0")
    make_run(tmp_path / "b", "8_1")
    with pytest.raises(UserError, match=r"8: is an array of 2 runs; choose one of 8_0, 8_1"):
        find_run("8")
    with pytest.raises(UserError, match=r"tiny: 2 runs have this name: .*; give the folder"):
        find_run("tiny")
    with pytest.raises(UserError, match="tyni: no such run; did you mean 'tiny'"):
        find_run("tyni")


def test_a_folder_that_is_gone_leaves_the_list(tmp_path):
    run = make_run(tmp_path / "a")
    (tmp_path / "state" / "rlhpc" / "runs" / "broken.json").write_text("{")
    run.folder.path.rename(tmp_path / "moved")
    assert all_runs() == []
    assert list((tmp_path / "state" / "rlhpc" / "runs").iterdir()) == []


def test_a_list_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert make_run(tmp_path / "a").job is not None
    assert "will not list this run" in capsys.readouterr().err


def unreadable(file: Path) -> None:
    """Reading it fails with EIO, from the kernel."""
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/self/mem")


def test_a_folder_that_cannot_be_read_stays_in_the_list(tmp_path, capsys):
    broken, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", "8")
    unreadable(broken.folder.job)
    assert all_runs() == [other]
    assert "warning: a run is not shown: [Errno 5] Input/output error" in capsys.readouterr().err
    write_json(broken.folder.job, {"job_id": "7"})
    assert len(all_runs()) == 2


def test_a_run_whose_records_cannot_be_read_has_slurm_s_state_and_a_note(tmp_path, capsys):
    storage.use(storage.NONE)
    run = make_run(tmp_path / "a")
    unreadable(begin(run).record)
    assert run_status(run, None).state == "unreadable"
    status = run_status(run, job("RUNNING"))
    assert status.state == "running"
    for view in (details(status), overview([status])):
        show(view)
        assert "the run folder cannot be read: [Errno 5] Input/output error" in capsys.readouterr().out
    storage.use(storage.Patience())


def test_a_command_that_cannot_read_a_run_says_so_in_one_line(tmp_path, capfd, monkeypatch):
    run = make_run(tmp_path / "a")
    attempt = begin(run)
    (attempt.logs / "rank-00000.log").touch()
    unreadable(attempt.verdict)
    monkeypatch.setattr(main, "_COMMAND_SECONDS", 0.2)
    with pytest.raises(SystemExit) as ended:
        main.main(["logs", str(run.folder.path)])
    storage.use(storage.Patience())
    assert ended.value.code == 75
    assert capfd.readouterr().err.splitlines()[-1].endswith("; the file system does not respond, try again later")


def test_a_job_record_of_another_version_is_read(tmp_path):
    folder = RunFolder(tmp_path)
    write_json(folder.job, {"job_id": "5", "cluster": "c", "submitted": 1.0, "user": "u", "later": True})
    found = run_registry.read_run(tmp_path).job
    assert found is not None
    assert (found.job_id, found.log) == ("5", "")


# ---- in which state


def verdict(cause: str, action: str, **more: object) -> Verdict:
    return Verdict(time.time(), cause, "words", action, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slurm", "last", "state"),
    [
        (job("PENDING"), None, "queued"),
        (job("RUNNING"), None, "running"),
        (job("RUNNING"), verdict("network", "retry"), "retrying"),
        (job("PENDING"), verdict("time_limit", "requeue"), "queued"),
        (job("COMPLETED"), verdict("finished", "none"), "finished"),
        (None, verdict("finished", "none"), "finished"),
        (job("FAILED"), verdict("user", "stop"), "failed"),
        (None, verdict("crash", "stop"), "failed"),
        (job("COMPLETED"), verdict("stopped", "none"), "stopped"),
        (job("CANCELLED"), verdict("requeued", "none"), "cancelled"),
        (job("NODE_FAIL"), None, "node failed"),
        (job("TIMEOUT"), None, "out of time"),
        (None, None, "gone"),
    ],
)
def test_states(slurm, last, state, tmp_path):
    run = make_run(tmp_path / "run")
    folder = begin(run)
    if last is not None:
        attempts.end(folder, last)
    assert run_status(run, slurm).state == state


def test_an_old_verdict_says_nothing_of_a_new_submission(tmp_path):
    run = make_run(tmp_path / "run")
    attempts.end(begin(run), verdict("user", "stop"))
    again = make_run(tmp_path / "run", "9", submitted=time.time() + 3600)
    assert run_status(again, job("CANCELLED")).state == "cancelled"
    assert run_status(again, None, asked=False).state == "unknown"


def test_progress_comes_from_the_last_lines(tmp_path):
    run = make_run(tmp_path / "run")
    lines = [
        {"phase": "rl", "step": n, "total_steps": 5000, "reward/mean": n / 1000, "x": "y" * 100} for n in range(2000)
    ]
    lines.append({"phase": "rl", "step": 2000, "total_steps": 5000, "perf/tokens_per_second": 12345.6})
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "rl", "st')
    status = run_status(run, job("RUNNING", time_left=3600))
    assert (status.phase, status.step, status.total_steps) == ("rl", 2000, 5000)
    assert (status.reward, status.tokens_per_second) == (1.999, 12345.6)


def test_checkpoints_are_listed_with_the_best_one(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    assert run_status(run, None).checkpoints == ()
    for step in (20, 60, 80):
        folder = run.folder.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        write_json(folder / "state.json", {"state": {"best_of": "max validation/pass@1", "best_step": -1}, "files": {}})
    show(details(run_status(run, None)))
    assert "steps 20, 60, 80\n" in capsys.readouterr().out
    best = {"best_of": "max validation/pass@1", "best_step": 20, "best_value": 0.5}
    write_json(folder / "state.json", {"state": best, "files": {}})
    status = run_status(run, None)
    show(details(status))
    assert "steps 20, 60, 80; best: 20 (validation/pass@1 0.5)" in capsys.readouterr().out
    assert as_json(status)["best_checkpoint"] == {"step": 20, "metric": "validation/pass@1", "value": 0.5}
    (folder / "state.json").write_text("{")
    assert run_status(run, None).best_checkpoint is None, "that of the checkpoint before it"


def test_exports_are_listed_with_their_folders(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    assert as_json(run_status(run, None))["exports"] == []
    for name in ("hf-00000020", "hf-00000080", "hf-of-mine", ".writing-0001"):
        (run.folder.checkpoints / name).mkdir()
    status = run_status(run, None)
    folders = [str(run.folder.checkpoints / f"hf-{step:08d}") for step in (20, 80)]
    assert as_json(status)["exports"] == [{"step": 20, "folder": folders[0]}, {"step": 80, "folder": folders[1]}]
    show(details(status))
    shown = "".join(capsys.readouterr().out.split())
    assert all("".join(folder.split()) in shown for folder in folders)


def test_odd_metrics_are_shown_or_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    good = {"phase": "rl", "step": 3, "total_steps": 9, "reward/mean": 0.25}
    odd = [
        {"reward/mean": "high", "perf/tokens_per_second": [1]},
        {"reward/mean": None},
        {"perf/tokens_per_second": {}},
    ]
    lines = [json.dumps({**good, **values}) for values in ({}, *odd)]
    run.folder.metrics.write_text("\n".join([*lines, "[1]", "{", '{"phase": "rl"}', '{"step": 4}', ""]))
    status = run_status(run, job("RUNNING"))
    assert (status.phase, status.step, status.total_steps, status.reward) == ("rl", 3, 9, 0.25)
    assert status.tokens_per_second is None
    show(overview([status]))
    show(details(status))
    assert "rl step 3/9 | reward 0.250" in capsys.readouterr().out


def test_what_a_queued_job_waits_for():
    at = time.mktime((2026, 11, 21, 14, 5, 0, 0, 0, -1))
    words = queue_words(job("PENDING", reason="Priority", start=at), now=at - 60)
    assert words == "waits behind jobs of higher priority (Priority), expected to start at 14:05"
    words = queue_words(job("PENDING", reason="QOSMaxGRESPerUser"), now=at)
    assert words.endswith("(QOSMaxGRESPerUser); slurm.gpus_per_node: request less of it")
    words = queue_words(job("RUNNING", start=at, nodes="node[1-2]", time_left=90), now=at + 60)
    assert words == "running since 14:05 on node[1-2], 1 min 30 s left"
    assert queue_words(job("CANCELLED", end=at), now=at) == "cancelled at 14:05"


def test_what_recovery_did():
    message = verdict("gpu_memory", "retry", rank=3, node="node2", wait_seconds=120.0, overrides=("a.b=1",))
    assert verdict_words(message) == "out of GPU memory (rank 3 on node2): words -> retried after 2 min 00 s with a.b=1"
    message = verdict("bad_node", "requeue", node="node2", excluded=("node2",))
    assert verdict_words(message) == "a node failed (node2): words -> requeued without node2"
    assert verdict_words(verdict("finished", "none")) == "finished"


def test_for_programs(tmp_path):
    run = make_run(tmp_path / "run")
    attempts.end(begin(run), verdict("crash", "retry"))
    begin(run, restart_count=1)
    found = json.loads(json.dumps(as_json(run_status(run, job("RUNNING", time_left=5)))))
    assert (found["name"], found["job_id"], found["state"], found["restarts"]) == ("tiny", "7", "running", 1)
    assert (found["slurm"]["state"], found["slurm"]["time_left"]) == ("RUNNING", 5)
    assert [start["verdict"] and start["verdict"]["cause"] for start in found["attempts"]] == ["crash", None]
    assert found["phase"] is None
    run.folder.metrics.write_text(json.dumps({"phase": "sft", "step": 3, "total_steps": 9}) + "\n")
    found = as_json(run_status(run, None))
    assert (found["phase"], found["step"]) == ("sft", 3)


def test_a_run_in_full(tmp_path, capsys):
    """By rows; what is not known has none."""
    run = make_run(tmp_path / "run")
    attempts.end(begin(run), verdict("gpu_memory", "retry", overrides=("a.b=1",)))
    begin(run, saved_step=20, overrides=("a.b=1", "c=2"), excluded=("node7",))
    record = {"phase": "rl", "step": 21, "total_steps": 50, "reward/mean": 0.25, "perf/tokens_per_second": 1234.5}
    run.folder.metrics.write_text(json.dumps(record) + "\n")
    show(details(run_status(run, job("RUNNING", restarts=2))))
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith(" "))
    assert list(rows) == ["run", "folder", "job", "requeued", "progress", "changed", "excluded", "attempt"]
    assert (rows["run"], rows["job"], rows["requeued"]) == ("tiny: running", "7: running", "twice")
    assert rows["progress"] == "rl step 21/50 | reward 0.250 | 1,234 tokens/s"
    assert (rows["changed"], rows["excluded"]) == ("a.b=1, c=2", "node7")
    assert rows["attempt"].startswith("2 ")
    assert rows["attempt"].endswith("4 rank(s) on node1, node2, from step 20")
    show(details(run_status(make_run(tmp_path / "new"), None)))
    known = capsys.readouterr().out
    assert "no longer known to Slurm" in known
    assert [line.split()[0] for line in known.splitlines()] == ["run", "folder", "job"]


def test_the_list_s_note_is_the_last_verdict_or_what_the_job_waits_for(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    attempts.end(begin(run), verdict("network", "requeue"))
    begin(run)
    jobs = job("PENDING", reason="Priority"), job("RUNNING", time_left=90)
    show(overview([run_status(run, each) for each in jobs]))
    _, queued, running = capsys.readouterr().out.splitlines()
    assert queued.endswith(" 1  waits behind jobs of higher priority (Priority)")
    assert " 1 min 30 s " in running
    assert "words -> requeued" in running
    attempts.end(begin(run), verdict("finished", "none"))
    show(overview([run_status(run, None)]))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["tiny", "7", "finished", "2"]


# ---- resume


def test_a_finished_run_is_not_resumed_but_for_more_steps(tmp_path):
    config = write_inputs(tmp_path)
    run = make_run(tmp_path / "run")
    run.folder.config.write_text(config.read_text())
    attempts.end(begin(run), verdict("finished", "none"))
    with pytest.raises(UserError, match=r"the run has finished; request more steps, such as train.steps=6"):
        plan_again(run, ["train.prompts_per_step=16"], tmp_path)
    plan = plan_again(run, ["train.steps=6", "slurm.gpus_per_node=0"], tmp_path)
    assert (plan.configs[0].train.steps, plan.folders) == (6, (run.folder,))


def test_a_failed_run_is_planned_in_its_own_folder(tmp_path):
    config = write_inputs(tmp_path)
    run = make_run(tmp_path / "moved")
    run.folder.config.write_text(config.read_text())
    attempts.end(begin(run), verdict("crash", "stop"))
    plan = plan_again(run, ["slurm.partition=other", "slurm.gpus_per_node=0"], tmp_path)
    assert plan.folders == (run.folder,)
    assert dict(plan.spec.options)["partition"] == "other"
    assert not (tmp_path / "run").exists()


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
