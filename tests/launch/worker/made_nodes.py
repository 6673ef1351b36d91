"""Faulty nodes, made of namespaces, and what a check of them finds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="namespaces need root: these tests DID NOT RUN"
)


def of_attempt(folder: str, number: int = 1, node: str = "localhost") -> str:
    """TMPDIR of an attempt in a job's folder."""
    return f"{folder}/{number}-{zlib.crc32(node.encode()) & 0xFFFF:04x}"


@dataclass(frozen=True)
class Outcome:
    """What a call did: its result or the error's text, the environment after it, and what it said on stderr."""

    result: object
    error: str
    environ: dict[str, str]
    message: str


CODE = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core import scratch
from rlhpc.core.storage import BRIEF, NONE, use, waits
from rlhpc.launch.worker.node_check import check_node, interface_address, network_interface

def remount_when_waited_for(folder):
    before = waits()
    def act():
        while waits() == before:
            time.sleep(0.01)
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    threading.Thread(target=act).start()

result, error = None, ""
try:
    result = eval(sys.argv[1])
except UserError as e:
    error = str(e) if isinstance(e, NodeError) else f"UserError: {e}"
except OSError as e:
    error = f"OSError {e.errno}"
assert "torch" not in sys.modules
print(json.dumps([result, error, dict(os.environ)]))
"""


def on_node(setup: str, call: str, *, name: str = "localhost", **environ: str) -> Outcome:
    """Evaluate ``call`` on a node of its own: new network, mounts, host name and /tmp, after the shell lines ``setup``.

    A variable given as empty is unset.
    """
    # torch sets this variable when other tests of this process import its compiler.
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    settings = {**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": "", "HOME": "/root", **environ}
    settings = {name: value for name, value in settings.items() if value}
    lines = f"set -e\nhostname {name}\n{EMPTY_TMP}\nip link set lo up\n{setup}\n"
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", lines + 'exec "$@"', "sh", sys.executable, "-c", CODE, call],
        env=settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Outcome(*json.loads(done.stdout), done.stderr)


# A /tmp of its own, in which a checkout that is in /tmp is found again.
EMPTY_TMP = f"""exec 9<{ROOT}
mount -t tmpfs tmpfs /tmp
mkdir -p {ROOT}
mount --no-canonicalize --bind /proc/self/fd/9 {ROOT}
exec 9<&-"""
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--propagation", "private")
CHECK = "check_node(Path('/tmp'), 'localhost')"
