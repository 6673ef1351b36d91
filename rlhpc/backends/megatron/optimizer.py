"""Builds and steps Megatron's distributed optimizer, and names the tensors that may leave the training device.

Updated weights are gathered over data-parallel ranks during the next forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.own_optimizer import make_own
from rlhpc.backends.megatron.adamw import AdamW
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import OptimizerSection
from rlhpc.parallel.activation_offload import ActivationOffload
from rlhpc.parallel.compat import adopt_optimizer
from rlhpc.parallel.offload import Kind, release_cached


def wrap_chunks(config: TransformerConfig, chunks: list[GPTModel]) -> list[torch.nn.Module]:
    """Wraps the modules in half-precision casts if the weights are bfloat16."""
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else list(chunks)


def distribute(
    config: TransformerConfig, chunks: list[torch.nn.Module], bucket: int | None = None
) -> list[DistributedDataParallel]:
    """Moves the weights into buffers, zeroed, beside those of gradients, and adds the gradients' float32 reduction over
    the data-parallel ranks, by buckets during the backward pass. ``bucket``: minimum elements per bucket; None:
    Megatron's default, 40 million or more."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=_gathers_overlap(),
        use_distributed_optimizer=True,
        bucket_size=bucket,
    )
    _free_weights(chunks)
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]

    # Token counts are ignored: losses are already divided by denominators over the whole batch.
    def finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **options: object) -> None:
        finalize_model_grads(model, None, **options)

    config.finalize_model_grads_func = finalize
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _gathers_overlap() -> bool:
    """True if the weights of an update are gathered during the next forward pass (gathers.py)."""
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1


def freeze(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules of a model that is not trained."""
    return [chunk.requires_grad_(requires_grad=False).eval() for chunk in chunks]


def _free_weights(chunks: list[torch.nn.Module]) -> None:
    """Frees the modules' own weights, which nothing has been loaded into: Megatron allocates whole buffers beside them.

    It still copies each parameter into its buffer, and reads zeros of its shape without memory.
    """
    for param in (param for chunk in chunks for param in chunk.parameters()):
        param.data = param.data.new_zeros(()).expand(param.shape)
    release_cached()  # the buffers are larger than any block that PyTorch has cached


def build_optimizer(
    section: OptimizerSection, config: TransformerConfig, chunks: list[DistributedDataParallel]
) -> ChainedOptimizer:
    """AdamW or the user's optimizer, with float32 master weights and state sharded over the data-parallel ranks."""
    adopt_optimizer(AdamW if section.function is None else functools.partial(_make_own, section))
    options = OptimizerConfig(
        optimizer="adam",
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.epsilon,
        clip_grad=section.max_grad_norm,
        use_distributed_optimizer=True,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
    )
    # AdamW owns the master weights, so that they may be in CPU memory. Megatron's own option for that requires
    # TransformerEngine (optimizer_config.py:375); this is the field that it reads afterwards.
    options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = config.bf16 and section.function is None
    optimizer = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss if config.bf16 else None
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, AdamW):
            inner.optimizer_offload_fraction = section.optimizer_offload_fraction
            inner.begin()
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """torch optimizers inside: one for the dense parameters, and one for the experts' if the rank has any."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def _make_own(section: OptimizerSection, params: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
    remedy = "store exp_avg and exp_avg_sq of the parameter's shape, and the step in its group"
    return make_own(section, params, _is_storable, remedy)


def _is_storable(state: dict[str, Any], param: torch.Tensor) -> bool:
    """True if the state of a parameter is what Megatron's checkpoints contain."""
    shapes = {name: tuple(value.shape) for name, value in state.items() if torch.is_tensor(value)}
    return shapes == dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(param.shape)) and len(state) == len(shapes)


def ready_gradients(optimizer: ChainedOptimizer) -> float:
    """Passes the reduced gradients to the inner optimizers; returns their norm before clipping, one number for dense
    parameters and experts of all ranks, equal on every rank. Collective."""
    overflowed = optimizer.prepare_grads()
    assert not overflowed, "only a loss scaler checks for overflows, and there is none"
    return float(optimizer.get_grad_norm())


def take_step(optimizer: ChainedOptimizer, norm: float, gathers: WeightGathers) -> None:
    """Clips the ready gradients by their norm, updates the weights and starts to gather them. Collective.

    Together with ``ready_gradients`` this is Megatron's ``ChainedOptimizer.step`` (optimizer.py:1291), which steps for
    any norm.
    """
    gathers.finish()
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
    gathers.start()


def set_rate(optimizer: MegatronOptimizer, rate: float, weight_decay: float) -> None:
    """Sets learning rate and weight decay of every group; Megatron applies its wd_mult (0 for vectors) nowhere else."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


class WeightGathers:
    """Starts the gathers of all buckets after an update. A layer waits for those of its own weights.

    Megatron's own hooks (distributed_data_parallel.py:383) wait in each module for its own parameters, and miss a
    weight that another module's kernel reads. Others that read weights call ``finish`` before.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], models: Sequence[GPTModel]) -> None:
        self._groups: list[Any] = []  # in the order of the forward pass
        for chunk, model in zip(chunks, models, strict=True):
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                self._adopt(chunk, model)

    def _adopt(self, chunk: DistributedDataParallel, model: GPTModel) -> None:
        chunk.disable_forward_pre_hook(param_sync=False)
        own = [*reversed(chunk.bucket_groups), *reversed(chunk.expert_parallel_bucket_groups)]
        self._groups += own

        def groups_of(params: Iterable[torch.nn.Parameter]) -> list[Any]:
            needed = {id(chunk.param_to_bucket_group[param]) for param in params}
            return [group for group in own if id(group) in needed]

        *layers, last = model.decoder.layers
        embedding = model.embedding.parameters() if model.pre_process else ()
        model.register_forward_pre_hook(functools.partial(_wait, groups_of(embedding)))
        for layer in layers:
            layer.register_forward_pre_hook(functools.partial(_wait, groups_of(layer.parameters())))
        last.register_forward_pre_hook(functools.partial(_wait, own))  # also for norm and head after it

    @property
    def pending(self) -> int:
        """Number of gathers that nothing has waited for."""
        return sum(group.param_gather_handle is not None for group in self._groups)

    def start(self) -> None:
        """After an update. Collective; returns before the weights have arrived."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Waits for all weights."""
        _wait(self._groups)


def _wait(groups: Sequence[Any], *_: Any) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None


def device_tensors(models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, kind: Kind) -> list[Tensor]:
    """Tensors of a kind on the training device."""
    params = [param for model in models for param in model.parameters()]
    if kind == "parameters":
        return [param.data for param in params]
    if kind == "gradients":
        return [param.main_grad for param in params if hasattr(param, "main_grad")]
    found = []
    for inner in [] if optimizer is None else inner_optimizers(optimizer):
        on_cpu = inner.on_cpu if isinstance(inner, AdamW) else set()
        for param in (param for group in inner.param_groups for param in group["params"]):
            state = {} if param in on_cpu else inner.state.get(param, {})
            own = [param, *state.values()]
            found += [value for value in own if torch.is_tensor(value) and value.device == param.device]
    return found


def offload_inputs(
    models: Sequence[torch.nn.Module], settings: ModelSettings, device: torch.device
) -> ActivationOffload | None:
    """Offload, if configured, of what the decoders save in a forward pass: with full recomputation, the inputs of
    groups of layers. It ends before the final norm, whose backward pass comes first."""
    if settings.optimizer is None or not settings.memory.offload_activations:
        return None
    offload = ActivationOffload(device)
    for model in models:
        model.decoder.register_forward_pre_hook(lambda *_: offload.begin())
        model.decoder.register_forward_hook(lambda *_: offload.end(), always_call=True)
        if model.decoder.final_layernorm is not None:
            model.decoder.final_layernorm.register_forward_pre_hook(lambda *_: offload.end())
    return offload
