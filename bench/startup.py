"""Startup time of the command line vs. bare Python, as on a login node."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlhpc.data.arithmetic import make

ROUNDS = 11
CONFIG = """
name: startup
model: {{path: {folder}/model, dtype: float32}}
data: {{train: [{folder}/train.parquet], max_prompt_tokens: 16}}
rollout: {{max_response_tokens: 8}}
train: {{steps: 1}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "inputs"
        make(str(folder))
        config = Path(name) / "config.yaml"
        config.write_text(CONFIG.format(folder=folder))
        commands = {
            "python -c pass": ["-c", "pass"],
            "rlhpc --help": ["-m", "rlhpc.cli.main", "--help"],
            "rlhpc run cfg --check": ["-m", "rlhpc.cli.main", "run", str(config), "--check"],
        }
        seconds: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(ROUNDS):  # alternating, so that changes of the machine's speed affect all
            for label, arguments in commands.items():
                seconds[label].append(_time([sys.executable, *arguments]))
    bare = statistics.median(seconds["python -c pass"])
    print(f"startup, median of {ROUNDS}; limit: 0.3 s more than bare Python")
    for label, values in seconds.items():
        median = statistics.median(values)
        print(f"  {label:<24}{median:7.3f} s   {median - bare:+.3f} s")


def _time(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
