"""All claims, one process after the other."""

from __future__ import annotations

import subprocess
import sys

from bench.claims.common import ROOT, row

MODULES = ("generate", "packing", "microbatches", "resharding", "balance", "prefixes", "turns", "sleep", "critic")


def measured(name: str) -> bool:
    """True if the claim's own process printed its row."""
    command = [sys.executable, "-m", f"bench.claims.{name}"]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0


def main() -> None:
    print(row("what", "published", "here", "task"))
    print(row(*["---"] * 4), flush=True)
    failed = [
        name
        for name in MODULES
        if subprocess.run(
            [sys.executable, "-m", f"bench.claims.{name}"], cwd=ROOT, stderr=subprocess.DEVNULL
        ).returncode
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
