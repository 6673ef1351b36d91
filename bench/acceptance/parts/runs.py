"""Runs inside a part, started like ``rlhpc run``. Torch-free: ranks are separate processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import read_attempt
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.records import Record, parse_records
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.worker.main import TRAINER

_SHOWN_BYTES = 16 << 10  # end of a rank's log printed after a failure
_POLL_SECONDS = 0.02


def configure(fields: Mapping[str, Any]) -> RunConfig:
    """Config from nested keys, validated like a file; of one rank, on a machine with several GPUs too, unless they set
    it."""
    return RunConfig.model_validate_json(json.dumps({"resources": {"ranks_per_node": 1}, **fields}), strict=True)


def run(config: RunConfig, *, resume: bool = False, entry: str = TRAINER) -> list[Record]:
    """Run to the end and return the lines of metrics.jsonl. Raises RuntimeError after printing the ranks' logs."""
    code = run_here(config, resume=resume, entry=entry)
    if code:
        show_logs(config)
        raise RuntimeError(f"the run ended with exit code {code}")
    return records(config)


def run_and_kill(config: RunConfig, after_records: int) -> None:
    """Run, and kill the first rank (SIGKILL) after ``after_records`` records."""
    folder, over = RunFolder(config.folder), threading.Event()
    killed = False

    def kill() -> None:
        nonlocal killed
        while not over.wait(_POLL_SECONDS):
            if len(records(config)) >= after_records:
                os.kill(read_starts(newest_attempt(folder).exits)[0].process.pid, signal.SIGKILL)
                killed = True
                return

    watch = threading.Thread(target=kill, name="kill", daemon=True)
    watch.start()
    code = run_here(config)
    over.set()
    watch.join()
    if not killed or code == 0:
        show_logs(config)
        raise RuntimeError(f"the run ended with exit code {code} before it was killed after {after_records} records")


def records(config: RunConfig) -> list[Record]:
    """Lines of metrics.jsonl so far."""
    try:
        return parse_records(RunFolder(config.folder).metrics.read_bytes())
    except FileNotFoundError:
        return []


def newest_attempt(folder: RunFolder) -> AttemptFolder:
    numbers = [int(path.name) for path in folder.attempts.iterdir() if read_attempt(AttemptFolder(path))]
    return folder.attempt(max(numbers))


def show_logs(config: RunConfig) -> None:
    """Print the end of each rank's log of the last attempt."""
    for file in sorted(newest_attempt(RunFolder(config.folder)).logs.glob("*.out")):
        print(f"----- {file.name}\n{_end(file)}", flush=True)


def _end(file: Path) -> str:
    return file.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
