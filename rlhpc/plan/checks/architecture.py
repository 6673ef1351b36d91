"""Support of an architecture by the installed vLLM, and the proof that the FSDP back end computes it correctly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlhpc.checkpoint.formats.described import resolve_backend
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.models import read_config


@dataclass(frozen=True)
class ProbeResult:
    """``reason``: why it does not work, in one line. ``longest``: maximum tokens of a document, None without limit.
    ``differences``: largest ones found, by what was compared."""

    works: bool
    reason: str = ""
    longest: int | None = None
    differences: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Any) -> ProbeResult:
        """Inverse of ``as_json``. Raises ValueError for anything else."""
        fields = {"works": bool, "reason": str, "longest": int | None, "differences": dict}
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise ValueError("not the result of a probe")
        if not all(isinstance(value[name], kind) for name, kind in fields.items()):
            raise ValueError("not the result of a probe")
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return asdict(self)

    def check(self, tokens: int, where: str = "model.path") -> None:
        """Raises UserError if the architecture does not work, or not for documents of ``tokens`` tokens."""
        if not self.works:
            raise UserError(
                f"train.backend fsdp cannot train this architecture: {self.reason}",
                where=where,
                remedy="use another model (docs/models.md)",
            )
        if self.longest is not None and tokens > self.longest:
            raise UserError(
                f"{tokens} tokens of a prompt with its response, but beyond {self.longest} the rotary embedding "
                "depends on the other documents of a batch",
                where="rollout.max_response_tokens",
                remedy="lower it or data.max_prompt_tokens, or set model.rope_tokens",
            )


def probed_folders(config: RunConfig) -> dict[str, Path]:
    """Folders of the models that a run trains or evaluates on the FSDP back end, by their keys; without those that are
    not there yet, and those whose own code is trusted."""
    folders: dict[str, Path | None] = {"model.path": config.model.path}
    if config.algorithm.name in WITH_CRITIC:
        folders["critic.path"] = config.critic.path
    if config.reward_model is not None:
        folders[f"{config.reward_model_key}.model"] = config.reward_model.model
    there = {key: folder for key, folder in folders.items() if folder and (folder / "config.json").is_file()}
    found = {key: folder for key, folder in there.items() if not has_own_code(config, folder)}
    with suppress(UserError):  # of a model that other checks refuse
        return found if resolve_backend(config) == "fsdp" else {}
    return {}


def has_own_code(config: RunConfig, folder: Path) -> bool:
    """True if transformers would run code of the folder: model.trust_remote_code."""
    return config.model.trust_remote_code and "auto_map" in read_config(folder)


def check_results(config: RunConfig, results: Mapping[str, ProbeResult]) -> None:
    """Raises UserError for what the proofs, by the models' keys, refuse."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for key, result in results.items():
        # Fixed RoPE depends on no length.
        known = result if config.model.rope_tokens is None else replace(result, longest=None)
        known.check(longest, key)


ServedBy = Literal["native", "transformers", "no"]
_SECONDS = 300.0  # imports from a busy file system
_ANSWERS: dict[str, ServedBy] = {"native": "native", "transformers": "transformers", "no": "no"}


@cache
def served_by(architecture: str) -> ServedBy | None:
    """vLLM's way of serving an architecture: its own model, its Transformers back end, or none. None where
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
