"""What a test cluster is made of: its size, and the text of every file it needs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.slurm import accounting

NETWORK = "10.77.0"  # the same in every cluster: each has a network of its own
LOGIN = "login"
USERS: Mapping[str, int] = {"alice": 7001, "bob": 7002}  # known inside the cluster only


@dataclasses.dataclass(frozen=True)
class Settings:
    """Size and habits of a cluster. Timeouts are short: a test waits for them."""

    nodes: int = 4
    cpus: int = 8  # per node; more than the machine has is fine
    memory_mb: int = 8000  # per node
    gpus: int = 0  # per node: device files without a device behind them, for Slurm's bookkeeping
    accounting: bool = False  # with mariadb and slurmdbd
    cred_expire: int = 5  # seconds, not less; also the shortest wait before a requeued job starts again
    grace_time: int = 10  # seconds between the first signal of a preemption and the end
    kill_wait: int = 5  # seconds between SIGTERM and SIGKILL
    slurmd_timeout: int = 10  # seconds without an answer until a node is down
    message_timeout: int = 10  # seconds for an answer. With 3 a dead node is down after 10 s, with 10 after 30 s
    min_job_age: int = 300  # seconds for which a finished job is remembered
    skewed: tuple[str, int] | None = None  # a node, and seconds by which its clock is fast for tasks of steps
    extra_conf: str = ""  # lines for slurm.conf
    host_name: str = "{node}"  # of a node by its name in Slurm, from which it may differ

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    def host_of(self, node: str) -> str:
        """Host name of a node."""
        return self.host_name.format(node=node)


def address(name: str) -> str:
    return f"{NETWORK}.254" if name == LOGIN else f"{NETWORK}.{name.removeprefix('node')}"


def slurm_conf(settings: Settings, folder: Path) -> str:
    all_nodes = f"node[1-{settings.nodes}]"
    gres = f" Gres=gpu:h100:{settings.gpus}" if settings.gpus else ""
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={LOGIN}({address(LOGIN)})",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket,cred_expire={settings.cred_expire}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/pids/slurmctld",
        f"SlurmdPidFile={folder}/pids/slurmd.%n",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=1",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "DefMemPerCPU=256",
        "SlurmdParameters=config_overrides",  # nodes may claim more CPUs than the machine has
        "MpiDefault=none",
        "MailProg=/bin/true",
        "ReturnToService=2",
        f"KillWait={settings.kill_wait}",
        f"SlurmdTimeout={settings.slurmd_timeout}",
        f"MessageTimeout={settings.message_timeout}",
        f"MinJobAge={settings.min_job_age}",
        "UnkillableStepTimeout=30",
        "SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PriorityType=priority/multifactor",
        *(["GresTypes=gpu"] if settings.gpus else []),
        *(accounting.slurm_conf(folder, address(LOGIN)) if settings.accounting else []),
        f"NodeName={all_nodes} NodeAddr={NETWORK}.[1-{settings.nodes}] CPUs={settings.cpus}"
        f" RealMemory={settings.memory_mb}{gres}",
        f"PartitionName=main Nodes={all_nodes} Default=YES MaxTime=1-0 DefaultTime=55 PriorityTier=1 State=UP"
        f" GraceTime={settings.grace_time}",
        f"PartitionName=urgent Nodes={all_nodes} MaxTime=1-0 DefaultTime=55 PriorityTier=10 PreemptMode=OFF State=UP",
        *([f"TaskProlog={folder}/slurm/clock/clock.sh"] if settings.skewed else []),
        settings.extra_conf,
    ]
    return "\n".join(lines) + "\n"


def clock(node: str, seconds: int, folder: Path) -> dict[str, str]:
    """Files of a script before each task, by which Python programs on one node see another time. Files have the true
    one: a preloaded library that shifts all clocks would shift the ends of waits as well."""
    script = [
        "#!/bin/sh",
        f'if [ "$SLURMD_NODENAME" = {node} ]; then',
        f'    echo "export PYTHONPATH={folder}:$PYTHONPATH"',
    ]
    program = [
        "import time",
        f"time.time = lambda true=time.time: true() + {seconds}",
        f"time.time_ns = lambda true=time.time_ns: true() + {seconds} * 10**9",
    ]
    return {"clock.sh": "\n".join([*script, "fi", ""]), "sitecustomize.py": "\n".join([*program, ""])}


def gres_conf(settings: Settings, folder: Path) -> str:
    """Slurm accepts device files only: neither plain files nor a bare count."""
    return f"NodeName=node[1-{settings.nodes}] Name=gpu Type=h100 File={folder}/dev/gpu[0-{settings.gpus - 1}]\n"


def hosts(settings: Settings) -> str:
    known = {LOGIN: [LOGIN]} | {
        node: list(dict.fromkeys([node, settings.host_of(node)])) for node in settings.node_names
    }
    named = [f"{address(name)} {' '.join(names)}" for name, names in known.items()]
    return "\n".join(["127.0.0.1 localhost", *named]) + "\n"


def etc_files(settings: Settings, folder: Path) -> dict[str, str]:
    """Files that lie over the machine's own in /etc inside the cluster, by name."""
    homes = [f"{name}:x:{uid}:{uid}::{home(folder, name)}:/bin/bash" for name, uid in USERS.items()]
    groups = [f"{name}:x:{uid}:" for name, uid in USERS.items()]
    return {
        "hosts": hosts(settings),
        # No DNS: a reverse lookup of a node's address would wait tens of seconds for an answer.
        "nsswitch.conf": "".join(f"{database}: files\n" for database in ("passwd", "group", "shadow", "hosts")),
        "passwd": Path("/etc/passwd").read_text() + "\n".join(homes) + "\n",
        "group": Path("/etc/group").read_text() + "\n".join(groups) + "\n",
    }


def home(folder: Path, user: str) -> Path:
    return folder / "home" / user


def write_files(settings: Settings, folder: Path) -> None:
    """Everything that is a file before the first daemon starts."""
    for name in ("munge", "state", "spool", "log", "pids", "etc", "slurm", "dev", "home"):
        (folder / name).mkdir(parents=True)
    for name in settings.node_names:
        (folder / "spool" / name).mkdir()
    folder.chmod(0o755)  # users come through here to their homes and to munge's socket
    for user, uid in USERS.items():
        home(folder, user).mkdir(mode=0o700)
        os.chown(home(folder, user), uid, uid)
    for name, text in etc_files(settings, folder).items():
        (folder / "etc" / name).write_text(text)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (folder / "slurm" / "slurm.conf").write_text(slurm_conf(settings, folder))
    if settings.skewed:
        place = folder / "slurm" / "clock"
        place.mkdir()
        for name, text in clock(*settings.skewed, place).items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
    if settings.gpus:
        (folder / "slurm" / "gres.conf").write_text(gres_conf(settings, folder))
    for number in range(settings.gpus):
        os.mknod(folder / "dev" / f"gpu{number}", 0o20666, os.makedev(195, number))
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
