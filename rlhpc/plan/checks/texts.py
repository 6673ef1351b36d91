"""Layouts, batches and model of a run in words."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import layout_text
from rlhpc.plan.checks.judges import judge_parallels
from rlhpc.plan.checks.placement import check_roles
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import Backend, backend_for, judge_ranks
from rlhpc.sharding.shards import num_parameters


def layouts_text(config: RunConfig, layout: ParallelLayout, shape: ModelDescription | None) -> str:
    world_size, backend = config.world_size, backend_for(config, shape)
    roles = check_roles(config, world_size)
    texts = [f"training {layout_text(backend, config.actor.parallel, layout.world_size, shape)}"]
    if config.critic.parallel is not None and config.critic.on == "trainers":
        texts.append(f"critic {layout_text(backend, config.critic.parallel, layout.world_size, shape)}")
    texts.append(f"rollout {roles.num_engines} engine(s) of tp {config.rollout.tp}{_with_models(config)}")
    if roles.separate:
        judges = _judge_texts(config, backend) if roles.judges else []
        judged = [f"{roles.judges.size} for {', '.join(judges)}"] if roles.judges else []
        texts = [f"{roles.trainers.size} for {'; '.join(texts[:-1])}", *judged, f"{roles.engines.size} for {texts[-1]}"]
        texts[-1] += f", staleness up to {config.asynchrony.max_staleness}"
    if roles.lends:
        texts[0] += f", which lend {roles.num_lenders} engine(s)"
    return f"{world_size} ranks on {config.slurm.most_nodes} node(s): {'; '.join(texts)}"


def _judge_texts(config: RunConfig, backend: Backend) -> list[str]:
    ranks = judge_ranks(config)
    return [f"{name} {layout_text(backend, found, ranks, None)}" for name, found in judge_parallels(config).items()]


def _with_models(config: RunConfig) -> str:
    names = ["the reference"] if config.reference_on == "engines" and config.algorithm.kl.coefficient > 0 else []
    names += ["the reward model"] if config.reward_model_on == "engines" else []
    return f" with {' and '.join(names)}" if names else ""


def batch_text(config: RunConfig) -> str:
    train, rollout = config.train, config.rollout
    texts = []
    if config.sft is not None:
        texts.append(f"sft {config.sft.steps} steps of {config.sft.sequences_per_step} sequences")
    if train.steps:
        texts.append(
            f"rl {train.steps} steps of {train.prompts_per_step} prompts x {rollout.samples_per_prompt} samples in "
            f"{train.minibatches} minibatch(es)"
        )
    if config.evaluates_only:
        texts.append(f"{config.validation.samples_per_prompt} response(s) to each validation prompt")
    return "; ".join(texts)


def model_text(shape: ModelDescription) -> str:
    return (
        f"{shape.architecture}, {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{num_parameters(shape) / 1e6:,.1f} M parameters"
    )
