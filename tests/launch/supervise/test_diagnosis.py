"""Causes, from records and from srun's words as they were seen on Slurm 22.05."""

from __future__ import annotations

import pytest

from rlhpc.core.exits import ExitRecord, Kind
from rlhpc.launch.supervise.diagnosis import Evidence, diagnose, reports_failed_rank
from rlhpc.launch.supervise.hang_watch import Hang

SEEN = 1000.0


def end(rank: int, kind: Kind, type_: str = "", message: str = "", time: float = 900.0) -> ExitRecord:
    return ExitRecord(rank, f"node{rank // 2 + 1}", 7, time, kind, type_, message, f"Traceback … {type_}")


def evidence(
    *ends: ExitRecord, output: str = "", code: int = 1, world_size: int = 4, hang: Hang | None = None
) -> Evidence:
    return Evidence(world_size, ("node1", "node2"), {record.rank: record for record in ends}, output, code, SEEN, hang)


def test_all_done_is_finished():
    assert diagnose(evidence(*(end(rank, "done") for rank in range(4)), code=0)).cause == "finished"


def test_an_agreed_stop_keeps_its_reason():
    """Where the last step was done too, not all ranks say so."""
    ends = [end(0, "done"), *(end(rank, "stopped", message="deadline") for rank in range(1, 4))]
    found = diagnose(evidence(*ends, code=0))
    assert (found.cause, found.stopped) == ("stopped", "deadline")


def test_a_rank_that_ended_before_others_had_done_their_work_is_named():
    """An engine that ends while trainers still need it: they only lose it."""
    lost = [end(rank, "peer", "PeerLost", "lost rank 3: Connection closed by peer", 901.0) for rank in (0, 1, 2)]
    found = diagnose(evidence(end(3, "done", time=900.0), *lost))
    assert found.cause == "network"
    assert found.message.endswith("closed by peer (rank 3 had ended before, without an error)")
    assert "had ended" not in diagnose(evidence(end(3, "done", time=902.0), *lost)).message


def test_a_stop_that_one_rank_did_not_finish_is_a_crash():
    """Three say they stopped, the fourth was killed while it saved: that is no agreed stop."""
    ends = [end(rank, "stopped", message="deadline") for rank in range(3)]
    found = diagnose(evidence(*ends, output="srun: error: node2: task 3: Killed\n"))
    assert (found.cause, found.rank, found.node) == ("crash", 3, "node2")


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (end(1, "user", "UserError", "rollout.tp: 3 engines; use 2"), "user"),
        (end(1, "user", "UserError", "data.train.0: line 3 is no JSON"), "data"),
        (end(1, "user", "UserError", "/r/x: cannot save a checkpoint (No space left on device); free"), "disk_full"),
        (end(1, "user", "NodeError", "node node1: /tmp is not writable"), "bad_node"),
        (end(1, "user", "StoreError", "node node1: the job's store at node1:20000: no connection"), "bad_node"),
        (end(1, "error", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), "gpu_memory"),
        (
            end(1, "error", "NonFiniteError", "rl step 3: 3 update(s) in a row, /r/no space left on device/x"),
            "non_finite",
        ),
        (end(1, "error", "StrangerError", "1 connection to 10.0.0.1:5000, from 10.0.0.9:7"), "stranger"),
        (end(1, "error", "MemoryError", ""), "cpu_memory"),
        (end(1, "error", "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried"), "cpu_memory"),
        (end(1, "error", "OSError", "[Errno 28] No space left on device: '/r/metrics.jsonl'"), "disk_full"),
        (end(1, "error", "OSError", "[Errno 122] Disk quota exceeded"), "disk_full"),
        (end(1, "error", "StorageError", "[Errno 110] Connection timed out (for 300 s): '/r/x'"), "storage"),
        (end(1, "error", "OSError", "[Errno 116] Stale file handle: '/r/checkpoints'"), "storage"),
        (end(1, "user", "UserError", "data.train.0: cannot be read ([Errno 5] Input/output error)"), "storage"),
        (
            end(1, "user", "NodeError", "node node1: the run folder '/r' is not writable (Read-only file system)"),
            "bad_node",
        ),
        (end(1, "error", "RuntimeError", "CUDA error: uncorrectable ECC error encountered"), "bad_node"),
        (end(1, "error", "KeyError", "'score'"), "user"),
        (end(1, "error", "ZeroDivisionError", "division by zero"), "user"),
        (end(1, "error", "RuntimeError", "something went wrong inside"), "crash"),
        (end(1, "peer", "DistBackendError", "NCCL error: remote process exited"), "network"),
        (end(1, "peer", "RuntimeError", "[gloo] Connection closed by peer [10.0.0.2]:4242"), "network"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.message[:24],
)
def test_a_rank_s_own_record_says_the_cause(record, cause):
    others = [end(rank, "peer", "RuntimeError", "Connection closed by peer", 901.0) for rank in (0, 2, 3)]
    found = diagnose(evidence(record, *others))
    assert (found.cause, found.rank, found.node) == (cause, 1, "node1")


def test_srun_names_the_rank_that_was_killed_first():
    """The others have lost it, and were killed by srun a moment later."""
    output = (
        "srun: error: node2: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=5.0\n"
        "srun: error: node1: tasks 0-1: Terminated\n"
    )
    found = diagnose(evidence(end(2, "peer", "RuntimeError", "Connection closed by peer"), output=output, code=137))
    assert (found.cause, found.rank, found.node, found.message) == ("crash", 3, "node2", "Killed")


@pytest.mark.parametrize("ended", ["Terminated", "Killed"])
def test_ranks_that_srun_ended_after_another_s_failure_are_not_to_blame(ended):
    """They were still starting, or deep in C, and left no record."""
    output = f"srun: error: node1: task 1: Exited with exit code 1\nsrun: error: node2: tasks 2-3: {ended}\n"
    lost = end(1, "peer", "RuntimeError", "Connection closed by peer")
    found = diagnose(evidence(lost, end(0, "done"), output=output))
    assert (found.cause, found.rank, found.node) == ("network", 1, "node1")


def test_a_rank_that_crashed_is_to_blame_also_where_srun_spoke_of_a_victim_first():
    output = "srun: error: node1: task 1: Exited with exit code 1\nsrun: error: node2: task 2: Segmentation fault\n"
    found = diagnose(evidence(end(1, "peer", "RuntimeError", "Connection closed by peer"), output=output))
    assert (found.cause, found.rank, found.message) == ("crash", 2, "Segmentation fault")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("srun: error: node2: task 3: Killed\n", True),
        ("srun: error: tasks 0-1 launch failed: Slurmd could not connect IO\n", True),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", False),
    ],
)
def test_srun_s_word_of_a_rank_that_failed(output, expected):
    assert reports_failed_rank(output) is expected


def test_the_kernel_ending_a_rank_for_want_of_memory_is_seen():
    output = (
        "slurmstepd-node2: error: Detected 1 oom_kill event in StepId=9.0. Some of the tasks have been OOM Killed.\n"
        "srun: error: node2: task 2: Out Of Memory\n"
    )
    found = diagnose(evidence(output=output))
    assert (found.cause, found.rank, found.node) == ("cpu_memory", 2, "node2")


@pytest.mark.parametrize(("code", "cause"), [(74, "disk_full"), (75, "storage")])
def test_a_disk_on_which_no_record_can_be_left_is_reported_by_the_exit_code(code, cause):
    output = f"srun: error: node1: task 0: Exited with exit code {code}\nsrun: error: node1: task 1: Terminated\n"
    assert diagnose(evidence(output=output)).cause == cause


def test_a_failed_node_is_slurm_s_to_leave_out():
    found = diagnose(evidence(output="srun: error: Node failure on node2\nsrun: Force Terminated StepId=2.0\n"))
    assert (found.cause, found.node, found.message) == ("requeued", "node2", "node node2 failed")


def test_a_node_that_refuses_ranks_is_at_fault():
    """Seen when the ranks were started again before Slurm had noticed that the node was lost."""
    output = "srun: error: Task launch for StepId=1.1 failed on node node2: Job credential expired\n"
    found = diagnose(evidence(output=output))
    assert (found.cause, found.node) == ("bad_node", "node2")


def test_a_rank_lost_with_its_node_is_reported_by_its_place():
    """srun has no word for it, the peers have lost their connection."""
    ends = [end(rank, "peer", "RuntimeError", "Connection closed by peer") for rank in (0, 1, 2)]
    output = "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: Timed out waiting for job step\n"
    found = diagnose(evidence(*ends, output=output))
    assert (found.cause, found.rank, found.node) == ("crash", 3, "node2")


def test_ranks_that_never_started_are_a_failed_launch():
    found = diagnose(evidence(output="srun: error: Unable to create step for job 5: Requested nodes are busy\n"))
    assert found.cause == "launch"
    assert found.message.startswith("srun: error: Unable to create step")


@pytest.mark.parametrize(
    "message",
    [
        "Unable to confirm allocation for job 5: Job is pending execution",
        "Unable to confirm allocation for job 5: Invalid job id specified",
        "Slurm job 5 has expired",
        "Unable to create step for job 5: Job/step already completing or completed",
        "Unable to create step for job 5: Invalid job id specified",
        "Job allocation 5 has been revoked",
        "Task launch for StepId=5.1 failed on node node2: Job credential revoked",
    ],
)
def test_an_allocation_that_is_gone_is_no_failed_launch(message):
    output = f"srun: error: {message}\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 5\n"
    found = diagnose(evidence(output=output))
    assert (found.cause, found.message, found.rank) == ("allocation_lost", f"srun: error: {message}", -1)
    assert diagnose(evidence(output=output), has_allocation=True).cause in ("launch", "bad_node")


@pytest.mark.parametrize(
    "message",
    [
        "Unable to confirm allocation for job 5: Unable to contact slurm controller (connect failure)",
        "Unable to create step for job 5: Requested node configuration is not available",
        "Job 5 step creation temporarily disabled, retrying (Requested nodes are busy)",
    ],
)
def test_a_launch_that_fails_in_an_allocation_of_its_own_is_not_a_lost_one(message):
    assert diagnose(evidence(output=f"srun: error: {message}\n")).cause == "launch"


def test_a_node_that_cannot_start_its_ranks_is_named():
    """Seen where the run folder is not mounted: the other ranks start and wait."""
    found = diagnose(evidence(output="srun: error: task 2 launch failed: Slurmd could not connect IO\n"))
    assert (found.cause, found.rank, found.node) == ("bad_node", 2, "node2")


def test_a_hang_comes_before_what_its_ending_did_to_the_ranks():
    hang = Hang(3, "node2", "rank 3 on node2 sleeps", "the report")
    found = diagnose(evidence(output="srun: error: node1: tasks 0-3: Killed\n", hang=hang))
    assert (found.cause, found.rank, found.node, found.message) == ("hang", 3, "node2", "rank 3 on node2 sleeps")


def unreachable(rank: int, time: float = 900.0) -> ExitRecord:
    return end(rank, "user", "StoreError", f"node node{rank // 2 + 1}: the job's store at node1:20000: no route", time)


def test_a_node_that_alone_cannot_reach_the_store_is_at_fault():
    found = diagnose(evidence(unreachable(2), world_size=6, output="srun: error: node1: task 0: Killed\n"))
    assert (found.cause, found.node, found.rank) == ("bad_node", "node2", 2)
    assert found.message == "node node2: the job's store at node1:20000: no route"


def test_the_first_node_is_at_fault_if_several_cannot_reach_its_store():
    found = diagnose(evidence(unreachable(4, 901.0), unreachable(2), world_size=6))
    assert (found.cause, found.node, found.rank) == ("bad_node", "node1", -1)
    assert found.message == "2 nodes cannot reach node1: node node2: the job's store at node1:20000: no route"
