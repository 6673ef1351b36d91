"""Starts `rlhpc run` on the demo's task, as a user does."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import session

ROOT = Path(__file__).parents[2]


@functools.cache
def _demo_inputs() -> Path:
    """The demo's inputs, made once. A run that makes its own imports PyTorch in its launcher: five seconds of CPU."""
    from rlhpc.data import arithmetic

    folder = tempfile.mkdtemp(prefix="inputs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    arithmetic.make(f"{folder}/demo")
    os.chmod(f"{folder}/demo", 0o755)  # for other users in tests
    return Path(folder, "demo")


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config of a small arithmetic run to ``folder``. ``changes``: dotted keys, with __ for the dot.

    In tests that start runs also what the run's prepare function makes.
    """
    inputs = folder / "inputs"
    other = inputs.exists() or any(key.startswith("prepare") for key in changes)
    if session.starts("vllm", "slurm") and not other:
        shutil.copytree(_demo_inputs(), inputs)
    config: dict[str, Any] = {
        "name": "small",
        "run_dir": str(folder / "run"),
        "prepare": {"function": "rlhpc.data.arithmetic:make", "arguments": {"folder": str(inputs)}},
        "model": {"path": str(inputs / "model"), "dtype": "float32"},
        "data": {
            "train": [str(inputs / "train.parquet")],
            "validation": [str(inputs / "validation.jsonl")],
            "max_prompt_tokens": 16,
        },
        "actor": {"optimizer": {"learning_rate": 5e-4}},
        "rewards": [{"function": "rlhpc.rewards.rules:number"}],
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 6, "kv_cache_gib": 0.0625},
        "sft": {
            "data": [str(inputs / "sft.jsonl")],
            "steps": 3,
            "sequences_per_step": 32,
            "optimizer": {"learning_rate": 1e-3},
        },
        "train": {"steps": 3, "prompts_per_step": 16},
        "validation": {"every": 100, "max_prompts": 32},
        "checkpoint": {"every": 0},
    }
    for key, value in changes.items():
        section: Any = config
        parts = key.split("__")
        for part in parts[:-1]:
            section = section[int(part)] if isinstance(section, list) else section.setdefault(part, {})
        if isinstance(section, list):  # an item, or another one
            place = int(parts[-1])
            section[place : place + 1] = [value]
        else:
            section[parts[-1]] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def start(config: Path, *options: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `rlhpc run config …` with its output piped and further environment variables."""
    session.need("ranks", "vllm")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "rlhpc.cli.main", "run", str(config), *options],
        env={**os.environ, "PYTHONPATH": path, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 900) -> tuple[int, str]:
    """Wait for the end; returns exit code and output."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, output


def run(config: Path, *options: str) -> tuple[int, str]:
    """Run to the end; returns exit code and output."""
    return finish(start(config, *options))


def complete(config: Path, *options: str) -> str:
    """Run to the end, which must be a success; returns the output."""
    code, output = run(config, *options)
    assert code == 0, output
    return output


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Records of metrics.jsonl so far, without a line that is still being written."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
