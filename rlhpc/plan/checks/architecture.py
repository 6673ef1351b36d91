"""The proof that the FSDP back end computes an architecture as transformers does: of which models, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_backend
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
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
    """Whether transformers would run code of the folder: model.trust_remote_code."""
    return config.model.trust_remote_code and "auto_map" in read_config(folder)


def check_results(config: RunConfig, results: Mapping[str, ProbeResult]) -> None:
    """Raises UserError for what the proofs, by the models' keys, refuse."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for key, result in results.items():
        # Fixed RoPE depends on no length.
        known = result if config.model.rope_tokens is None else replace(result, longest=None)
        known.check(longest, key)
