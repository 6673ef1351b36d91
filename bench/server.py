"""A measured process: it answers each line on its standard input with a document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
