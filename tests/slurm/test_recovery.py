"""Every cause has its answer and its words, on a real Slurm, with small programs in place of the trainer."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.exits import read_exits, read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import beats_file, read_beats
from rlhpc.launch.supervise.diagnosis import Evidence, diagnose
from tests.helpers.cases import long_but
from tests.helpers.runs import ROOT, write_config
from tests.slurm.cluster import Cluster
from tests.slurm.scontrol import wait

pytestmark = pytest.mark.slurm


def submit(
    cluster: Cluster,
    folder: Path,
    program: str,
    *options: str,
    nodes: object = 2,
    ranks: int = 1,
    tokens: int = 16000,
    slurm: Mapping[str, object] | None = None,
    **recovery: object,
) -> int:
    """A job whose ranks run ``program`` of tests.slurm.programs; its id."""
    count = nodes if isinstance(nodes, int) else nodes[0]
    file = write_config(
        folder,
        slurm={"nodes": nodes, "gpus_per_node": 0, **(slurm or {})},
        recovery={"wait_seconds": 1, **recovery},
        resources__ranks_per_node=ranks,
        train__tokens_per_microbatch=tokens,
    )
    run = RunFolder(folder / "run").create()
    run.config.write_text(file.read_text())
    script = f"exec {sys.executable} -u -m rlhpc.launch.supervise.supervisor {run.path} tests.slurm.programs:{program}"
    known = [f"--nodes={count}", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={folder}/log"]
    return cluster.submit(*known, *options, script=script, cwd=ROOT)


def history(folder: Path) -> list[tuple[Attempt, Verdict | None]]:
    run = RunFolder(folder / "run")
    found = [(attempts.read_attempt(f), attempts.read_verdict(f)) for f in attempts.folders(run)]
    return [(attempt, verdict) for attempt, verdict in found if attempt is not None]


def wait_for_ranks(run: RunFolder) -> None:
    """Until the first start's ranks are at work."""

    def work() -> bool:
        folder = run.attempt(1).heartbeats
        beats = read_beats(folder) if beats_file(folder).exists() else {}
        return all(rank in beats and beats[rank].phase == "work" for rank in (0, 1))

    wait(work, "ranks at work")


def outcomes(folder: Path) -> list[tuple[str, str]]:
    """(cause, action) of every start."""
    return [(verdict.cause, verdict.action) if verdict else ("", "") for _, verdict in history(folder)]


def test_a_job_that_is_no_longer_the_run_s_leaves_it(cluster, tmp_path):
    """A later submission is; the folder is the same."""
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "full_disk", wait_seconds=4)
    wait(run.attempt(1).verdict.exists, "the first verdict")
    run.job.write_text('{"job_id": "987654"}')
    cluster.wait_state(job, "FAILED")
    assert outcomes(tmp_path) == [("disk_full", "retry")]
    words = f"this start of the job ends: this is job {job}, but {run.job} names job 987654 as the run's"
    assert words in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_job_that_the_run_does_not_name_begins_no_attempt(cluster, tmp_path):
    run = RunFolder(tmp_path / "run").create()
    run.job.write_text('{"job_id": "987654"}')
    cluster.wait_state(submit(cluster, tmp_path, "done"), "FAILED", timeout=150)
    assert history(tmp_path) == []
    assert "this start of the job ends: this is job " in (tmp_path / "log").read_text()


def test_out_of_memory_is_answered_by_smaller_micro_batches(cluster, tmp_path):
    job = submit(cluster, tmp_path, "too_large")
    cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("gpu_memory", "retry"), ("gpu_memory", "retry"), ("finished", "none")]
    first, second, third = (attempt.overrides for attempt, _ in history(tmp_path))
    assert (first, second) == ((), ("train.tokens_per_microbatch=8000",))
    assert third == ("train.tokens_per_microbatch=4000",)
    assert history(tmp_path)[0][1].rank == 1


def test_a_key_set_again_by_the_user_wins_over_recovery_s(cluster, tmp_path):
    for tokens, changes in ((16000, ("train.tokens_per_microbatch=4000",)), (4500, ())):
        job = submit(cluster, tmp_path, "too_large", tokens=tokens)
        cluster.wait_state(job, "COMPLETED")
        assert history(tmp_path)[-1][0].overrides == changes
    assert [attempt.number for attempt, _ in history(tmp_path)] == [1, 2, 3, 4]


def test_wrong_input_stops_at_once_with_its_line_and_exit_code(cluster, tmp_path):
    job = submit(cluster, tmp_path, "wrong_input")
    assert cluster.wait_state(job, "FAILED")["ExitCode"] == "2:0"
    assert outcomes(tmp_path) == [("user", "stop")]
    assert "rollout.tp: 8 is too many; use 4" in (tmp_path / "log").read_text()


def test_an_error_of_the_code_stops_with_its_traceback(cluster, tmp_path):
    job = submit(cluster, tmp_path, "wrong_code")
    cluster.wait_state(job, "FAILED")
    ((_, verdict),) = history(tmp_path)
    assert (verdict.cause, verdict.action, verdict.rank) == ("user", "stop", 1)
    assert "programs.py" in verdict.detail
    assert "KeyError: 'score'" in verdict.message


def test_a_bad_node_is_left_out_of_the_next_start(cluster, tmp_path):
    """In a job that may shrink at once; in another, by the queue."""
    shrinking = submit(cluster, tmp_path / "a", "bad_node", "--nodelist=node[1-3]", "--nodes=3", nodes=[2, 3])
    cluster.wait_state(shrinking, "COMPLETED")
    assert outcomes(tmp_path / "a") == [("bad_node", "retry"), ("finished", "none")]
    assert [attempt.nodes for attempt, _ in history(tmp_path / "a")] == [
        ("node1", "node2", "node3"),
        ("node1", "node3"),
    ]
    fixed = submit(cluster, tmp_path / "b", "bad_node")
    cluster.wait_state(fixed, "COMPLETED", restarts=1)
    assert outcomes(tmp_path / "b") == [("bad_node", "requeue"), ("finished", "none")]
    assert "node2" not in history(tmp_path / "b")[1][0].nodes


def test_a_node_that_does_not_see_the_run_folder_is_left_out(cluster, tmp_path):
    cluster.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], node="node2", check=True)
    try:
        job = submit(cluster, tmp_path, "done", "--nodelist=node[1-3]", "--nodes=3", nodes=[2, 3])
        cluster.wait_state(job, "COMPLETED")
    finally:
        cluster.run(["umount", str(tmp_path)], node="node2", check=True)
    assert outcomes(tmp_path) == [("bad_node", "retry"), ("finished", "none")]
    assert history(tmp_path)[0][1].node == "node2"


def test_a_node_that_lacks_what_ranks_need_is_named(cluster, tmp_path):
    """The rank looks before it imports anything heavy: here its node has no shared memory left."""
    cluster.run("fallocate -l $(df --output=avail -B1 /dev/shm | tail -1) /dev/shm/left", node="node2", check=True)
    try:
        options = ("--nodelist=node[1-3]", "--nodes=3", "--ntasks-per-node=2")
        job = submit(cluster, tmp_path, "done", *options, nodes=[2, 3], ranks=2)
        cluster.wait_state(job, "COMPLETED")
    finally:
        cluster.run("rm -f /dev/shm/left", node="node2", check=True)
    assert outcomes(tmp_path) == [("bad_node", "retry"), ("finished", "none")]
    verdict = history(tmp_path)[0][1]
    assert verdict.node == "node2"
    assert "MiB are free in /dev/shm" in verdict.message


def test_lost_connections_are_tried_again_with_growing_pauses(cluster, tmp_path):
    job = submit(cluster, tmp_path, "lost_connection")
    cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("network", "retry"), ("network", "retry"), ("finished", "none")]
    assert [verdict.wait_seconds for _, verdict in history(tmp_path)][:2] == [1.0, 2.0]


def test_a_full_disk_is_waited_for(cluster, tmp_path):
    """What the first rank meets here with nothing to write, `make chaos` meets on a disk that is really full."""
    job = submit(cluster, tmp_path, "full_disk")
    cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("disk_full", "retry"), ("finished", "none")]


@pytest.mark.long  # the bound itself: tests/launch/supervise/test_policy.py
def test_failures_in_a_row_are_bounded(cluster, tmp_path):
    job = submit(cluster, tmp_path, "dies", retries=2, bad_node="retry")
    cluster.wait_state(job, "FAILED")
    assert [action for _, action in outcomes(tmp_path)] == ["retry", "retry", "stop"]
    assert "3 attempts in a row without a newer checkpoint" in history(tmp_path)[-1][1].message
    assert history(tmp_path)[0][1].rank == 1


def test_a_hang_is_named_in_time_and_tried_again(cluster, tmp_path):
    silence = 8.0
    job = submit(cluster, tmp_path, "stuck", hang_timeout_seconds=silence)
    cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("hang", "retry"), ("finished", "none")]
    (first, verdict), _ = history(tmp_path)
    assert verdict.time - first.started >= silence
    assert "time.sleep" in verdict.detail or "programs.py" in verdict.detail


@pytest.mark.parametrize("how", long_but(("preempt",), ("requeue", "preempt", "signal")))
def test_ranks_stop_together_when_slurm_asks_and_go_on_later(cluster, tmp_path, how):
    job = submit(cluster, tmp_path, "work", "--nodelist=node1,node2")
    run = RunFolder(tmp_path / "run")
    wait_for_ranks(run)
    if how == "requeue":
        cluster.run(["scontrol", "requeue", str(job)], check=True)
    elif how == "preempt":
        cluster.submit("--partition=urgent", "--exclusive", "--nodelist=node1", script="sleep 1", cwd="/tmp")
    else:
        cluster.run(["scancel", "--signal=USR2", str(job)], check=True)
    cluster.wait_state(job, "RUNNING", restarts=1)
    assert {record.kind for record in read_exits(run.attempt(1).exits).values()} == {"stopped"}
    first = attempts.read_verdict(run.attempt(1))
    assert (first.cause, first.action) == {
        "requeue": ("requeued", "none"),
        "preempt": ("preempted", "requeue"),
        "signal": ("stopped", "requeue"),
    }[how]
    cluster.run(["scancel", str(job)])


def test_a_user_s_wish_to_stop_ends_the_job_for_good(cluster, tmp_path):
    job = submit(cluster, tmp_path, "work")
    run = RunFolder(tmp_path / "run")
    wait_for_ranks(run)
    run.stop_requested.touch()
    cluster.run(["scancel", "--signal=USR2", str(job)], check=True)
    cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("stopped", "none")]
    assert not run.stop_requested.exists()


@pytest.mark.long
def test_an_srun_that_outlives_its_ranks_is_ended(cluster, tmp_path):
    job = submit(cluster, tmp_path, "work")
    run = RunFolder(tmp_path / "run")
    wait_for_ranks(run)
    (node,) = {rank.node for rank in read_starts(run.attempt(1).exits).values() if rank.rank == 0}
    cluster.run("pkill -STOP -x srun", node=node, check=True)  # as strangers on its port keep it
    run.stop_requested.touch()
    for name in cluster.nodes:
        cluster.run("pkill -USR2 -f 'launch.worker'", node=name)
    cluster.wait_state(job, "COMPLETED", timeout=240)
    assert outcomes(tmp_path) == [("stopped", "none")]
    assert "srun does not end: it is killed" in (tmp_path / "log").read_text()


def status(cluster, folder: Path) -> str:
    command = [sys.executable, "-m", "rlhpc.cli.main", "status", str(folder / "run")]
    return cluster.run(command, env={"COLUMNS": "200"}, check=True).stdout


def test_a_cancelled_job_is_not_said_to_be_requeued(cluster, tmp_path):
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "dies_when_told")
    wait_for_ranks(run)
    cluster.run(["scancel", str(job)], check=True)
    cluster.wait_state(job, "CANCELLED")
    wait(run.attempt(1).verdict.exists, "the verdict")
    assert outcomes(tmp_path) == [("ended", "none")]
    assert "the job ended: Slurm ended the job: it was cancelled, or preempted" in status(cluster, tmp_path)


def test_a_requeue_that_slurm_refuses_is_not_said_to_be_one(cluster, tmp_path):
    """As with JobRequeue=0 of the site."""
    job = submit(cluster, tmp_path, "bad_node_once", "--no-requeue", "--nodelist=node1,node2")
    cluster.wait_state(job, "FAILED")
    assert outcomes(tmp_path) == [("bad_node", "stop")]
    shown = status(cluster, tmp_path)
    assert "; Slurm does not requeue this job; `rlhpc resume` continues the run -> stopped" in shown
    assert "requeued" not in shown
    assert "requeued" not in (tmp_path / "log").read_text()


def test_a_launcher_that_was_killed_is_not_said_to_be_a_requeue(cluster, tmp_path):
    run = RunFolder(tmp_path / "run")
    first = submit(cluster, tmp_path, "long_step", "--nodelist=node1,node2")
    wait_for_ranks(run)
    cluster.run("pkill -KILL -f launch.supervise.supervisor", node=history(tmp_path)[0][0].nodes[0], check=True)
    cluster.wait_state(first, "FAILED")
    cluster.wait_state(submit(cluster, tmp_path, "done"), "COMPLETED")
    assert outcomes(tmp_path) == [("ended", "none"), ("finished", "none")]
    assert f"the job ended: job {first} left no verdict: it was cancelled or out of time, " in status(cluster, tmp_path)


@pytest.mark.long
def test_a_job_that_was_suspended_past_its_end_goes_on(cluster, tmp_path):
    """Slurm moves the end of a job when it continues; the launcher was stopped meanwhile."""
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "work", "--time=1")
    wait_for_ranks(run)
    cluster.run(["scontrol", "suspend", str(job)], check=True)
    time.sleep(70)
    cluster.run(["scontrol", "resume", str(job)], check=True)
    time.sleep(15)
    assert attempts.read_verdict(run.attempt(1)) is None
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run(["scancel", str(job)])


@pytest.mark.parametrize(
    ("scenario", "rank", "what"),
    [
        ("native", 3, "is stuck in native code (native: "),  # Slurm carries the signal that writes its stack
        pytest.param("stopped", 2, "does not answer (stopped, or its node is out of reach", marks=pytest.mark.long),
    ],
)
def test_the_blocking_rank_on_another_node_is_named(cluster: Cluster, tmp_path, scenario, rank, what):
    folder = tmp_path / "heartbeats"
    command = [sys.executable, "-W", "ignore", "-m", "tests.launch.hanging", str(folder), scenario, "watch"]
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", script=shlex.join(command), cwd=ROOT)
    cluster.wait_state(job, {"COMPLETED", "FAILED"}, timeout=600)
    output = (cluster.folder / "log" / f"job-{job}.out").read_text()
    assert (folder / "found.json").exists(), output
    found, node, silence = json.loads((folder / "found.json").read_text())
    print((folder / "hang.txt").read_text())
    assert (found, node) == (rank, "node2")
    assert silence < 14
    first = (folder / "hang.txt").read_text().splitlines()[0]
    assert what in first
    assert first.endswith("while 3 ranks wait for it in all_reduce #4 of the default group")


# In the place of srun: at the first call the node loses its slurmd, and Slurm gives the node up.
SRUN = """#!/bin/bash
[ {moment} = after ] && /usr/bin/srun "$@"; code=$?
if [ ! -e {folder}/lost ]; then
    touch {folder}/lost
    kill -KILL $(cat {pids}/slurmd.$SLURMD_NODENAME)
    scontrol update NodeName=$SLURMD_NODENAME State=DOWN Reason=test
fi
[ {moment} = before ] && exec /usr/bin/srun "$@"; exit $code
"""


def submit_losing(cluster: Cluster, folder: Path, program: str, moment: str) -> int:
    """A job that loses its first node before or after its first srun; its id."""
    command = folder / "bin" / "srun"
    command.parent.mkdir()
    command.write_text(SRUN.format(moment=moment, folder=folder, pids=cluster.folder / "pids"))
    command.chmod(0o700)
    path = f"--export=ALL,PATH={command.parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    return submit(cluster, folder, program, path)


def test_srun_s_words_for_a_job_without_an_allocation_are_known(cluster):
    """States of jobs in the queue, of ended ones, and of jobs that never were."""
    held, ended = (cluster.submit("--hold", script="true") for _ in range(2))
    cluster.run(["scancel", str(ended)], check=True)
    for job in (held, ended, 987654):
        done = cluster.run(["srun", "--overlap", "hostname"], env={"SLURM_JOB_ID": str(job)})
        found = diagnose(Evidence(1, ("node1",), {}, done.stderr, done.returncode, 0.0))
        assert found.cause == "allocation_lost", done.stderr


@pytest.mark.long
def test_variables_of_the_job_that_has_submitted_this_one_take_nothing_away(cluster, tmp_path):
    """sbatch passes them on, and Slurm replaces only those that the new job has."""
    outer = "SLURM_RESTART_COUNT=2,SLURM_ARRAY_JOB_ID=987654,SLURM_ARRAY_TASK_ID=1"
    cluster.wait_state(submit(cluster, tmp_path, "done", f"--export=ALL,{outer}"), "COMPLETED")
    ((attempt, verdict),) = history(tmp_path)
    assert (attempt.restart_count, verdict.cause) == (0, "finished")


@pytest.mark.long
def test_a_launcher_left_behind_by_a_requeue_begins_no_attempt(cluster, tmp_path):
    """Its node has lost its slurmd, so that Slurm's SIGTERM does not reach it."""
    run, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    job = submit(cluster, tmp_path, "full_disk", wait_seconds=5)
    wait(run.attempt(1).verdict.exists, "the first verdict")
    node = history(tmp_path)[0][0].nodes[0]
    cluster.kill_slurmd(node)
    cluster.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)
    cluster.run(["scontrol", "hold", str(job)], check=True)
    wait(lambda: "this start of the job ends:" in log.read_text() or len(history(tmp_path)) > 1, "the launcher's end")
    assert "Slurm has requeued the job" in log.read_text()
    assert outcomes(tmp_path) == [("disk_full", "retry")]
    cluster.run(["scontrol", "release", str(job)], check=True)
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("disk_full", "retry"), ("finished", "none")]
    (_, first), (second, last) = history(tmp_path)
    assert second.restart_count >= 1, "Slurm may try the lost node again first"
    assert (first.failures, last.failures) == (1, 1)


@pytest.mark.long
def test_an_srun_that_finds_no_allocation_uses_up_no_attempt(cluster, tmp_path):
    job = submit_losing(cluster, tmp_path, "done", "before")
    wait(RunFolder(tmp_path / "run").attempt(1).verdict.exists, "the first verdict")
    assert outcomes(tmp_path) == [("allocation_lost", "none")]
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("allocation_lost", "none"), ("finished", "none")]
    assert history(tmp_path)[0][1].failures == 0
    assert "srun: error: " in history(tmp_path)[0][1].detail


@pytest.mark.long
def test_a_launcher_whose_run_is_taken_over_writes_no_verdict(cluster, tmp_path):
    """Its ranks end at the later attempt."""
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "work")
    wait_for_ranks(run)
    attempts.begin(run, job_id=str(job), restart_count=1, nodes=("node3",), world_size=1, saved_step=-1)
    cluster.wait_state(job, "FAILED")
    assert outcomes(tmp_path) == [("", ""), ("", "")]
    assert "allocation_lost: the requeued job has begun attempt 2 -> none" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_launcher_does_not_requeue_a_job_that_slurm_has_requeued(cluster, tmp_path):
    job = submit_losing(cluster, tmp_path, "bad_node_once", "after")
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("bad_node", "requeue"), ("finished", "none")]
    log = (tmp_path / "log").read_text()
    assert "this start of the job ends: Slurm has requeued the job" in log
    assert "asks Slurm to requeue" not in log


@pytest.mark.long
def test_a_launcher_without_network_waits_and_leaves_when_the_requeued_job_has_begun(cluster, tmp_path):
    run, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    job = submit(cluster, tmp_path, "full_disk", wait_seconds=5)
    wait(run.attempt(1).verdict.exists, "the first verdict")
    cluster.unplug(history(tmp_path)[0][0].nodes[0])
    cluster.wait_state(job, "COMPLETED", restarts=1)
    wait(lambda: "this start of the job ends: the requeued job has begun attempt 2" in log.read_text(), "its end")
    assert "waiting for Slurm's controller" in log.read_text()
    assert outcomes(tmp_path) == [("disk_full", "retry"), ("finished", "none")]
