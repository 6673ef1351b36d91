"""The measurement itself, on whatever device is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks


def test_a_small_model_is_measured() -> None:
    command = [sys.executable, "-m", "tools.mfu", "tiny", "--lengths", "48", "16", "--micro-batches", "2"]
    done = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens_per_step"] == 128
    assert len(result["seconds"]) == 3
    assert result["tflops"] > 0
    assert (result["mfu"] is None) == (result["device"] == "CPU")
