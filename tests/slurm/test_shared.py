"""Two users of one cluster: what each can do to, and see of, the other's run."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import runs
from tests.slurm.cluster import Cluster
from tests.slurm.front import Front
from tests.slurm.sbatch_user import CPUS, ROOT, SbatchUser
from tests.slurm.scontrol import wait
from tests.slurm.settings import USERS, Settings

pytestmark = pytest.mark.slurm
NODE = "node1"
MEET = "--entry=tests.slurm.ranks:meet"


@pytest.fixture(scope="module")
def one_node(slurm) -> Iterator[Cluster]:
    """One node, so that two jobs share it."""
    with Cluster.up(Settings(nodes=1, gpus=1, cpus=16)) as cluster:
        yield cluster


@pytest.fixture
def users(one_node) -> Iterator[tuple[SbatchUser, SbatchUser]]:
    """Alice and Bob, whose folders everyone may enter, as on many a scratch disk."""
    made = [SbatchUser(one_node, one_node.folder / "scratch" / name, name) for name in ("alice", "bob")]
    yield made[0], made[1]
    one_node.heal()
    subprocess.run(["rm", "-rf", one_node.folder / "scratch"], check=True)


@pytest.fixture
def alice(users) -> SbatchUser:
    return users[0]


def start_meeting(user: SbatchUser, *keys: str) -> int:
    job = user.sbatch("--ntasks-per-node=2", *CPUS, "grpo.sbatch", MEET, user.config, *keys)
    wait(lambda: len(user.ranks()) == 2, f"{user.name}'s ranks", user.cluster.log_tail)
    return job


def end_meeting(user: SbatchUser, job: int) -> None:
    (user.run / "go").touch()
    user.ended(job)


def as_bob(cluster: Cluster, code: str, *words: str) -> str:
    """What Python code prints that Bob runs on the node."""
    done = cluster.run([sys.executable, "-c", code, *words], node=NODE, user="bob", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- at once


def test_two_users_on_one_node_with_the_same_port(users) -> None:
    """The second takes another port, says so, and neither finds the other's ranks."""
    jobs = [start_meeting(user, "slurm.port=20500") for user in users]
    assert {users[0].cluster.job(job)["NodeList"] for job in jobs} == {NODE}
    ports = [{rank["environ"]["RLHPC_STORE"].rpartition(":")[2] for rank in user.ranks()} for user in users]
    assert [len(port) for port in ports] == [1, 1]
    assert ports[0] == {"20500"} != ports[1]
    for user, job in zip(users, jobs, strict=True):
        end_meeting(user, job)
    message = (users[1].folder / f"grpo-{jobs[1]}.log").read_text()
    assert f"rlhpc: port 20500 on {NODE}: Address already in use; port {ports[1].pop()} is used instead" in message


# ---- files


def private(*places: Path) -> list[Path]:
    """What is below ``places``, themselves too, and is open to others."""
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    return [path for path in paths if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_nobody_else_reads_a_run(alice) -> None:
    job = start_meeting(alice)
    log = alice.folder / f"grpo-{job}.log"
    assert private(alice.run, log, alice.folder / "state") == []
    assert stat.S_IMODE(alice.run.stat().st_mode) == 0o700
    seen = [alice.run, alice.run / "config.yaml", log, *(alice.run / "attempts").rglob("*")]
    assert len(seen) > 10
    code = (
        "import os, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: os.listdir(path) if os.path.isdir(path) else open(path).read(); print(path)\n"
        "    except PermissionError: pass\n"
    )
    opened = as_bob(alice.cluster, code, str(alice.folder), str(alice.config), *map(str, seen)).split()
    assert opened == [str(alice.folder), str(alice.config)], "Bob can come so far, and no further"
    end_meeting(alice, job)


# ---- the store, and its secret


def secret_of(user: SbatchUser) -> str:
    """As root finds it in the environment of srun."""
    lines = user.cluster.run("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'", node=NODE, check=True).stdout
    found = set(re.findall(r"^RLHPC_STORE_SECRET=(\w+)$", lines, re.M))
    assert len(found) == 1, "one job, one secret"
    return found.pop()


def test_the_secret_is_where_only_its_owner_looks(alice) -> None:
    job = start_meeting(alice)
    cluster, secret = alice.cluster, secret_of(alice)
    commands = [
        "cat /proc/*/cmdline | tr '\\0' ' '",
        f"scontrol show job -dd {job}; scontrol show step {job}; squeue -o '%all'; squeue -s; squeue -h -o '%o %k %Z'",
        f"scontrol write batch_script {job} -; scontrol listpids; ss -xlp",
    ]
    for command in commands:
        said = cluster.run(command, node=NODE).stdout
        assert str(job) in said or "rlhpc.launch" in said, f"it says something of the job: {said}"
        assert secret not in said
    everywhere = [cluster.folder / part for part in ("scratch", "state", "spool", "log", "home")]
    assert run_grep(secret, *everywhere) == []
    assert run_grep("prompts_per_step", *everywhere), "it finds what is there"
    code = (
        "import glob\n"
        "for file in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: print(open(file).read())\n"
        "    except OSError: pass\n"
    )
    assert "RLHPC_STORE" not in as_bob(cluster, code)
    end_meeting(alice, job)
    assert run_grep(secret, *everywhere) == []


def run_grep(text: str, *places: Path) -> list[str]:
    done = subprocess.run(["grep", "-rlFa", text, *places], capture_output=True, text=True)
    return done.stdout.split()


def test_a_stranger_on_the_node_gets_nothing_from_the_store(alice) -> None:
    """Bob is greeted, asks for a key without a proof, then with a proof by a secret of his own."""
    job = start_meeting(alice)
    address = alice.ranks()[0]["environ"]["RLHPC_STORE"]
    code = (
        "import socket, sys\n"
        "from rlhpc.core.store_client import StoreAddress, StoreConnection, Refused\n"
        "from rlhpc.core.store_protocol import GREETING_BYTES, Op, pack, seconds\n"
        "address = StoreAddress.parse(sys.argv[1], '00' * 32)\n"
        "raw = socket.create_connection((address.host, address.port), timeout=300)\n"
        "print(len(raw.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES)\n"
        "raw.sendall(pack(Op.GET, [seconds(1), b'rank0']) * 8)\n"
        "print(raw.recv(99))\n"
        "try: StoreConnection(address)\n"
        "except Refused as error: print(error)\n"
    )
    said = as_bob(alice.cluster, code, address).splitlines()
    assert said == ["True", "b'\\x00'", "it rejects our secret"]
    log = (alice.folder / f"grpo-{job}.log").read_text()
    assert log.count("was refused: wrong secret") == 2, log
    end_meeting(alice, job)


# ---- everything that listens

# A test of each; docs/shared_clusters.md has the same list.
KNOWN = {
    "the job's store": r"tcp 0\.0\.0\.0:STORE python",
    "gloo": r"tcp 127\.0\.0\.1:\d+ python",
    "srun": r"tcp 0\.0\.0\.0:\d+ srun",
    "slurmd": r"tcp 0\.0\.0\.0:6818 slurmd",
    "slurmstepd": r"u_str \S+/spool/node1/node1_\S+ slurmstepd",
    "multiprocessing's manager": r"u_str /tmp/rlhpc-\d+-\d+/\d+-\w+/pymp-\w+/listener-\w+ python",
}
# There for the fraction of a second in which a checkpoint's writers start: a look every few tenths may miss it.
BRIEF = {"multiprocessing's manager"}
# The first word is the store's address. It answers; others may say nothing.
POKE = """
import os, socket, sys
for word in sys.argv[2:]:
    try:
        if word.startswith("/"):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(30)
            stranger.connect(word)
        else:
            host, port = word.split(":")
            stranger = socket.create_connection((host, int(port)), timeout=30)
        stranger.sendall(os.urandom(64))
        stranger.settimeout(100 if word == sys.argv[1] else 0.3)
        print(word, "open", stranger.recv(1).hex() or "-")
    except OSError as error:
        print(word, type(error).__name__)
"""


class Listeners:
    """What listens on the node, by kind; Bob pokes at each socket of alice's processes as soon as it is there."""

    def __init__(self, user: SbatchUser, job: int) -> None:
        self._cluster, self._job, self._store = user.cluster, job, str(20000 + job % 10000)
        self.kinds: dict[str, set[str]] = {}
        self.unknown: set[str] = set()
        self.answers: dict[str, str] = {}

    def look(self) -> bool:
        """Look once, and let Bob try; True when the job has ended."""
        store = self._store
        new = []
        for line in self._cluster.run("ss -Hltunp; ss -Hlxp", node=NODE, check=True).stdout.splitlines():
            words = line.split()
            program = re.search(r'\(\("([^"]+)"', line)
            if program is None:  # its process is just ending
                continue
            known = f"{words[0]} {words[4]} {program.group(1)}"
            kind = next((k for k, form in KNOWN.items() if re.fullmatch(form.replace("STORE", store), known)), None)
            if kind is None:
                self.unknown.add(known)
            elif words[4] not in self.kinds.setdefault(kind, set()):
                self.kinds[kind].add(words[4])
                new += [words[4]] if kind not in ("srun", "slurmd", "slurmstepd") else []
        self.answers |= self._poke([word.replace("0.0.0.0", "127.0.0.1") for word in new])
        return "JobState" in (now := self._cluster.job(self._job)) and now["JobState"] not in ("RUNNING", "PENDING")

    def _poke(self, addresses: list[str]) -> dict[str, str]:
        said = as_bob(self._cluster, POKE, f"127.0.0.1:{self._store}", *addresses) if addresses else ""
        return dict(line.split(" ", 1) for line in said.splitlines())


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_stranger_pokes_at_everything_that_listens(alice) -> None:
    """A real run with the most that listens: an engine of two ranks, checkpoints. It ends as if alone."""
    begun = time.time()
    keys = {"actor__parallel__tp": 2, "rollout__tp": 2, "sft__steps": 1, "train__steps": 2, "checkpoint__every": 1}
    config = runs.write_config(alice.folder / "real", **keys)
    alice.own()
    job = alice.sbatch("--ntasks-per-node=2", *CPUS, "grpo.sbatch", config)
    listeners = Listeners(alice, job)
    wait(listeners.look, "the run", timeout=1400, interval=0.1)
    alice.ended(job)
    assert listeners.unknown == set(), "to be looked at, and described in docs/shared_clusters.md"
    assert set(listeners.kinds) | BRIEF == set(KNOWN)
    for address, answer in listeners.answers.items():
        if address.startswith("/"):
            assert answer in ("PermissionError", "FileNotFoundError", "ConnectionRefusedError"), (address, answer)
        else:
            expected = "open 72" if address.endswith(f":{20000 + job}") else ("open -", "TimeoutError", "Connection")
            assert answer.startswith(expected), (address, answer)
    run = alice.folder / "real" / "run"
    assert list((run / "checkpoints").glob("step-*/actor/*")), "there are checkpoints"
    assert private(run, config.parent / "inputs") == []
    assert left_in_tmp("alice", begun) == []


def left_in_tmp(user: str, since: float) -> list[str]:
    """Entries of /tmp of the user's that others may enter or read."""
    found = [(entry.path, entry.stat(follow_symlinks=False)) for entry in os.scandir("/tmp")]
    return [
        path
        for path, status in found
        if status.st_uid == USERS[user] and status.st_ctime >= since and status.st_mode & 0o077
    ]


# ---- what a site asks for


def test_what_the_configuration_asks_of_the_site_reaches_slurm(accounted_cluster, tmp_path) -> None:
    front, cluster = Front(accounted_cluster, tmp_path), accounted_cluster
    for line in (
        "sacctmgr -i add qos special",
        "sacctmgr -i modify user root set qos+=special",
        "scontrol update NodeName=node2 AvailableFeatures=fast ActiveFeatures=fast",
        "scontrol create reservation ReservationName=mine Users=root Nodes=node2 StartTime=now Duration=60",
    ):
        cluster.run(line, check=True)
    try:
        wanted = {"account": "project", "qos": "special", "reservation": "mine", "constraint": "fast", "comment": "why"}
        job = front.submit("sleep", *(f"slurm.{key}={value}" for key, value in wanted.items()))
        known = cluster.wait_state(job, "RUNNING")
        names = ("Account", "QOS", "Reservation", "Features", "Comment", "NodeList")
        assert [known.get(name) for name in names] == [*wanted.values(), "node2"]
        cluster.run(["scancel", job])
        cluster.wait_state(job, "CANCELLED")
        # Not the reservation: slurmdbd leaves it out of a job that began in the second in which it was made.
        ask = ["sacct", "-nPX", "-j", job, "-o", "Account,QOS"]
        wait(lambda: cluster.run(ask).stdout.strip() == "project|special", "the database to know")
    finally:
        cluster.run("scancel --user root")
        delete = ["scontrol", "delete", "ReservationName=mine"]
        wait(lambda: cluster.run(delete).returncode == 0, "the reservation's end")  # no job may be left in it
