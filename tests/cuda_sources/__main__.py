"""Checks every vLLM release that the pins allow: ``python -m tests.cuda_sources [RELEASE …]``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests.cuda_sources.releases import Unreachable, allowed, fetch, pinned, published
from tests.tiers.imports import ROOT


def main(releases: Sequence[str]) -> int:
    """The exit code of pytest; 1 if a release cannot be downloaded."""
    try:
        selected = releases or allowed(published(), pinned())
        for release in selected:
            fetch(release)
    except Unreachable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"CUDA sources: vLLM {', '.join(selected)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/cuda_sources", f"--vllm-releases={','.join(selected)}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
