"""Output of squeue, scontrol and sacct in the forms of several versions, and reasons of a queue."""

from datetime import datetime

import pytest

from rlhpc.config.jobs import SlurmSection
from rlhpc.launch.slurm.queue import parse_sacct, parse_scontrol, parse_squeue, read_reason

START = datetime(2026, 11, 21, 11, 16, 43).timestamp()

# Slurm 22.05.8, as printed: one job, elements of an array, a requeued job, jobs that are over.
SQUEUE = """\
1|PENDING|N/A|N/A|10:00||PartitionNodeLimit
2_0|PENDING|2026-11-21T11:16:43|2026-11-21T11:26:43|10:00||Resources
2_10|RUNNING|2026-11-21T11:16:43|2026-11-22T11:16:43|1-00:00:00|node[1-2]|None
3|RUNNING|2026-11-21T11:16:43|N/A|UNLIMITED|node4|None
4|PENDING|2026-11-21T11:16:43|N/A|9:59||BeginTime
5|CANCELLED|2026-11-21T11:16:43|2026-11-21T11:16:43|10:00||None
6|PENDING|N/A|N/A|10:00||Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
7|COMPLETING|2026-11-21T11:16:43|2026-11-21T11:16:43|10:00|node1|None
slurm_load_jobs error: Unexpected message received
"""
# 22.05.8, as printed.
SCONTROL_22 = (
    "JobId=14 JobName=tiny UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:04:30 TimeLimit=00:10:00 TimeMin=N/A SubmitTime=2026-11-21T11:16:43 EligibleTime=2026-11-21T11:16:43 "
    "AccrueTime=Unknown StartTime=2026-11-21T11:16:43 EndTime=2026-11-21T11:26:43 Deadline=N/A SuspendTime=None "
    "SecsPreSuspend=0 LastSchedEval=2026-11-21T11:16:43 Scheduler=Main Partition=main AllocNode:Sid=localhost:0 "
    "ReqNodeList=(null) ExcNodeList=node4 NodeList=node[1-2] BatchHost=node1 NumNodes=2 NumCPUs=4 NumTasks=4 "
    "CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=4,mem=1G,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=2:0:*:* "
    "CoreSpec=* MinCPUsNode=2 MinMemoryCPU=256M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/runs/a b/submission/14_submission.sh "
    "WorkDir=/runs/a b Comment=JobState=FAILED of a friend StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= "
)
# 20.11 and older lack AccrueTime and Scheduler; an array's element says its ids.
SCONTROL_20 = (
    "JobId=71 ArrayJobId=70 ArrayTaskId=3 JobName=tiny UserId=alice(7001) GroupId=alice(7001) MCS_label=N/A "
    "Priority=5487 Nice=0 Account=p QOS=normal JobState=PENDING Reason=QOSMaxJobsPerUserLimit Dependency=(null) "
    "Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=2-00:00:00 TimeMin=N/A "
    "StartTime=Unknown EndTime=Unknown Deadline=N/A NodeList=(null) NumNodes=1-1"
)
# 23.02 and later tell requested and allocated resources apart; 25.11 shows the command line too.
SCONTROL_25 = (
    "JobId=9 JobName=tiny UserId=alice(7001) GroupId=alice(7001) MCS_label=N/A Priority=4294901750 Nice=0 Account=p "
    "QOS=normal JobState=COMPLETED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:07 TimeLimit=00:10:00 TimeMin=N/A StartTime=2026-11-21T11:16:43 "
    "EndTime=2026-11-21T11:16:50 Deadline=N/A PreemptEligibleTime=2026-11-21T11:16:43 PreemptTime=None "
    "NodeList=b-cn[1703,1705] NumNodes=2 ReqTRES=cpu=12,mem=30192M,node=1,billing=12 "
    "AllocTRES=cpu=12,mem=30192M,node=2,billing=12 SubmitLine=sbatch --export=ALL,JobState=X JobState=FAILED run.sh"
)
SACCT = """\
8|CANCELLED by 7001|2026-11-21T11:16:43|2026-11-21T11:16:50|None assigned|0:0|None
9|FAILED|2026-11-21T11:16:43|2026-11-21T11:16:50|node[1-2]|2:0|None
9_1|NODE_FAIL|2026-11-21T11:16:43|2026-11-21T11:16:50|node1|0:0|
9_[2-4]|PENDING|Unknown|Unknown|None assigned|0:0|Priority
10|REQUEUED|2026-11-21T11:16:43|2026-11-21T11:16:50|node1|0:0|
10|COMPLETED|2026-11-21T11:16:43|2026-11-21T11:16:50|node1|0:0|
"""


def test_squeue():
    jobs = parse_squeue(SQUEUE)
    assert list(jobs) == ["1", "2_0", "2_10", "3", "4", "5", "6", "7"]
    assert (jobs["1"].queued, jobs["1"].reason, jobs["1"].start, jobs["1"].time_left) == (
        True,
        "PartitionNodeLimit",
        None,
        None,
    )
    assert (jobs["2_0"].start, jobs["2_0"].words) == (START, "queued")
    assert (jobs["2_10"].nodes, jobs["2_10"].time_left, jobs["2_10"].reason) == ("node[1-2]", 86400, "")
    assert jobs["3"].time_left is None
    assert jobs["4"].why.words == "waits for its earliest start time, as after a requeue"
    assert (jobs["5"].live, jobs["5"].words) == (False, "cancelled")
    assert jobs["6"].why.kind == "waits"
    assert jobs["7"].live


def test_scontrol_of_22_05():
    (job,) = parse_scontrol(SCONTROL_22).values()
    assert (job.job_id, job.state, job.reason, job.restarts) == ("14", "RUNNING", "", 2)
    assert (job.start, job.end, job.time_left) == (START, START + 600, 330)
    assert (job.nodes, job.exit_code, job.source) == ("node[1-2]", "0:0", "scontrol")


def test_a_job_that_gets_a_signal_is_running():
    (job,) = parse_scontrol(SCONTROL_22.replace("JobState=RUNNING", "JobState=SIGNALING")).values()
    assert (job.state, job.time_left) == ("RUNNING", 330)
    line = SQUEUE.splitlines()[2].replace("RUNNING", "SIGNALING")
    assert parse_squeue(line)["2_10"].time_left == 86400


def test_scontrol_of_20_11_with_an_array():
    (job,) = parse_scontrol(SCONTROL_20).values()
    assert (job.job_id, job.state, job.reason, job.nodes) == ("70_3", "PENDING", "QOSMaxJobsPerUserLimit", "")
    assert (job.start, job.end, job.time_left) == (None, None, None)


def test_scontrol_of_25_11_is_not_misled_by_the_command_line():
    (job,) = parse_scontrol(SCONTROL_25).values()
    assert (job.state, job.nodes, job.live) == ("COMPLETED", "b-cn[1703,1705]", False)


def test_scontrol_of_an_unknown_job():
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified\n") == {}


def test_sacct():
    jobs = parse_sacct(SACCT)
    assert list(jobs) == ["8", "9", "9_1", "10"]
    assert (jobs["8"].state, jobs["8"].nodes) == ("CANCELLED", "")
    assert (jobs["9"].exit_code, jobs["9"].nodes) == ("2:0", "node[1-2]")
    assert jobs["9_1"].words == "node failed"
    assert jobs["10"].state == "COMPLETED", "the last line of a requeued job counts"


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
