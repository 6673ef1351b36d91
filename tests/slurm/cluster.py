"""A real Slurm of several nodes on one machine, with faults on demand."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import session
from tests.helpers.waiting import PATIENCE
from tests.slurm import accounting
from tests.slurm.machines import Machine, NodeProcess, cable, ip, make_bridge, port_of
from tests.slurm.scontrol import FINISHED, parse_job, wait
from tests.slurm.settings import LOGIN, USERS, Settings, address, home, write_files


class Cluster:
    """A login machine with the controller, and nodes, each with namespaces of its own.

    Everything is in ``folder``, so another process may ``attach`` to it. All processes of a cluster end with
    the process that made it, even if that is killed, unless ``keep`` was asked for.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.login = Machine(LOGIN, folder)
        self.nodes = {name: Machine(name, folder, settings.host_of(name)) for name in settings.node_names}
        self._lifeline = -1
        self._hurt: set[str] = set()  # nodes that had a fault since the last `heal`

    @classmethod
    def up(cls, settings: Settings | None = None, folder: Path | None = None, keep: bool = False) -> Cluster:
        """Bring a cluster up, in a new folder if none is given; return when all nodes are idle."""
        session.need("slurm")
        folder = folder or Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        cluster = cls(folder, settings or Settings())
        try:
            write_files(cluster.settings, folder)
            cluster._start(keep)
        except BaseException as error:
            error.add_note(cluster.log_tail())
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls, folder: Path) -> Cluster:
        """The cluster that another process has brought up in ``folder``."""
        return cls(folder, Settings(**json.loads((folder / "settings.json").read_text())))

    def down(self) -> None:
        self.login.kill()  # every node's process 1 lives in the login machine's process namespace
        for machine in self.nodes.values():
            machine.kill()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        atexit.unregister(self.down)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # ---- commands

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment without traces of another Slurm, and with what finds this one."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([own.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"])
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm" / "slurm.conf")}

    def popen(
        self,
        command: str | Sequence[str],
        node: str = LOGIN,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **popen: Any,
    ) -> NodeProcess:
        """Start a command on a machine; a string is a line of bash. ``user``: alice or bob instead of root."""
        environ = self.environ
        if user:
            environ |= {"USER": user, "LOGNAME": user, "HOME": str(self.home(user))}
        machine = self.login if node == LOGIN else self.nodes[node]
        uid = USERS[user] if user else 0
        place = cwd or (self.home(user) if user else Path.cwd())
        return machine.popen(command, {**environ, **(env or {})}, place, uid, **popen)

    def run(
        self,
        command: str | Sequence[str],
        node: str = LOGIN,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        timeout: float = PATIENCE,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """``popen`` and wait; stdout and stderr are text. If it is late, all that the command began is killed."""
        output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(command, node, user, env, cwd, **output) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def home(self, user: str) -> Path:
        """A user's own folder, which every node sees."""
        return home(self.folder, user)

    # ---- faults, and their repair

    def crash(self, node: str) -> None:
        """Power loss: daemon, job steps, tasks and network of the node are gone at once."""
        self._hurt.add(node)
        self.nodes[node].kill()

    def boot(self, node: str, wait: bool = True) -> None:
        """Switch a node on, off before if it was on. ``wait`` until Slurm may use it."""
        self.nodes[node].kill()
        (self.folder / "pids" / f"slurmd.{node}").unlink(missing_ok=True)
        self._start_machines([node])
        self.start_slurmd(node, "-b")
        if wait:
            self.wait_nodes([node])

    def unplug(self, node: str) -> None:
        """Pull the cable: the node goes on, and nobody hears of it."""
        self._hurt.add(node)
        ip(f"link set {port_of(node)} down", of=self.login)

    def plug(self, node: str) -> None:
        ip(f"link set {port_of(node)} up", of=self.login)

    def kill_slurmd(self, node: str) -> None:
        """Only the daemon: the tasks of the node go on."""
        self._hurt.add(node)
        self.run(f"kill -KILL $(cat {self.folder}/pids/slurmd.{node})", node=node, check=True)

    def start_slurmd(self, node: str, *options: str) -> None:
        self.run(["slurmd", "-N", node, *options], node=node, cwd="/", check=True)

    def stop_controller(self, signal: str = "TERM") -> None:
        self._stop("slurmctld", signal)

    def signal_controller(self, signal: str) -> None:
        """STOP lets slurmctld answer nobody, CONT lets it go on."""
        self.run(f"kill -{signal} $(cat {self.folder}/pids/slurmctld)", check=True)

    def start_controller(self) -> None:
        self.run(["slurmctld"], cwd="/", check=True)
        wait(lambda: self.run(["scontrol", "ping"]).returncode == 0, "the controller")

    def stop_munge(self) -> None:
        self._stop("munged", "TERM")

    def start_munge(self) -> None:
        munge = self.folder / "munge"
        files = {"key-file": munge / "key", "socket": munge / "socket", "seed-file": munge / "seed"}
        files |= {"pid-file": self.folder / "pids" / "munged", "log-file": self.folder / "log" / "munged.log"}
        options = [f"--{name}={file}" for name, file in files.items()]
        self.run(["munged", "--force", "--num-threads=4", *options], cwd="/", check=True)

    def heal(self) -> None:
        """As at the start: all machines and daemons run, no job is left, every node is idle."""
        if not self._runs("munged"):
            self.start_munge()
        if not self._runs("slurmctld"):
            self.start_controller()
        if jobs := self.run(["squeue", "-h", "-o", "%A"], check=True).stdout.split():
            self.run(["scancel", *jobs])
        for node in sorted(self._hurt):
            self._renew(node)  # an orphan of an unplugged node goes with it
        self._hurt.clear()
        with contextlib.suppress(AssertionError):
            wait(self._healed, "jobs to end by themselves", timeout=10)
        for node in self._ill():
            self._renew(node)
        wait(self._healed, "idle nodes", lambda: f"{self.node_states()}\n{self.log_tail()}")

    # ---- what Slurm says

    def submit(self, *options: str, script: str = "", **run: Any) -> int:
        """``sbatch`` with options, the last one a file, or with lines of sh in ``script``. Returns the job's id."""
        # A root's script would leave its output in the working folder, which is this repository.
        output = [] if run.get("user") else [f"--output={self.folder}/log/job-%j.out"]
        wrapped = ["--wrap", script, *output] if script else []
        words = ["sbatch", "--parsable", *wrapped, *options]
        return int(self.run(words, check=True, **run).stdout.split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """What ``scontrol show job`` says, by name; empty for a job that Slurm does not know."""
        return parse_job(self.run(["scontrol", "show", "job", "-o", str(job_id)]).stdout)

    def wait_state(
        self, job_id: int | str, states: str | Iterable[str], timeout: float = PATIENCE, restarts: int = 0
    ) -> dict[str, str]:
        """Wait until the job is in one of ``states``, restarted that often or more; return what ``job`` says then.

        AssertionError when it is late, or has ended in another state.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.job(job_id))
            state = found.get("JobState", "")
            if state in FINISHED - wanted:
                raise AssertionError(f"job {job_id} is {state}, expected {sorted(wanted)}\n{found}")
            return state in wanted and int(found["Restarts"]) >= restarts

        wait(reached, f"job {job_id} to be {sorted(wanted)}", lambda: f"{found}\n{self.log_tail()}", timeout)
        return found

    def node_states(self) -> dict[str, str]:
        """``idle``, ``allocated``, ``down*`` and so on, by node."""
        lines = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_nodes(self, nodes: Iterable[str], state: str = "idle") -> None:
        names = set(nodes)
        wait(
            lambda: {name for name, now in self.node_states().items() if now == state} >= names,
            f"{sorted(names)} to be {state}",
            lambda: f"{self.node_states()}\n{self.log_tail()}",
        )

    def log_tail(self, lines: int = 15) -> str:
        """The ends of all daemons' logs, munge's left out: it speaks of every message."""
        files = sorted(set((self.folder / "log").glob("*.log")) - {self.folder / "log" / "munged.log"})
        texts = {file.name: file.read_text(errors="replace").splitlines()[-lines:] for file in files}
        return "\n".join(f"--- {name}\n" + "\n".join(text) for name, text in texts.items() if text)

    # ---- inside

    def _start(self, keep: bool) -> None:
        if keep:
            self.login.start()
        else:
            read, self._lifeline = os.pipe()
            atexit.register(self.down)
            with open(read, "rb") as lifeline:
                self.login.start(lifeline=lifeline)
        self.login.ready()
        make_bridge(self.login, address(LOGIN))
        self.start_munge()
        if self.settings.accounting:
            accounting.start(self)
        self._start_machines(list(self.nodes))
        self.start_controller()
        for name in self.nodes:
            self.start_slurmd(name)
        self.wait_nodes(self.nodes)

    def _start_machines(self, names: Sequence[str]) -> None:
        for name in names:
            self.nodes[name].start(inside=self.login)
        for name in names:
            self.nodes[name].ready()
            cable(self.login, self.nodes[name], address(name), address(LOGIN))

    def _stop(self, daemon: str, signal: str) -> None:
        file = self.folder / "pids" / daemon
        pid = file.read_text().strip()
        self.run(f"kill -{signal} {pid} && while kill -0 {pid}; do sleep 0.02; done 2>&-")
        file.unlink(missing_ok=True)

    def _runs(self, daemon: str) -> bool:
        file = self.folder / "pids" / daemon
        return file.exists() and self.run(["kill", "-0", file.read_text().strip()]).returncode == 0

    def _renew(self, node: str) -> None:
        """A node as if new. Slurm forgets what it waits for on a node that is set down."""
        self.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=renewed"], check=True)
        self.boot(node, wait=False)
        self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])

    def _healed(self) -> bool:
        """No job is left and all nodes are idle. What still runs of a cancelled job is killed: no use to wait."""
        jobs = self.run(["squeue", "-h", "-o", "%A"], check=True).stdout.split()
        if jobs:
            for node in self.nodes:
                self.run("pkill -KILL -P $(pgrep -d, -x slurmstepd)", node=node)
        return not jobs and not self._ill()

    def _ill(self) -> list[str]:
        return [node for node, state in self.node_states().items() if state != "idle"]
