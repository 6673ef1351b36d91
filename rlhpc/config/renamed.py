"""Keys that had another name before the first release. An error on an old key names the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhpc.config.section import Section
from rlhpc.config.site import DiskSection, EfficiencySection
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection, ParallelSection

_FIGURES = {
    "host": "cpu_memory",
    "pass_compute": "forward_compute",
    "pass_launch_us": "forward_launch_us",
    "weight sync": "weight_sync",
}


def _moved(old: str, new: str, section: type[Section]) -> dict[str, str]:
    """Returns the new names of a moved section and of all its keys."""
    found = {old: new}
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= _moved(f"{old}.{key}", f"{new}.{key}", inner)
        else:
            found[f"{old}.{key}"] = f"{new}.{key}"
    return found


def _renamed(section: str, keys: Mapping[str, str], now: str | None = None) -> dict[str, str]:
    return {f"{section}.{old}": f"{now or section}.{new}" for old, new in keys.items()}


_WORKERS = ("time_limit_seconds", "memory_limit_mib", "on_failure", "on_timeout")
_REWARD_MODEL = (
    *("weight", "parallel", "tokens_per_microbatch"),
    *("own_tokenizer", "chat_template", "max_tokens", "too_long"),
)
_OPTIMIZER = {"clip_gradient": "max_grad_norm", "host_fraction": "optimizer_offload_fraction"}
# Dotted key before: dotted key now.
RENAMED: Mapping[str, str] = {
    **_renamed("algorithm", {"correction": "rollout_correction", "discount": "gamma", "gae_decay": "gae_lambda"}),
    "critic.model": "critic.path",
    **_renamed("critic.optimizer", _OPTIMIZER),
    "critic.memory.offload.reference": "reference.memory.offload",
    **_moved("memory", "actor.memory", MemorySection),
    "memory.offload.reference": "reference.memory.offload",
    **_moved("parallel", "actor.parallel", ParallelSection),
    **_moved("planning.disk", "site.disk", DiskSection),
    **_moved("planning.efficiency", "site.efficiency", EfficiencySection),
    **_renamed("planning.efficiency", _FIGURES, now="site.efficiency"),
    "planning.gpus_file": "site.file",
    **_renamed("recovery", {"silence_seconds": "hang_timeout_seconds"}),
    **_renamed("site.efficiency", _FIGURES),
    **_renamed("reshard", {"max_engine_gap": "max_logprob_diff"}),
    **_renamed("reward", dict(zip(_WORKERS, _WORKERS, strict=True)), now="reward_workers"),
    **_renamed("reward.model", dict(zip(_REWARD_MODEL, _REWARD_MODEL, strict=True)), now="rewards.0"),
    "reward": "rewards",
    "reward.function": "rewards.0.function",
    "reward.arguments": "rewards.0.arguments",
    "reward.functions": "rewards",
    "reward.model": "rewards.0.model",
    "reward.model.path": "rewards.0.model",
    "reward.workers": "reward_workers.per_engine",
    **_renamed("rollout", {"gpu_memory_fraction": "gpu_memory_utilization", "max_running": "max_num_seqs"}),
    **_renamed("sft.optimizer", _OPTIMIZER),
    **_moved("train.experts", "actor.moe", MoeSection),
    "train.experts.replay_routes": "actor.moe.router_replay",
    **_moved("train.optimizer", "actor.optimizer", OptimizerSection),
    **_renamed("train.optimizer", _OPTIMIZER, now="actor.optimizer"),
}
# Keys of efficiency and of a GPU's entry in the site file.
RENAMED_FIGURES: Mapping[str, str] = {
    **_FIGURES,
    "host_gbps": "cpu_link_gbps",
    "host_gib": "cpu_memory_gib",
    "host_memory_gbps": "cpu_memory_gbps",
}
# Values of several keys; 0 is any entry of a list.
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "reward_workers.on_failure": {"fail": "error"},
    "reward_workers.on_timeout": {"fail": "error"},
    "rewards.0.too_long": {"cut": "truncate", "fail": "error"},
    "train.dynamic_sampling.shortage": {"fail": "error"},
}


def renamed_keys(key: str, value: Any) -> Iterator[str]:
    """Yields the old keys in the value of an unknown key; a section's key alone if all that is given moved with it."""
    inner = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
    if len(inner) > 1 and _moved_whole(key, value):
        yield key
        return
    found = [old for name, item in inner.items() for old in renamed_keys(name, item)]
    if found or key in RENAMED:
        yield from found or [key]


def _moved_whole(key: str, value: Any) -> bool:
    """Whether all keys given inside still have their names and places in the section."""
    items = value if isinstance(value, dict) else {}
    return all(
        key in RENAMED
        and RENAMED.get(f"{key}.{name}") == f"{RENAMED[key]}.{name}"
        and _moved_whole(f"{key}.{name}", item)
        for name, item in items.items()
    )
