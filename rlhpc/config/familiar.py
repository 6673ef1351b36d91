"""Names that other toolkits, common habit and earlier versions give to keys. An error on one names the key of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_RATES = ("lr", "learning_rate", "optim.lr", "optimizer.lr", "optimizer.learning_rate")
_CLIPS = ("clip_grad", "grad_clip", "max_grad_norm", "optim.clip_grad", "optimizer.clip_grad", "optimizer.grad_clip")
_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}


def _of_model(section: str) -> dict[str, str]:
    """Names of a model's settings where ``section`` is on the way to them."""
    return {
        **{f"{section}.{name}": f"{section}.optimizer.learning_rate" for name in _RATES},
        **{f"{section}.{name}": f"{section}.optimizer.max_grad_norm" for name in _CLIPS},
        f"{section}.weight_decay": f"{section}.optimizer.weight_decay",
    }


# End of a dotted key: our key. The longest end counts, so that critic.optim.lr is the critic's.
FAMILIAR: Mapping[str, str] = {
    **dict.fromkeys(_RATES, "actor.optimizer.learning_rate"),
    **dict.fromkeys(_CLIPS, "actor.optimizer.max_grad_norm"),
    "weight_decay": "actor.optimizer.weight_decay",
    **_of_model("critic"),
    **_of_model("sft"),
    **{name: f"actor.parallel.{axis}" for name, axis in _AXES.items()},
    **{f"critic.megatron.{name}": f"critic.parallel.{axis}" for name, axis in _AXES.items()},
    "actor_rollout_ref.model.path": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "critic.model.path": "critic.path",
    "data.train_files": "data.train",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "val_files": "data.validation",
    "eval_dataset": "data.validation",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_input_seq_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "total_training_steps": "train.steps",
    "max_steps": "train.steps",
    "max_num_steps": "train.steps",
    "train_batch_size": "train.prompts_per_step",
    "generation_batch_size": "train.prompts_per_step",
    "num_prompts_per_step": "train.prompts_per_step",
    "rollout.n": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_per_prompt": "rollout.samples_per_prompt",
    "ppo_mini_batch_size": "train.minibatches",
    "steps_per_generation": "train.minibatches",
    "ppo_epochs": "train.epochs",
    "num_iterations": "train.epochs",
    "actor.shuffle": "train.shuffle",
    "critic.shuffle": "train.shuffle",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "train.tokens_per_microbatch",
    "per_device_train_batch_size": "train.tokens_per_microbatch",
    "train_micro_batch_size": "train.tokens_per_microbatch",
    "mask_truncated_completions": "train.mask_truncated",
    "overlong_filtering": "train.mask_truncated",
    "filter_groups": "train.dynamic_sampling",
    "use_dynamic_sampling": "train.dynamic_sampling",
    "adv_estimator": "algorithm.name",
    "loss_mode": "algorithm.name",
    "loss_type": "algorithm.name",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "ratio_clip_min": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "ratio_clip_max": "algorithm.clip_high",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "beta": "algorithm.kl.coefficient",
    "reference_policy_kl_penalty": "algorithm.kl.coefficient",
    "lam": "algorithm.gae_lambda",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction",
    "use_importance_sampling_correction": "algorithm.rollout_correction",
    "custom_reward_function": "rewards.0.function",
    "reward_funcs": "rewards.0.function",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "vllm_tensor_parallel_size": "rollout.tp",
    "tensor_parallel_size": "rollout.tp",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.sampling.top_k",
    "min_p": "rollout.sampling.min_p",
    "repetition_penalty": "rollout.sampling.repetition_penalty",
    "presence_penalty": "rollout.sampling.presence_penalty",
    "frequency_penalty": "rollout.sampling.frequency_penalty",
    "stop_strings": "rollout.sampling.stop",
    "stop_token_ids": "rollout.sampling.stop_token_ids",
    "logit_bias": "rollout.sampling.logit_bias",
    "bad_words": "rollout.sampling.bad_words",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_period": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "metric_for_best_model": "checkpoint.keep_best",
    "load_best_model_at_end": "checkpoint.keep_best",
    "greater_is_better": "checkpoint.greater_is_better",
    "test_freq": "validation.every",
    "eval_steps": "validation.every",
    "val_period": "validation.every",
    "nnodes": "slurm.nodes",
    "num_nodes": "slurm.nodes",
    "n_gpus_per_node": "resources.ranks_per_node",
    "cluster.gpus_per_node": "resources.ranks_per_node",
    # Former names.
    "observe.training_samples.most_mib": "observe.training_samples.max_mib",
    "speculative.least_acceptance": "rollout.speculative.min_acceptance",
    "speculative.shortest_match": "rollout.speculative.min_match",
    "speculative.longest_match": "rollout.speculative.max_match",
}
# Former keys, without list indices, and what happens now.
FIXED: Mapping[str, str] = {
    "observe.alerts.rules.builtin": "a rule replaces the built-in one of its `name`",
    "observe.alerts.rules.command": "observe.alerts.command runs for all alerts",
    "observe.alerts.rules.condition": "a rule has `above` or `below`, and `of`",
    "observe.alerts.rules.limit": "a rule has `above` or `below`, and `of`",
    "observe.alerts.rules.webhook": "observe.alerts.webhook gets all alerts",
    "observe.alerts.rules.window": "a rule has `steps` and `minutes`",
    "observe.alerts.timeout_seconds": "a command or request has 10 seconds",
    "observe.device_seconds": "each GPU is read every 5 seconds",
    "observe.html_every": "the page is renewed every 50 steps",
    "observe.prometheus": "a tracker of your own can write Prometheus's text file (docs/watch.md)",
    "observe.timeline_steps": "the newest 200 steps are kept",
    "profile.max_mib": "profiles stay until you delete them",
    "profile.phases": "a profile has the whole step, with its phases as ranges",
    "recovery.stranger": "the run ends",
    "rollout.speculative.pause": "an engine pauses for 16384 tokens first",
    "rollout.speculative.window": "acceptance is taken over 128 guesses",
    "site.efficiency.forward_compute": "`rlhpc plan calibrate` writes site.efficiency.phases.log_probs",
    "site.efficiency.forward_launch_us": "`rlhpc plan calibrate` writes site.efficiency.phases.log_probs",
    "site.efficiency.weight_sync": "`rlhpc plan calibrate` writes site.efficiency.phases.weight_sync",
    "slurm.gpu_check_seconds": "a GPU has 120 seconds",
}


def familiar_key(key: str) -> str | None:
    """Returns our key for a dotted one of another toolkit; None if it is not known, or ours already."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    ours = next((FAMILIAR[end] for end in ends if end in FAMILIAR), None)
    return ours if ours != key else None


def familiar_keys(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the familiar keys in the value of an unknown key, each with ours, in the value's order."""
    ours = familiar_key(key)
    if ours is not None:
        yield key, ours
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from familiar_keys(f"{key}.{name}", item)
