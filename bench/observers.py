"""CPU time that a run spends on recording itself, over all ranks, in steps of the demo. No tracker runs in a rank.

``python -m bench.observers [STEPS]``: steps of RL (default 300), to which the limit applies, after 30 supervised steps.
These take 40 ms of CPU time on each rank, and their recording 1.4 ms, which is no longer for larger models.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, WARM_UP, LIMIT = 300, 30, 0.005


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory() as folder:
        records = _run(Path(folder) / "run", WARM_UP, steps)
    print(f"CPU time of observers on all ranks, {steps} steps of the demo; limit: {LIMIT:.1%} of the ranks' CPU time")
    share = 0.0
    for phase in ("sft", "rl"):
        own = [record for record in records if record["phase"] == phase and "observe/cpu_seconds" in record]
        observers = sum(record["observe/cpu_seconds"] for record in own)
        ranks = sum(record["observe/cpu_seconds"] / record["observe/cpu_share"] for record in own)
        share = observers / ranks
        _show(f"{len(own)} steps of {phase}", observers, ranks, len(own))
    if share > LIMIT:  # of RL
        sys.exit("above the limit")


def _run(folder: Path, sft: int, rl: int) -> list[dict]:
    changes = [f"sft.steps={sft}", f"train.steps={rl}", "checkpoint.every=0"]
    command = [sys.executable, "-m", "rlhpc.cli.main", "run", "configs/demo.yaml", *changes, "--run-dir", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _show(what: str, observers: float, ranks: float, steps: int) -> None:
    each = 1000 * observers / steps
    print(f"  {what:<20}{observers:8.3f} s of {ranks:8.1f} s   {observers / ranks:7.3%}   {each:.2f} ms a step")


if __name__ == "__main__":
    main()
