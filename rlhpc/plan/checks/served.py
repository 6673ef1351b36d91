"""Whether the installed vLLM serves a model's architecture; asked in a process of its own, which imports vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Literal

from rlhpc.core import env
from rlhpc.core.errors import UserError

ServedBy = Literal["native", "transformers", "no"]
_SECONDS = 300.0  # imports from a busy file system
_ANSWERS: dict[str, ServedBy] = {"native": "native", "transformers": "transformers", "no": "no"}


@cache
def served_by(architecture: str) -> ServedBy | None:
    """Whether vLLM serves an architecture by its own model, by its Transformers back end, or not at all; None where
    vLLM is not installed or does not start, as on a login node."""
    if find_spec("vllm") is None:
        return None
    command = [sys.executable, "-m", "rlhpc.rollout.served", architecture]
    environ = {**os.environ, env.VLLM_LOGGING_LEVEL: "ERROR"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    last = done.stdout.split()[-1:] if done.returncode == 0 else []
    return _ANSWERS.get(last[0]) if last else None


def check_served(architecture: str, where: str) -> ServedBy | None:
    """``served_by``; raises UserError for an architecture that vLLM does not serve. ``where``: of the model."""
    found = served_by(architecture)
    if found == "no":
        raise UserError(
            f"the installed vLLM does not serve {architecture}",
            where=where,
            remedy="use another model, or install a version of vLLM that serves it",
        )
    return found
