"""Checks which back end trains, its mesh or layout, and the keys that only the other one has."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.checkpoint.formats.described import family_refusal
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.model_settings import actor_settings, critic_settings
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection, ParallelSection
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.parallelism import Suits, fitting_layout
from rlhpc.sharding.layout import ContextChoice, ContextMethod, ParallelLayout, choose_context_method, make_layout
from rlhpc.sharding.mesh_sizes import MeshSizes, make_mesh_sizes, mesh_layout
from rlhpc.sharding.placement import Backend, backend_for

# Keys of each section of the actor that one back end alone has.
MEGATRON_KEYS = {
    "parallel": (
        *("tp", "pp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers"),
        *("expert_dispatch", "sequence_parallel"),
    ),
    "memory": ("recompute_layers",),
    "optimizer": ("optimizer_offload_fraction",),
}
FSDP_KEYS = {"parallel": ("dp_replicate",), "memory": ("reshard_after_forward", "accumulation", "cpu_offload")}
_OFFLOADED = ("parameters", "gradients", "optimizer")
_MEGATRON = ", or use train.backend megatron"
# Why Megatron's back end has no such optimizer.
_WITHOUT = {
    "adamw8bit": "whose checkpoints contain moments in float32 alone",
    "muon": "whose optimizer cuts matrices anywhere over the data-parallel ranks",
}


def check_backend(config: RunConfig, model: ModelDescription | None) -> None:
    """Refuses keys without effect in the back end. ``model``: the actor's; None if it has yet to be made, with which
    auto leaves the back end open."""
    if model is None and config.train.backend == "auto":
        return
    fsdp = backend_for(config, model) == "fsdp"
    found = _fsdp_faults(config) if fsdp else _megatron_faults(config)
    Faults(_without_megatron(error, model) if fsdp else error for error in found).raise_all()


def model_layout(
    backend: Backend,
    parallel: ParallelSection,
    world_size: int,
    model: ModelDescription | None,
    suits: Suits | None = None,
) -> ParallelLayout:
    """Returns the configured layout of one model, by the back end; of a mesh, which ranks share a batch.

    Raises UserError, naming keys of the actor, if it does not fit ranks or model. ``suits``: see ``fitting_layout``.
    """
    if backend == "fsdp":
        try:
            return mesh_layout(_fitting_mesh(parallel, world_size, model))
        except UserError as error:
            raise _without_megatron(error, model) from None
    assert model is None or isinstance(model, ModelShape), "megatron trains known families"
    return fitting_layout(parallel, world_size, model, suits)


def _fitting_mesh(parallel: ParallelSection, world_size: int, model: ModelDescription | None) -> MeshSizes:
    sizes = make_mesh_sizes(parallel, world_size)
    if model is not None and parallel.cp_method == "ulysses" and model.num_heads % sizes.cp:
        raise UserError(
            f"{sizes.cp} does not divide the model's {model.num_heads} attention heads, as cp_method ulysses needs",
            where="actor.parallel.cp",
            remedy="set cp_method to auto",
        )
    return sizes


def backend_text(config: RunConfig, model: ModelDescription) -> str:
    """The back end and, for auto, the reason."""
    backend = backend_for(config, model)
    if config.train.backend != "auto":
        return f"{backend} (train.backend)"
    if isinstance(model, ModelShape):
        return f"{backend}, for the known family {model.family}"
    return f"{backend}: no family for megatron ({family_refusal(config)})"


def layout_text(backend: Backend, parallel: ParallelSection, world_size: int, model: ModelDescription | None) -> str:
    """The sizes of one model's layout, with the exchange of context-parallel ranks. The layout has been checked."""
    if backend == "megatron":
        return make_layout(parallel, world_size).text
    sizes = make_mesh_sizes(parallel, world_size)
    if sizes.cp == 1 or model is None:
        return sizes.text
    choice = context_choice(parallel, model)
    return f"{sizes.text} ({choice.method.replace('_', '-')}: {choice.reason})"


def context_choice(parallel: ParallelSection, model: ModelDescription) -> ContextChoice:
    """The exchange of context-parallel ranks with FSDP2."""
    requested: ContextMethod | None = None if parallel.cp_method == "auto" else parallel.cp_method
    return choose_context_method(model.num_heads, model.num_kv_heads, parallel.cp, requested)


def _fsdp_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys of Megatron's back end."""
    yield from _layout_faults(config)
    for key, moe in _moe_sections(config).items():
        yield from _moe_faults(key, moe)
    for key, optimizer in _optimizers(config).items():
        if optimizer.optimizer_offload_fraction:
            yield UserError(
                f"{optimizer.optimizer_offload_fraction:g} with train.backend fsdp, which updates on the GPU",
                where=f"{key}.optimizer_offload_fraction",
                remedy="leave it out, and set actor.memory.offload.optimizer",
            )
    for key, memory in _memories(config).items():
        yield from _cpu_offload_faults(key, memory)
    if config.reshard.share_weights and (config.actor.memory.cpu_offload or config.model.dtype != "float32"):
        kept = "in CPU memory (actor.memory.cpu_offload)" if config.actor.memory.cpu_offload else "in float32"
        yield UserError(
            f"true with train.backend fsdp, whose weights are {kept}",
            where="reshard.share_weights",
            remedy="set it to false",
        )


def _cpu_offload_faults(key: str, memory: MemorySection) -> Iterator[UserError]:
    """Keys that exclude state in CPU memory at all times."""
    if not memory.cpu_offload:
        return
    offloaded = [name for name in _OFFLOADED if getattr(memory.offload, name)]
    if offloaded:
        names = ", ".join(f"offload.{name}" for name in offloaded)
        yield UserError(
            f"true, and {names} too, whose tensors it keeps in CPU memory already",
            where=f"{key}.cpu_offload",
            remedy="leave one of both out",
        )


def _without_megatron(error: UserError, model: ModelDescription | None) -> UserError:
    """The error without a remedy that a model of no known family does not have."""
    remedy = error.remedy if isinstance(model, ModelShape) else error.remedy.replace(_MEGATRON, "")
    return UserError(error.message, where=error.where, remedy=remedy)


def _layout_faults(config: RunConfig) -> Iterator[UserError]:
    usual = ParallelSection()
    for name in ("sequence_parallel", "expert_dispatch"):
        value = getattr(config.actor.parallel, name)
        if value != getattr(usual, name):
            yield UserError(
                f"{str(value).lower()} with train.backend fsdp, which shards over dp_replicate and cp alone",
                where=f"actor.parallel.{name}",
                remedy=f"leave it out{_MEGATRON}",
            )


def _moe_faults(key: str, moe: MoeSection) -> Iterator[UserError]:
    """Settings of routers and experts, which are transformers' own with FSDP2."""
    found = {
        "aux_loss": moe.aux_loss,
        "bias_update_rate": moe.bias_update_rate,
        "router_replay": moe.router_replay,
        "router_dtype": moe.router_dtype if moe.router_dtype == "float32" else None,
    }
    for name, value in found.items():
        if value:
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
            yield UserError(
                f"{shown} with train.backend fsdp, whose routers are transformers' own",
                where=f"{key}.{name}",
                remedy=f"leave it out{_MEGATRON}",
            )


def _megatron_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys of FSDP2's back end."""
    remedy = "leave it out, or use train.backend fsdp"
    sections = {"actor.parallel": config.actor.parallel, "critic.parallel": config.critic.parallel}
    for key, parallel in sections.items():
        if parallel is not None and parallel.dp_replicate > 1:
            yield UserError(
                f"{parallel.dp_replicate} with train.backend megatron, whose data-parallel ranks have copies already",
                where=f"{key}.dp_replicate",
                remedy=remedy,
            )
    for key, optimizer in _optimizers(config).items():
        if optimizer.name != "adamw" and optimizer.function is None:
            yield UserError(
                f"{optimizer.name} with train.backend megatron, {_WITHOUT[optimizer.name]}",
                where=f"{key}.name",
                remedy="use adamw, or train.backend fsdp",
            )
    if config.train.compile == "blocks":
        yield UserError(
            "blocks with train.backend megatron",
            where="train.compile",
            remedy="set it to functions, or use train.backend fsdp",
        )
    usual = MemorySection()
    for key, memory in _memories(config).items():
        for name in FSDP_KEYS["memory"]:
            value = getattr(memory, name)
            if value != getattr(usual, name):
                yield UserError(
                    f"{str(value).lower()} with train.backend megatron", where=f"{key}.{name}", remedy=remedy
                )


def _memories(config: RunConfig) -> dict[str, MemorySection]:
    found = {"actor.memory": config.actor.memory, "critic.memory": config.critic.memory}
    return {key: memory for key, memory in found.items() if memory is not None}


def _moe_sections(config: RunConfig) -> dict[str, MoeSection]:
    found = {"actor.moe": config.actor.moe}
    if config.algorithm.name in WITH_CRITIC and config.critic.moe is not None:
        found["critic.moe"] = critic_settings(config).moe
    return found


def _optimizers(config: RunConfig) -> dict[str, OptimizerSection]:
    found: dict[str, OptimizerSection | None] = {"actor.optimizer": actor_settings(config).optimizer}
    if config.sft is not None:
        found["sft.optimizer"] = config.sft.optimizer
    if config.algorithm.name in WITH_CRITIC:
        found["critic.optimizer"] = config.critic.optimizer
    return {key: section for key, section in found.items() if section is not None}
