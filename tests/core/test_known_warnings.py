"""Known warnings of other packages are hidden, others and ours are shown."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WARNINGS = """
import logging, sys, types, warnings
from rlhpc.core.known_warnings import hide_known_warnings, without_native_lines
hide_known_warnings()

def warn(module, message, category=UserWarning):
    warnings.warn_explicit(message, category, "file.py", 1, module=module)

warn("megatron.core.models.backends", "Apex is not installed. Falling back to Torch Norm")
warn("megatron.core.models.backends", "Apex is not installed. OTHER MESSAGE")
warn("megatron.core.models.backends", "Apex is not installed. Falling back to CATEGORY", RuntimeWarning)
warn("mine", "Apex is not installed. Falling back to MODULE")
log = logging.getLogger("vllm.triton_utils.importing")
log.warning("Triton is installed, but doesn't include CPU backend. Disabling Triton.")
log.warning("LOG: %s", "other")
with without_native_lines("NUMA binding"):
    import os
    os.write(2, b"[W1 utils.cpp:68] Warning: NUMA binding: nodes (0).\\n[W1 utils.cpp:68] Warning: NATIVE\\n")
"""
SHOWN = ("OTHER MESSAGE", "Falling back to CATEGORY", "Falling back to MODULE", "LOG: other", "NATIVE")
HIDDEN = ("Torch Norm", "include CPU backend", "NUMA binding")


@pytest.mark.parametrize("options", [[], ["-W", "default"]], ids=["", "asked for"])
def test_only_known_warnings_are_hidden(options):
    done = subprocess.run(
        [sys.executable, *options, "-c", WARNINGS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [text for text in SHOWN if text not in done.stderr] == []
    assert [text for text in HIDDEN if text in done.stderr] == (list(HIDDEN) if options else [])
