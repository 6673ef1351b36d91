"""Can a test cluster be brought up here? The tests skip, loudly, where it cannot."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from tests.slurm import accounting

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
INSTALL = "tests/slurm/install.sh installs them"


@functools.cache
def why_not() -> str:
    """What is in the way, or nothing."""
    if os.getuid() != 0:
        return "only root can bring up nodes with namespaces of their own"
    if absent := _absent(PROGRAMS):
        return f"not installed: {absent}; {INSTALL}"
    # What a container without rights refuses: namespaces, mounts, network devices.
    probe = (
        "mount -t tmpfs tmpfs /mnt && ip link add br0 type bridge && ip link add dev veth0 type veth peer name veth1"
    )
    spaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*spaces, "sh", "-c", probe], capture_output=True, text=True)
    return f"this machine refuses namespaces: {done.stderr.strip()}" if done.returncode else ""


@functools.cache
def why_no_accounting() -> str:
    absent = _absent(accounting.PROGRAMS)
    return why_not() or (f"not installed: {absent}; {INSTALL}" if absent else "")


def _absent(programs: dict[str, str]) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return ", ".join(sorted({package for name, package in programs.items() if not shutil.which(name, path=path)}))
