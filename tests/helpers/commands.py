"""The `rlhpc` command, within this process and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from rlhpc.cli.main import cli

ROOT = Path(__file__).parents[2]


def invoke(*words: object, **options: Any) -> Result:
    """Call the command within this process; ``options``: those of click's CliRunner.invoke."""
    return CliRunner().invoke(cli, [*map(str, words)], **options)


def rlhpc(
    *words: object, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command of this checkout in a process of its own, with further environment variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "rlhpc.cli.main", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
