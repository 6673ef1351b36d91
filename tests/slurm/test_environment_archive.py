"""Ranks use a Python environment on their node's own disk, which came there as an archive."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlhpc.core.attempts import Verdict, read_verdict
from rlhpc.core.folder import RunFolder
from tests.slurm.front import ROOT, Front

pytestmark = pytest.mark.slurm
DISK = "/mnt"  # each node's own
PACKERS = {
    "env.tar.zst": "tar -C {folder} -cf - . | zstd -q -o {archive}",
    "env.tar.gz": "tar -C {folder} -czf {archive} .",
    "env.sqsh": "mksquashfs {folder} {archive} -quiet -no-progress",
}
CAN_MOUNT = shutil.which("squashfuse") is not None and os.access("/dev/fuse", os.W_OK)
needs_mksquashfs = pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="no mksquashfs: DID NOT RUN")


def pack(folder: Path, name: str) -> Path:
    """An archive of a small environment, which finds packages where this one has them."""
    environment, archive = folder / "environment", folder / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "packages.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (environment / "data").write_bytes(os.urandom(300_000))
    command = PACKERS[name].format(folder=environment, archive=archive)
    subprocess.run(command, shell=True, check=True, executable="/bin/bash")
    shutil.rmtree(environment)
    return archive


def run_with(front: Front, archive: Path, *overrides: str) -> tuple[str, Verdict, str]:
    """A job on two nodes with the real supervisor: its id, the verdict on its first attempt, and its log."""
    keys = ("slurm.nodes=2", f"slurm.environment.TMPDIR={DISK}", f"slurm.environment_archive={archive}", *overrides)
    job = front.submit("supervise", *keys, "resources.ranks_per_node=2")
    front.cluster.wait_state(job, {"COMPLETED", "FAILED"}, timeout=500)
    log = (front.run_dir / "submission" / f"{job}_0_log.out").read_text()
    verdict = read_verdict(RunFolder(front.run_dir).attempt(1))
    assert verdict is not None, log
    return job, verdict, log


@pytest.mark.parametrize(
    "name",
    [
        "env.tar.zst",
        pytest.param("env.tar.gz", marks=pytest.mark.long),
        pytest.param("env.sqsh", marks=[pytest.mark.long, needs_mksquashfs]),
    ],
)
def test_ranks_use_the_environment_on_their_nodes_disk(front: Front, tmp_path: Path, name: str) -> None:
    job, verdict, log = run_with(front, pack(tmp_path, name))
    assert verdict.cause == "finished", log
    state = "mounted" if name == "env.sqsh" and CAN_MOUNT else "unpacked"
    assert f"the environment is {state} on each node at {DISK}/rlhpc-0-{job}/env-" in log
    notes = [json.loads(file.read_text()) for file in sorted(front.run_dir.glob("rank-1-*.json"))]
    assert [note["node"] for note in notes] == ["node1", "node1", "node2", "node2"]
    (prefix,) = {note["prefix"] for note in notes}
    assert prefix.startswith(f"{DISK}/rlhpc-0-{job}/env-")
    assert all(note["environ"]["PATH"].startswith(f"{prefix}/bin:") for note in notes)
    for node in ("node1", "node2"):
        assert front.cluster.run(f"ls {DISK}", node=node).stdout == "", "it is removed at the end"


@pytest.mark.long
def test_a_node_without_room_is_named(front: Front, tmp_path: Path) -> None:
    front.cluster.run(f"mount -o remount,size=64k {DISK}", node="node2", check=True)
    try:
        _, verdict, log = run_with(front, pack(tmp_path, "env.tar.gz"), "recovery.bad_node=stop")
    finally:
        front.cluster.run(f"mount -o remount,size=50% {DISK}", node="node2", check=True)
    assert (verdict.cause, verdict.node) == ("bad_node", "node2"), log
    assert re.search(r"node node2: /mnt/rlhpc-\S+ has \d+ KiB left, the archive has \d+", verdict.message)
    for node in ("node1", "node2"):
        assert front.cluster.run(f"ls {DISK}", node=node).stdout == "", "the archive is removed at the end"
