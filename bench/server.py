"""Measured processes: servers that answer each line on their standard input with a document, and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core import env

ROOT = Path(__file__).resolve().parent.parent
_MARK = "RESULT "


def answer(document: dict[str, Any]) -> None:
    """In the measured process: the next answer; the first one says that it is ready."""
    print(_MARK + json.dumps(document), flush=True)


class Server:
    """Handle of a measured process, whose first answer is ``facts``."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """``environment``: further variables; ``log``: for its standard error."""
        self._log = log
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.facts = self._answer()

    def run(self) -> dict[str, Any]:
        """Generates one batch; returns its figures."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"a measured process ended early:\n{tail}")


def rank_outputs(module: str, arguments: Any, ranks: int, port: int) -> list[str]:
    """Standard output of each rank of ``python -m MODULE --rank-of ARGUMENTS``, on gloo with a thread each."""
    common = {env.MASTER_ADDR: "127.0.0.1", env.MASTER_PORT: port, env.GLOO_SOCKET_IFNAME: "lo"}
    # torch's own store logs each look for a key that is not there; the launcher's does not
    common |= {env.OMP_NUM_THREADS: 1, env.TORCHDYNAMO_DISABLE: 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command, started = [sys.executable, "-m", module, "--rank-of", json.dumps(arguments)], []
    for rank in range(ranks):
        own = {env.RANK: rank, env.LOCAL_RANK: rank, env.WORLD_SIZE: ranks, env.LOCAL_WORLD_SIZE: ranks}
        environ = {**os.environ, **{name: str(value) for name, value in {**common, **own}.items()}}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=-1, stderr=-1, text=True))
    found = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, found, strict=True):
        if process.returncode:
            sys.exit(errors[-3000:])
    return [output for output, _ in found]
