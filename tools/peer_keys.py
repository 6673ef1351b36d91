"""Names of the same key in verl and in TRL's GRPOConfig, for the table of docs/configuration.md.

Read in verl 0.9.1 (trainer/config/_generated_ppo_megatron_trainer.yaml) and TRL 1.16.0 with transformers 5.19.0
(GRPOConfig, TrainingArguments). A key is listed only where the peer's has the same meaning and unit.
"""

from __future__ import annotations

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def _megatron(section: str, prefix: str) -> dict[str, tuple[str, str]]:
    """Keys of a model's parallel layout and of its memory."""
    names = {
        f"{section}parallel.tp": "tensor_model_parallel_size",
        f"{section}parallel.pp": "pipeline_model_parallel_size",
        f"{section}parallel.vpp": "virtual_pipeline_model_parallel_size",
        f"{section}parallel.cp": "context_parallel_size",
        f"{section}parallel.ep": "expert_model_parallel_size",
        f"{section}parallel.etp": "expert_tensor_parallel_size",
        f"{section}parallel.sequence_parallel": "sequence_parallel",
        f"{section}memory.recompute": "override_transformer_config.recompute_granularity",
        f"{section}memory.recompute_modules": "override_transformer_config.recompute_modules",
        f"{section}memory.recompute_layers": "override_transformer_config.recompute_num_layers",
        f"{section}memory.offload.parameters": "param_offload",
        f"{section}memory.offload.optimizer": "optimizer_offload",
    }
    return {key: (f"{prefix}.megatron.{name}", "") for key, name in names.items()}


def _optimizer(section: str, prefix: str, *, trl: bool) -> dict[str, tuple[str, str]]:
    names = {
        "learning_rate": ("lr", "learning_rate"),
        "beta1": ("betas", "adam_beta1"),
        "beta2": ("betas", "adam_beta2"),
        "weight_decay": ("weight_decay", "weight_decay"),
        "max_grad_norm": ("clip_grad", "max_grad_norm"),
        "schedule": ("lr_decay_style", "lr_scheduler_type"),
        "warmup_steps": ("lr_warmup_steps", "warmup_steps"),
    }
    keys = {
        f"{section}.{key}": (f"{prefix}.optim.{verl}", other if trl else "") for key, (verl, other) in names.items()
    }
    return keys | ({f"{section}.epsilon": ("", "adam_epsilon")} if trl else {})


# Key of rlhpc: key of verl, key of TRL; empty where there is none.
PEERS: dict[str, tuple[str, str]] = {
    "name": ("trainer.experiment_name", "run_name"),
    "run_dir": ("trainer.default_local_dir", "output_dir"),
    "seed": ("", "seed"),
    "model.path": ("actor_rollout_ref.model.path", ""),
    "model.dtype": (f"{_ACTOR}.megatron.dtype", ""),
    "resources.ranks_per_node": ("trainer.n_gpus_per_node", ""),
    "slurm.nodes": ("trainer.nnodes", ""),
    **_megatron("actor.", _ACTOR),
    "data.train": ("data.train_files", ""),
    "data.validation": ("data.val_files", ""),
    "data.max_prompt_tokens": ("data.max_prompt_length", ""),
    "data.overlong_prompts": ("data.truncation, data.filter_overlong_prompts", ""),
    "data.shuffle": ("data.shuffle", "shuffle_dataset"),
    "data.template_arguments": ("data.apply_chat_template_kwargs", "chat_template_kwargs"),
    "rewards[].function": ("reward.custom_reward_function.path, name", ""),
    "rewards[].weight": ("", "reward_weights"),
    "rewards[].model": ("reward.reward_model.model_path", ""),
    "rollout.tp": (f"{_ROLLOUT}.tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    "rollout.samples_per_prompt": (f"{_ROLLOUT}.n", "num_generations"),
    "rollout.max_response_tokens": ("data.max_response_length", "max_completion_length"),
    "rollout.temperature": (f"{_ROLLOUT}.temperature", "temperature"),
    "rollout.top_p": (f"{_ROLLOUT}.top_p", "top_p"),
    "rollout.max_turns": (f"{_ROLLOUT}.multi_turn.max_assistant_turns", ""),
    "rollout.max_calls_per_turn": (f"{_ROLLOUT}.multi_turn.max_parallel_calls", ""),
    "rollout.max_num_seqs": (f"{_ROLLOUT}.max_num_seqs", ""),
    "rollout.gpu_memory_utilization": (f"{_ROLLOUT}.gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "rollout.prefix_caching": (f"{_ROLLOUT}.enable_prefix_caching", ""),
    "rollout.chunked_prefill": (f"{_ROLLOUT}.enable_chunked_prefill", ""),
    "rollout.cuda_graphs": (f"not {_ROLLOUT}.enforce_eager", ""),
    "rollout.engine": (f"{_ROLLOUT}.engine_kwargs.vllm", ""),
    "reshard.bucket_mib": (f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", ""),
    "algorithm.name": (f"algorithm.adv_estimator, {_ACTOR}.policy_loss.loss_mode", "loss_type"),
    "algorithm.clip_low": (f"{_ACTOR}.clip_ratio_low", "epsilon"),
    "algorithm.clip_high": (f"{_ACTOR}.clip_ratio_high", "epsilon_high"),
    "algorithm.dual_clip": (f"{_ACTOR}.clip_ratio_c", "delta"),
    "algorithm.normalise_std": ("algorithm.norm_adv_by_std_in_grpo", "scale_rewards"),
    "algorithm.gamma": ("algorithm.gamma", ""),
    "algorithm.gae_lambda": ("algorithm.lam", ""),
    "algorithm.aggregation": (f"{_ACTOR}.loss_agg_mode", "loss_type"),
    "algorithm.aggregation_length": (f"{_ACTOR}.loss_scale_factor", ""),
    "algorithm.kl.coefficient": (f"{_ACTOR}.kl_loss_coef, algorithm.kl_ctrl.kl_coef", "beta"),
    "algorithm.kl.estimator": (f"{_ACTOR}.kl_loss_type, algorithm.kl_penalty", ""),
    "algorithm.kl.placement": (f"{_ACTOR}.use_kl_loss, algorithm.use_kl_in_reward", ""),
    "algorithm.kl.target": ("algorithm.kl_ctrl.target_kl", ""),
    "algorithm.kl.horizon": ("algorithm.kl_ctrl.horizon", ""),
    "algorithm.entropy_coefficient": (f"{_ACTOR}.entropy_coeff", "entropy_coef"),
    "algorithm.rollout_correction.method": (
        "algorithm.rollout_correction.rollout_is, rollout_rs",
        "vllm_importance_sampling_mode",
    ),
    "algorithm.rollout_correction.low": (
        "algorithm.rollout_correction.rollout_rs_threshold",
        "vllm_importance_sampling_clip_min",
    ),
    "algorithm.rollout_correction.high": (
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_importance_sampling_clip_max",
    ),
    "critic.path": ("critic.model.path", ""),
    **_megatron("critic.", "critic"),
    **_optimizer("critic.optimizer", "critic", trl=False),
    "critic.tokens_per_microbatch": ("critic.ppo_max_token_len_per_gpu", ""),
    "critic.warmup_steps": ("trainer.critic_warmup", ""),
    "critic.value_clip": ("critic.cliprange_value", ""),
    "train.steps": ("trainer.total_training_steps", "max_steps"),
    "train.prompts_per_step": ("data.train_batch_size", ""),
    "train.epochs": (f"{_ACTOR}.ppo_epochs", "num_iterations"),
    "train.shuffle": (f"{_ACTOR}.shuffle", ""),
    "train.tokens_per_microbatch": (f"{_ACTOR}.ppo_max_token_len_per_gpu", ""),
    "train.log_prob_tokens_per_microbatch": (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", ""),
    "train.mask_truncated": ("", "mask_truncated_completions"),
    "train.dynamic_sampling.metric": ("algorithm.filter_groups.metric", ""),
    "train.dynamic_sampling.max_batches": ("algorithm.filter_groups.max_num_gen_batches", ""),
    **_optimizer("actor.optimizer", _ACTOR, trl=True),
    "actor.moe.aux_loss": ("", "router_aux_loss_coef"),
    "actor.moe.router_replay": (f"{_ACTOR}.megatron.router_replay.mode", ""),
    "validation.every": ("trainer.test_freq", "eval_steps"),
    "validation.temperature": (f"{_ROLLOUT}.val_kwargs.temperature", ""),
    "validation.samples_per_prompt": (f"{_ROLLOUT}.val_kwargs.n", "num_generations_eval"),
    "validation.max_prompts": ("data.val_max_samples", ""),
    "checkpoint.every": ("trainer.save_freq", "save_steps"),
    "checkpoint.keep": ("trainer.max_actor_ckpt_to_keep", "save_total_limit"),
    "checkpoint.asynchronous": (f"{_ACTOR}.checkpoint.async_save", ""),
    "checkpoint.keep_best": ("", "metric_for_best_model"),
    "checkpoint.greater_is_better": ("", "greater_is_better"),
    "observe.samples": ("trainer.log_val_generations", ""),
    "profile.steps": ("global_profiler.steps", ""),
    "profile.ranks": (f"{_ACTOR}.profiler.ranks", ""),
    "profile.tools": ("global_profiler.tool", ""),
}
