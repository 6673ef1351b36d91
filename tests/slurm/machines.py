"""Machines made of Linux namespaces: own network, mounts, host name, shared memory and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PID1 = Path(__file__).with_name("pid1.py")
NEW_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--propagation", "private")


class NodeProcess(subprocess.Popen[Any]):
    """A command on a machine. Signals reach the command itself, not the program that entered the machine for it."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is not None:
            return
        if sig == signal.SIGKILL:
            os.killpg(self.pid, sig)  # all that the command has started and left in its group
            return
        for pid in children(self.pid):
            os.kill(pid, sig)


class Machine:
    """One machine. ``pid`` is its process 1 as seen from outside, kept in a file: any process may attach."""

    def __init__(self, name: str, folder: Path, host_name: str = "") -> None:
        self.name, self.host_name = name, host_name or name
        self.folder = folder
        self._starter: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return int(self._pid_file.read_text())

    @property
    def alive(self) -> bool:
        return self._pid_file.exists() and Path(f"/proc/{self.pid}/ns/net").exists()

    def start(self, inside: Machine | None = None, lifeline: IO[bytes] | None = None) -> None:
        """Begin; ``ready`` waits for the end of it. ``inside``: end when that machine's process 1 does."""
        enter = ["nsenter", f"--target={inside.pid}", "--pid", "--"] if inside else []
        flags = [*(["--lifeline"] if lifeline else []), *(f"--open={place}" for place in closed_to_users())]
        command = [*enter, "unshare", *NEW_NAMESPACES, sys.executable, "-I", "-S", str(PID1)]
        with open(self.folder / "log" / f"pid1.{self.name}.log", "ab") as log:
            self._starter = subprocess.Popen(
                [*command, self.host_name, str(self.folder), *flags],
                stdin=lifeline or subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def ready(self) -> None:
        assert self._starter, "start() comes first"
        assert self._starter.stdout
        with self._starter.stdout as output:
            said = output.readline()
        log = self.folder / "log" / f"pid1.{self.name}.log"
        if said != b"ready\n":
            raise RuntimeError(f"{self.name} did not start: {log.read_text()}")
        pid = self._starter.pid
        while below := children(pid):
            pid = below[0]
        self._pid_file.write_text(str(pid))

    def kill(self) -> None:
        """As when the power goes: every process of the machine ends at once, its network goes."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        if self._starter is not None:
            self._starter.wait()
            self._starter = None
        self._pid_file.unlink(missing_ok=True)

    def popen(
        self, command: str | Sequence[str], environ: Mapping[str, str], cwd: Path | str, uid: int = 0, **popen: Any
    ) -> NodeProcess:
        """Start a command (a string is bash's) on the machine as user ``uid``."""
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--"]
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"] if uid else []
        return NodeProcess(
            [*enter, *user, "env", f"--chdir={cwd}", *words], env=environ, start_new_session=True, **popen
        )

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pids" / f"pid1.{self.name}"


def closed_to_users() -> list[str]:
    """Folders above the interpreter or this repository that only root may pass, such as /root."""
    above = {
        place for path in (sys.executable, __file__) for place in (Path(path).parent, *Path(path).resolve().parents)
    }
    return sorted(str(place) for place in above if not place.stat().st_mode & 0o001)


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def ip(*lines: str, of: Machine | None = None) -> None:
    """Run lines of ``ip -batch`` in a machine's network, or in the one of this process."""
    enter = ["nsenter", f"--target={of.pid}", "--net", "--"] if of else []
    subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def make_bridge(login: Machine, address: str) -> None:
    ip("link add br0 type bridge", f"address add {address}/24 dev br0", "link set br0 up", of=login)


def cable(login: Machine, node: Machine, address: str, gateway: str) -> None:
    """Connect a node to the bridge in the login machine. A port of a node that died may still be there."""
    port = port_of(node.name)
    subprocess.run(
        ["nsenter", f"--target={login.pid}", "--net", "--", "ip", "link", "delete", port], stderr=subprocess.DEVNULL
    )
    ip(f"link add {port} netns {login.pid} type veth peer name eth0 netns {node.pid}")
    ip(f"link set {port} master br0 up", of=login)
    ip(f"address add {address}/24 dev eth0", "link set eth0 up", f"route add default via {gateway}", of=node)


def port_of(node: str) -> str:
    return f"to-{node}"
