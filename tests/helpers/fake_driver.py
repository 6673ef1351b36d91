"""A stand-in for CUDA's driver library, for real processes that look at the GPUs of a machine without any."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build_driver(folder: Path) -> Path:
    """Compiles it into a folder for LD_LIBRARY_PATH, and returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return folder


def gpu_lines(states: Sequence[str]) -> str:
    """Contents of a file of FAKE_GPUS: GPUs in these states, each with a UUID of its own."""
    return "".join(f"{number + 0xA0:032x} {state}\n" for number, state in enumerate(states))


def uuid_of(number: int) -> str:
    return f"00000000-0000-0000-0000-{number + 0xA0:012x}"
