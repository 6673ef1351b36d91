"""Keys that had another name before the first release. An error on an old key names the new one."""

from __future__ import annotations

from collections.abc import Mapping

_OPTIMIZER = {"clip_gradient": "max_grad_norm", "host_fraction": "optimizer_offload_fraction"}
_SECTIONS = {
    "algorithm": {"correction": "rollout_correction", "discount": "gamma", "gae_decay": "gae_lambda"},
    "critic.optimizer": _OPTIMIZER,
    "site.efficiency": {
        "host": "cpu_memory",
        "pass_compute": "forward_compute",
        "pass_launch_us": "forward_launch_us",
        "weight sync": "weight_sync",
    },
    "recovery": {"silence_seconds": "hang_timeout_seconds"},
    "reshard": {"max_engine_gap": "max_logprob_diff"},
    "rollout": {"gpu_memory_fraction": "gpu_memory_utilization", "max_running": "max_num_seqs"},
    "sft.optimizer": _OPTIMIZER,
    "train.experts": {"replay_routes": "router_replay"},
    "train.optimizer": _OPTIMIZER,
}
# Dotted key before: dotted key now.
RENAMED: Mapping[str, str] = {
    **{f"{section}.{old}": f"{section}.{new}" for section, keys in _SECTIONS.items() for old, new in keys.items()},
    "planning.disk": "site.disk",
    "planning.efficiency": "site.efficiency",
    "planning.gpus_file": "site.file",
}
# Keys of efficiency and of a GPU's entry in the site file.
RENAMED_FIGURES: Mapping[str, str] = {
    **_SECTIONS["site.efficiency"],
    "host_gbps": "cpu_link_gbps",
    "host_gib": "cpu_memory_gib",
    "host_memory_gbps": "cpu_memory_gbps",
}
# Values of several keys.
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "reward.model.too_long": {"cut": "truncate", "fail": "error"},
    "reward.on_failure": {"fail": "error"},
    "reward.on_timeout": {"fail": "error"},
    "train.dynamic_sampling.shortage": {"fail": "error"},
}
