"""`rlhpc status`, `logs` and `cancel` against a real Slurm, with and without an accounting database."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from tests.helpers.plain_model import write_inputs
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import SKIPPED
from tests.slurm.front import Front
from tests.slurm.possible import why_no_accounting
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

pytestmark = pytest.mark.slurm


def state_of(front: Front, run: str) -> str:
    return json.loads(front.ok("status", run, "--json"))[0]["state"]


# ---- status


def test_all_runs_are_listed_newest_first(front):
    assert front.ok("status") == "no runs; start one with `rlhpc run` or `rlhpc submit`\n"
    names = ("first", "second", "third")
    jobs = []
    for name, program in zip(names, ("succeed", "fail", "work"), strict=True):
        config = write_inputs(front.folder / name)
        config.write_text(config.read_text().replace("name: tiny", f"name: {name}"))
        jobs.append(front.submit(program, config=config))
    wait(lambda: (front.folder / "third" / "run" / "working").exists(), "the third works")
    for name, state in (("first", "finished"), ("second", "failed")):
        wait(lambda name=name, state=state: state_of(front, name) == state, f"the {name} run to end")
    lines = front.ok("status").splitlines()
    assert lines[0].split() == ["run", "job", "state", "step", "reward", "tokens/s", "left", "restarts", "note"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert list(rows) == ["third", "second", "first"]
    assert rows["first"][:6] == ["first", jobs[0], "finished", "3/3", "0.300", "1,000"]
    assert rows["second"][:4] == ["second", jobs[1], "failed", "1/3"]
    assert "(rank 1 on node1): rollout.tp: 8 is too many -> stopped" in lines[2]
    assert rows["third"][:6] == ["third", jobs[2], "running", "1/3", "0.100", "1,000"]
    assert rows["third"][7] == "min", "the time left in the job"


def test_one_run_is_shown_with_all_its_starts(front):
    job = front.submit("work")
    wait((front.run_dir / "working").exists, "it works")
    (front.run_dir / "working").unlink()
    front.cluster.run(["scontrol", "requeue", job], check=True)
    wait((front.run_dir / "working").exists, "it works again")
    lines = front.ok("status", job).splitlines()
    shown = {line.split()[0]: line for line in lines}
    assert shown["run"].endswith("tiny: running")
    assert "running since" in shown["job"]
    assert shown["requeued"].split() == ["requeued", "once"]
    assert "rl step 1/3 | reward 0.100 | 1,000 tokens/s" in shown["progress"]
    assert sum(line.startswith("attempt ") for line in lines) == 2
    found = json.loads(front.ok("status", str(front.run_dir), "--json"))[0]
    assert (found["job_id"], found["restarts"], found["slurm"]["restarts"]) == (job, 1, 1)


def test_a_run_that_waits_says_why_and_when(front):
    first = front.submit("sleep", "slurm.nodes=4", "slurm.exclusive=true", "slurm.time=7")
    front.cluster.wait_state(first, "RUNNING")
    second = front.submit("sleep", "slurm.nodes=4", f"run_dir={front.folder / 'second'}")
    wait(lambda: "expected to start at" in front.ok("status", second), "an expected start")
    shown = front.ok("status", second)
    assert "is next and waits for free nodes (Resources), expected to start at" in shown
    assert "queued" in front.ok("status")


def test_without_a_controller_the_folders_are_read(front):
    """Without waiting for an answer as long as Slurm's commands do."""
    front.cluster.wait_state(front.submit("fail"), "FAILED")
    began = time.monotonic()
    front.ok("status")
    with_controller = time.monotonic() - began
    front.cluster.stop_controller()
    try:
        began = time.monotonic()
        done = front.run("status")
        assert time.monotonic() - began < 10 * with_controller + 10
    finally:
        front.cluster.start_controller()
    assert done.returncode == 0
    assert done.stderr.splitlines()[1] == "rlhpc: the following is from the run folders alone"
    assert "failed" in done.stdout


def test_a_job_that_slurm_forgot_is_distinguished_from_its_folder(front):
    """Without accounting a controller forgets a job minutes after its end."""
    front.cluster.wait_state(front.submit("succeed"), "COMPLETED")
    record = json.loads((front.run_dir / "job.json").read_text())
    (front.run_dir / "job.json").write_text(json.dumps({**record, "job_id": "99999"}))
    assert state_of(front, str(front.run_dir)) == "finished"
    assert "no longer known to Slurm" in front.ok("status", str(front.run_dir))


def test_the_database_knows_what_the_controller_forgot(slurm, tmp_path):
    if reason := why_no_accounting():
        pytest.skip(SKIPPED + reason)
    with Cluster.up(Settings(nodes=1, accounting=True)) as cluster:
        front = Front(cluster, tmp_path)
        job = front.submit("sleep")
        front.ok("cancel", job)
        sacct = ["sacct", "-n", "-X", "-j", job, "-o", "State"]
        wait(lambda: "CANCELLED" in cluster.run(sacct).stdout, "the database has it", interval=0.5)
        cluster.stop_controller()
        for file in (cluster.folder / "state").glob("job_state*"):
            file.unlink()
        cluster.start_controller()
        assert cluster.job(job) == {}, "the controller knows nothing of it"
        found = json.loads(front.ok("status", job, "--json"))[0]
        assert (found["state"], found["slurm"]["source"]) == ("cancelled", "sacct")
        assert front.error_line("cancel", job) == f"tiny: job {job} is over (cancelled); see `rlhpc status`"


# ---- logs


def test_logs_show_the_failed_rank_first(front):
    front.cluster.wait_state(front.submit("fail"), "FAILED")
    lines = front.ok("logs", "tiny").splitlines()
    log = f"{front.run_dir}/attempts/0001/logs/rank-00001.log"
    assert lines == [f"==> rank 1, attempt 1: {log} <==", "rank 1 of start 1"]
    shown = front.ok("logs", "tiny", "--all").splitlines()
    assert [line for line in shown if not line.startswith("==>")] == ["rank 1 of start 1", "rank 0 of start 1"]
    assert "rank 0 of start 1" in front.ok("logs", "tiny", "--rank", "0", "--attempt", "1")
    assert "submitit INFO" in front.ok("logs", "tiny", "--job")
    assert front.error_line("logs", "tiny", "--rank", "9").startswith("rank 9: no log of it in attempt 1")


def test_following_a_log_ends_with_the_job(front):
    job = front.submit("work")
    wait((front.run_dir / "working").exists, "it works")
    process = front.popen("logs", job, "--follow", stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("==> rank 0, attempt 1: ")
    assert process.stdout.readline() == "rank 0 of start 1\n"
    with open(front.run_dir / "attempts" / "0001" / "logs" / "rank-00000.log", "a") as log:
        log.write("a later line\n")
    assert process.stdout.readline() == "a later line\n"
    front.ok("cancel", job)
    assert process.communicate(timeout=100)[0] == ""


# ---- cancel


def test_a_job_is_cancelled_and_not_twice(front):
    job = front.submit("sleep")
    front.cluster.wait_state(job, "RUNNING")
    assert front.ok("cancel", "tiny") == f"tiny: job {job} was cancelled\n"
    assert front.cluster.job(job)["JobState"] == "CANCELLED"
    assert front.error_line("cancel", job) == f"tiny: job {job} is over (cancelled); see `rlhpc status`"
    assert state_of(front, job) == "cancelled"


def test_what_slurm_never_knew_is_not_said_to_be_cancelled(front):
    """scancel itself succeeds for an id that nobody has."""
    front.ok("cancel", front.submit("sleep"))
    record = json.loads((front.run_dir / "job.json").read_text())
    (front.run_dir / "job.json").write_text(json.dumps({**record, "job_id": "99999"}))
    assert front.error_line("cancel", str(front.run_dir)).startswith("tiny: Slurm no longer knows job 99999")


def test_ranks_are_asked_to_save_first(front):
    job = front.submit("work")
    wait((front.run_dir / "working").exists, "it works")
    assert "its ranks save after the current step and end" in front.ok("cancel", job, "--save")
    wait((front.run_dir / "signalled").exists, "the signal")
    assert (front.run_dir / "signalled").read_text() == "SIGUSR2"
    assert (front.run_dir / "stop-requested").is_file()
    assert front.cluster.wait_state(job, "COMPLETED"), "the batch step was left to end by itself"


def test_a_queued_job_has_nothing_to_save(front):
    job = front.submit("sleep", "slurm.sbatch_options.hold=true")
    assert "is held by you (JobHeldUser)" in front.ok("status", job)
    assert front.ok("cancel", job, "--save") == f"tiny: job {job} was cancelled\n"
    assert not (front.run_dir / "stop-requested").exists()


def test_an_array_is_cancelled_as_one_or_in_parts(front):
    configs = [str(write_inputs(front.folder / name)) for name in ("a", "b", "c")]
    words = ["--array", *configs, "--entry", "tests.slurm.jobs:sleep", "slurm.gpus_per_node=0"]
    array = front.ok("submit", *words).split()[2].partition("_")[0]
    front.ok("cancel", f"{array}_1")
    wait(lambda: sorted(front.queue()) == [f"{array}_0", f"{array}_2"], "one is gone")
    done = front.run("cancel", array)
    assert "job " + f"{array}_1 is over (cancelled)" in done.stderr
    wait(lambda: front.queue() == [], "all are gone")
