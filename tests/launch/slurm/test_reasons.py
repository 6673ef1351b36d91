"""Queue reasons: what they mean, which key to change, and whether waiting helps."""

from __future__ import annotations

import pytest

from rlhpc.config.jobs import SlurmSection
from rlhpc.launch.slurm.queue import read_reason


@pytest.mark.parametrize(
    ("code", "kind", "key"),
    [
        ("", "waits", ""),
        ("None", "waits", ""),
        ("Priority", "waits", ""),
        ("Resources", "waits", ""),
        ("BeginTime", "waits", ""),
        ("Dependency", "waits", ""),
        ("Reservation", "waits", ""),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "waits", ""),
        ("ReqNodeNotAvail,_May_be_reserved_for_other_job", "waits", ""),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions", "waits", ""),
        ("JobArrayTaskLimit", "waits", ""),
        ("JobHeldUser", "held", ""),
        ("launch_failed_requeued_held", "held", ""),
        ("PartitionNodeLimit", "never", "slurm.nodes"),
        ("PartitionTimeLimit", "never", "slurm.time"),
        ("AccountNotAllowed", "never", "slurm.account"),
        ("InvalidAccount", "never", "slurm.account"),
        ("InvalidQOS", "never", "slurm.qos"),
        ("QOSNotAllowed", "never", "slurm.qos"),
        ("Job's_QOS_not_permitted_to_use_this_partition_(main_allows_high_not_normal)", "never", "slurm.qos"),
        ("BadConstraints", "never", "slurm.constraint"),
        ("DependencyNeverSatisfied", "never", "slurm.sbatch_options"),
        ("ReservationDeleted", "never", "slurm.reservation"),
        ("DeadLine", "never", "slurm.sbatch_options"),
        ("QOSMaxWallDurationPerJobLimit", "never", "slurm.time"),
        ("AssocMaxWallDurationPerJobLimit", "never", "slurm.time"),
        ("QOSMaxNodePerJobLimit", "never", "slurm.nodes"),
        ("QOSMaxCpuPerJobLimit", "never", "slurm.cpus_per_rank"),
        ("QOSMaxGRESPerJob", "never", "slurm.gpus_per_node"),
        ("MaxMemPerLimit", "never", "slurm.memory"),
        ("QOSMinGRES", "never", "slurm.gpus_per_node"),
        ("QOSMaxGRESPerUser", "limit", "slurm.gpus_per_node"),
        ("QOSMaxCpuPerUserLimit", "limit", "slurm.cpus_per_rank"),
        ("QOSMaxJobsPerUserLimit", "limit", ""),
        ("AssocGrpGRES", "limit", "slurm.gpus_per_node"),
        ("AssocGrpNodeLimit", "limit", "slurm.nodes"),
        ("AssocGrpCPUMinutesLimit", "limit", "slurm.time"),
        ("AssocMaxJobsLimit", "limit", ""),
        ("SomethingOfTheFuture", "waits", ""),
    ],
)
def test_reasons(code, kind, key):
    reason = read_reason(code)
    assert (reason.kind, reason.key) == (kind, key)
    assert reason.words
    name = key.removeprefix("slurm.")
    assert not key or key == "slurm" or name in SlurmSection.model_fields, "the key exists"


def test_a_reason_that_is_not_known_is_shown():
    assert read_reason("SomethingOfTheFuture").words == "waits (SomethingOfTheFuture)"


def test_nodes_that_are_missing_are_named():
    words = read_reason("ReqNodeNotAvail, UnavailableNodes:node[1-2]").words
    assert words == "waits for nodes that are down, drained or reserved (node[1-2])"


def test_a_shared_limit_says_whose():
    assert read_reason("QOSMaxGRESPerUser").words == "waits: its QoS limits the GPUs of all your jobs together"
    assert read_reason("AssocGrpNodeLimit").words == "waits: its account limits the nodes of all jobs that share it"
