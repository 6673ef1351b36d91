"""What Slurm 23.11 to 25.11 prints and sets, in the forms that public pages show, with values of our own.

None of these versions was run here. Sources:
- scontrol: https://github.com/OSC/ood_core/pull/879, https://github.com/ROCm/spur/pull/761 (25.11),
  https://github.com/NordicHPC/sonar/issues/441 (ReqTRES in place of TRES)
- states: https://slurm.schedmd.com/job_state_codes.html; as an array of JSON from 23.11 on:
  https://github.com/omnivector-solutions/jobbergate/pull/722
- gres: https://slurm.schedmd.com/gres.html (MIG, AutoDetect's names), https://slurm.schedmd.com/sinfo.html
- variables: https://slurm.schedmd.com/sbatch.html, https://github.com/FairRootGroup/DDS/issues/490 (srun's error)
- sacct: https://slurm.schedmd.com/sacct.html
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.launch.runs.direct import JobShape
from rlhpc.launch.slurm.job_spec import check_job_binding
from rlhpc.launch.slurm.partitions import parse_partitions
from rlhpc.launch.slurm.queue import parse_sacct, parse_scontrol, parse_squeue
from rlhpc.launch.supervise.allocation import why_ending, why_moved
from rlhpc.launch.supervise.srun import srun_environment
from tests.helpers.plain_model import write_inputs

START = datetime(2026, 11, 21, 11, 16, 43).timestamp()
SCONTROL = (
    "JobId=4711 JobName=my-run UserId=alice(7001) GroupId=alice(7001) MCS_label=N/A Priority=300000538 Nice=0 "
    "Account=project QOS=normal JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:04:30 TimeLimit=00:10:00 TimeMin=N/A SubmitTime=2026-11-21T11:16:00 "
    "EligibleTime=2026-11-21T11:16:00 AccrueTime=2026-11-21T11:16:00 StartTime=2026-11-21T11:16:43 "
    "EndTime=2026-11-21T11:26:43 Deadline=N/A PreemptEligibleTime=2026-11-21T11:16:43 PreemptTime=None "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-21T11:16:43 Scheduler=Backfill Partition=gpu "
    "AllocNode:Sid=login02:584004 ReqNodeList=(null) ExcNodeList=(null) NodeList=gpu[014-015] "
    "SchedNodeList=gpu[014-015] BatchHost=gpu014 StepMgrEnabled=Yes NumNodes=2 NumCPUs=192 NumTasks=16 CPUs/Task=12 "
    "ReqB:S:C:T=0:0:*:* ReqTRES=cpu=192,mem=1800G,node=2,billing=192,gres/gpu=16,gres/gpu:h100=16 "
    "AllocTRES=cpu=192,mem=1800G,node=2,billing=192,gres/gpu=16,gres/gpu:h100=16 Socks/Node=* NtasksPerN:B:S:C=8:0:*:* "
    "CoreSpec=* MinCPUsNode=96 MinMemoryNode=900G MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) LicensesAlloc=(null) Network=(null) Command=/runs/a/run.sh "
    "SubmitLine=sbatch --export=ALL,JobState=FAILED run.sh WorkDir=/runs/a StdErr= StdIn=/dev/null "
    "StdOut=/runs/a/%j.out TresPerNode=gres/gpu:h100:8 TresPerTask=cpu=12 OOMKillStep=0"
)
SACCT = """\
4711|CANCELLED by 0|2026-11-21T11:16:43|2026-11-21T11:16:50|gpu[014-015]|0:15|None
4712|OUT_OF_MEMORY|2026-11-21T11:16:43|2026-11-21T11:16:50|gpu014|0:125|OutOfMemory
4713|NODE_FAIL|2026-11-21T11:16:43|2026-11-21T11:16:50|gpu014|1:0|NodeDown
4714_3|PENDING|Unknown|Unknown|None assigned|0:0|Priority
"""
SINFO = """\
gpu*|up|2-00:00:00|16|96|1031000|h100,ib|1-infinite|gpu:nvidia_h100_80gb_hbm3:8(S:0-1)
mig|up|12:00:00|2|64|512000|a100|1-4|gpu:nvidia_a100_1g.5gb:14(S:0-1),gpu:nvidia_a100_3g.20gb:2(S:2,7)
"""


def test_scontrol():
    (job,) = parse_scontrol(SCONTROL.format(state="RUNNING")).values()
    assert (job.job_id, job.state, job.reason, job.restarts) == ("4711", "RUNNING", "", 2)
    assert (job.start, job.end, job.time_left) == (START, START + 600, 330)
    assert (job.nodes, job.exit_code) == ("gpu[014-015]", "0:0")


def test_what_the_supervisor_reads_of_it():
    line = SCONTROL.format(state="RUNNING")
    assert why_moved(line, 2, "gpu014") == ""
    assert why_moved(line, 1, "gpu014") == "Slurm has requeued the job (restart 2, this is 1)"
    assert why_moved(line, 2, "gpu015") == "Slurm has started the job on gpu014"
    assert why_ending(line) == ""
    assert why_ending(SCONTROL.format(state="CANCELLED,COMPLETING")) == "Slurm is ending the job"


@pytest.mark.parametrize(
    ("text", "state", "live"),
    [
        ("RUNNING", "RUNNING", True),
        ('["RUNNING"]', "RUNNING", True),
        ('["RUNNING", "COMPLETING"]', "COMPLETING", True),
        ("RUNNING,CONFIGURING,POWER_UP_NODE", "CONFIGURING", True),
        ("POWER_UP_NODE", "CONFIGURING", True),
        ("PENDING,LAUNCH_FAILED", "PENDING", True),
        ('["PENDING", "REQUEUED"]', "REQUEUED", True),
        ("PENDING,SPECIAL_EXIT", "SPECIAL_EXIT", True),
        ("RUNNING,SIGNALING", "RUNNING", True),
        ("SIGNALING", "RUNNING", True),
        ("RUNNING,UPDATE_DB", "RUNNING", True),
        ("EXPEDITING", "PENDING", True),
        ("COMPLETED,UPDATE_DB", "COMPLETED", False),
        ('["FAILED", "LAUNCH_FAILED"]', "FAILED", False),
        ("CANCELLED by 7001", "CANCELLED", False),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", False),
        ("", "UNKNOWN", False),
    ],
)
def test_states_with_flags(text, state, live):
    job = parse_squeue(f"7|{text}|2026-11-21T11:16:43|N/A|10:00|gpu014|None")["7"]
    assert (job.state, job.live) == (state, live)


def test_sacct():
    jobs = parse_sacct(SACCT)
    found = {job_id: (job.state, job.exit_code, job.reason) for job_id, job in jobs.items()}
    assert found == {
        "4711": ("CANCELLED", "0:15", ""),
        "4712": ("OUT_OF_MEMORY", "0:125", "OutOfMemory"),
        "4713": ("NODE_FAIL", "1:0", "NodeDown"),
        "4714_3": ("PENDING", "0:0", "Priority"),
    }
    assert jobs["4714_3"].nodes == ""


def test_sinfo_with_names_of_autodetect():
    gpu, mig = parse_partitions(SINFO)
    assert gpu.gpus == (("nvidia_h100_80gb_hbm3", 8),)
    assert mig.gpus == (("nvidia_a100_1g.5gb", 14), ("nvidia_a100_3g.20gb", 2))


@pytest.mark.parametrize(
    ("gpus", "count"), [("8", 8), ("nvidia_h100_80gb_hbm3:8", 8), ("nvidia_a100_1g.5gb:7", 7), ("1g.10gb:4", 4)]
)
def test_gpus_of_a_plain_script_s_job(gpus, count):
    environ = {env.SLURM_JOB_NUM_NODES: "1", env.SLURM_GPUS_PER_NODE: gpus}
    assert JobShape.from_environ(environ).gpus_per_node == count


@pytest.mark.parametrize("cores", ["cpu:12", "cpu=12"])
def test_cores_of_the_job_do_not_contradict_those_of_the_ranks(cores, tmp_path: Path, monkeypatch):
    """srun: fatal: cpus_per_task set by two different environment variables …"""
    monkeypatch.setenv(env.SLURM_TRES_PER_TASK, cores)
    config = load_config(write_inputs(tmp_path), ["slurm.cpus_per_rank=4", "resources.ranks_per_node=2"])
    check_job_binding(config, {env.SLURM_TRES_PER_TASK: cores})
    found = srun_environment(config, 4, "node1", (20042, b"\x01"), 20777)
    assert env.SLURM_TRES_PER_TASK not in found
    assert found[env.SRUN_CPUS_PER_TASK] == "4"
