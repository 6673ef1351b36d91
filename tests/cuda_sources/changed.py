"""In CI: checks the CUDA sources of two releases if the pins or what uses vLLM changed.

``python -m tests.cuda_sources.changed``. CI remembers nothing, so that this is a function of the commit alone: it looks
at the commits of the day before the newest one's date. In a shallow clone, whose history is cut, it always runs. Where
the package index does not answer, it says so in a line and passes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cuda_sources.releases import CI_RELEASES, Unreachable, fetch
from tests.tiers.imports import ROOT, changed_within_a_day

# Files, and folders with a slash at their end.
WATCHED = (
    "pyproject.toml",
    "rlhpc/rollout/",
    "rlhpc/sharding/engine_shards.py",
    "rlhpc/models/",
    "tests/cuda_sources/",
)
_FETCH_SECONDS = 100.0  # for a release; a CI run has two minutes for all of it


def changed_files(root: Path = ROOT) -> list[str]:
    """The watched files that the commits of the last day changed; all of them in a shallow clone."""
    names = changed_within_a_day(root)
    return list(WATCHED) if names is None else [name for name in names if name.startswith(WATCHED)]


def main() -> int:
    files = changed_files()
    if not files:
        print("CUDA sources: neither pins nor rollout code changed within a day of this commit; not checked")
        return 0
    try:
        for release in CI_RELEASES:
            fetch(release, _FETCH_SECONDS)
    except Unreachable as error:
        print(f"CUDA sources: not checked, {error}")
        return 0
    print(f"CUDA sources: vLLM {' and '.join(CI_RELEASES)}, because {files[0]} changed", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/cuda_sources", f"--vllm-releases={','.join(CI_RELEASES)}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
