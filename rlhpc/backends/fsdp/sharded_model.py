"""Builds a transformers model on the meta device and shards it: no rank ever allocates whole weights.

The device mesh has replicas of the weights, their shards, and context parallelism. Layers may be graphs of
torch.compile, one for each kind of layer. Rotary tables are those of the run (rlhpc.models.rope).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlhpc.backends.fsdp.attention_interface import traits_of
from rlhpc.backends.fsdp.recompute import Recomputation, recompute_layer
from rlhpc.backends.fsdp.stored import keep_conversion
from rlhpc.backends.kernels.compiled import CompiledFunction
from rlhpc.core.errors import UserError
from rlhpc.models.rope import fix_parameters, has_one_table, is_dynamic, kind_of, parameter_sets, with_run_table
from rlhpc.parallel import pinned_memory
from rlhpc.parallel.activation_offload import ActivationOffload
from rlhpc.sharding.mesh_sizes import CP, REPLICATE, SHARD, MeshSizes

_FIXED = "fixed"  # no name of transformers, which then leaves the table alone (dynamic_rope_update)
WEIGHTS = "weights"
SCORE = "score"
_OFFLOAD_LESS = "use more ranks, or raise slurm.memory"
_LONGEST_REASON = 200  # letters; transformers lists every model it has
Head = Literal["lm", "value"]
# "reduce": gradients of each microbatch are reduced at once, and a rank keeps its shard of them. "keep": they are
# reduced with the last microbatch; until then each rank keeps those of all weights, in float32.
Accumulation = Literal["reduce", "keep"]


def with_run_rope(config: PretrainedConfig, tokens: int, fixed: int | None = None) -> PretrainedConfig:
    """A copy of the configuration for a run whose longest sequence has ``tokens`` tokens, with dynamic RoPE fixed at
    ``fixed`` tokens, if given."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return config
    if fixed is not None and is_dynamic(parameters):
        positions = text.max_position_embeddings
        parameters = fix_parameters(parameters, _rotated(text, parameters), positions, fixed)
        text.max_position_embeddings = max(positions, fixed)
    text.rope_parameters = with_run_table(parameters, tokens)
    return config


def bases(config: PretrainedConfig) -> set[float]:
    """The bases of a configuration's rotary embeddings."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return {found["rope_theta"] for found in parameter_sets(parameters) if found.get("rope_theta") is not None}


def _rotated(text: PretrainedConfig, parameters: Mapping[str, Any]) -> int:
    """Rotated dimensions of a head, as transformers counts them (_compute_dynamic_ntk_parameters)."""
    dynamic = next(found for found in parameter_sets(parameters) if kind_of(found) == "dynamic")
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head * dynamic.get("partial_rotary_factor", 1.0))


def keep_tables(model: nn.Module) -> None:
    """Ends transformers' choice of a table where a configuration has one alone. In each pass it would wait for the
    longest position, and with tables by kind of layer it fails in the second one (UnboundLocalError)."""
    for module in model.modules():
        kind, parameters = getattr(module, "rope_type", None), _parameters_of(module)
        if isinstance(kind, dict):
            module.rope_type = {layers: _kept(name, parameters.get(layers)) for layers, name in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _kept(kind, parameters)


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    return getattr(getattr(module, "config", None), "rope_parameters", None) or {}


def _kept(kind: str, parameters: Mapping[str, Any] | None) -> str:
    return _FIXED if kind == "longrope" and parameters and has_one_table(parameters) else kind


@dataclass(frozen=True)
class Meshes:
    """``weights``: ranks of one copy of the weights, or copies x those ranks with several copies (HSDP).

    ``cp``: ranks that share a sequence.
    """

    sizes: MeshSizes
    weights: DeviceMesh
    cp: DeviceMesh

    @property
    def copy_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the weights together, in the order of their shards."""
        return self.weights.get_group(WEIGHTS)


def make_meshes(sizes: MeshSizes, device_type: str) -> Meshes:
    """Makes the process groups. Collective over all ranks; raises UserError if the sizes are not those of the world."""
    sizes.check(dist.get_world_size())
    shape = (sizes.dp_replicate, sizes.dp_shard, sizes.cp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD, CP))
    weights = mesh[SHARD, CP]._flatten(WEIGHTS)
    return Meshes(sizes, mesh[REPLICATE, WEIGHTS] if sizes.dp_replicate > 1 else weights, mesh[CP])


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a model. ``shard_dtype`` is that of the weights that a rank holds, ``compute_dtype`` that of
    the gathered weights and of activations. Gradients are reduced in float32."""

    head: Head = "lm"
    attention: str = "sdpa"  # by its name in transformers
    shard_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    reshard_after_forward: bool = True  # of layers; else their weights stay gathered until the backward pass
    accumulation: Accumulation = "reduce"
    recomputation: Recomputation = field(default_factory=Recomputation)
    compile_layers: bool = False
    cpu_offload: bool = False  # shards, gradients and optimizer stay in CPU memory


class ScoreHead(nn.Module):
    """Head of a critic or reward model: one number for each token, in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, hidden: Float[Tensor, "*T H"]) -> Float[Tensor, "*T 1"]:
        return nn.functional.linear(hidden.float(), self.weight.float())


class ShardedModel:
    """A transformers model whose root, layers, embedding and head are FSDP modules. Weights are allocated, not set."""

    def __init__(self, config: PretrainedConfig, meshes: Meshes, options: BuildOptions, device: torch.device) -> None:
        self.meshes, self.options, self.device = meshes, options, device
        self.module = build_on_meta(config, options)
        self.decoder = decoder_of(self.module)
        self.head = getattr(self.module, SCORE) if options.head == "value" else self.module.get_output_embeddings()
        self.layers = decoder_layers(self.module)
        self.activations = ActivationOffload(device) if options.recomputation.offload else None
        # FSDP gathers the weights of its root only for a call of the root itself.
        self.module.forward = self._forward
        init_buffers(self.module, device)
        keep_tables(self.module)
        for layer in self.layers:
            if options.compile_layers:
                compile_layer(layer)
            recompute_layer(layer, options.recomputation, self.activations)
        self._shard()
        self._allocate(device)

    def __call__(
        self, input_ids: Int[Tensor, "B T"], position_ids: Int[Tensor, "B T"] | None = None, **head: Any
    ) -> Any:
        """Output of the head for hidden states [B, T, H] and the arguments ``head``: logits, as they leave the
        product, or values. Gathers weights: collective over the ranks of a copy."""
        return self.module(input_ids, position_ids, head)

    def prepare_backward(self, *, last: bool) -> None:
        """Prepares a microbatch, before its forward pass; ``last``: it is the last one of an update."""
        self.module.set_requires_gradient_sync(last or self.options.accumulation == "reduce")
        if self.options.accumulation == "reduce" and self.meshes.sizes.dp_replicate > 1:
            self.module.set_requires_all_reduce(last)  # over copies of the weights once, of what each has summed

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's live parts of parameters, tied ones once, and the persistent buffers, by transformers' names.
        Weights must not be gathered."""
        found = {name: local_part(parameter.detach()) for name, parameter in self.module.named_parameters()}
        return found | persistent_buffers(self.module)

    def reshard(self) -> None:
        """Frees gathered weights, so that each parameter is this rank's shard. To be called by all ranks after passes
        without gradient, which leave those of root and head gathered, before weights are read or written."""
        for module in self._fsdp_modules():
            module.reshard()

    def forget_passes(self) -> None:
        """Clears notes after passes without gradient. FSDP notes the order of all passes for a backward pass, which
        clears it (_fsdp_param_group.py, _record_post_forward): the notes would grow for the whole run."""
        order = self.module._get_fsdp_state()._comm_ctx.post_forward_order
        for group in order:
            group._post_forward_indices.clear()
        order.clear()

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None, head: dict[str, Any]) -> Any:
        out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return self.head(out.last_hidden_state, **head)

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _shard(self) -> None:
        keep_conversion(self.module)
        options = self.options
        common: dict[str, Any] = {"mesh": self.meshes.weights, "mp_policy": _precision(options.compute_dtype)}
        if options.cpu_offload:
            common["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in self.layers:
            fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **common)
        embedding = self.module.get_input_embeddings()
        if self.head.weight is not embedding.weight:  # else both use one weight, of the root, which contains both
            fully_shard(embedding, reshard_after_forward=options.reshard_after_forward, **common)
            own = {**common, "mp_policy": _precision(None)} if options.head == "value" else common
            fully_shard(self.head, reshard_after_forward=False, **own)
        fully_shard(self.module, reshard_after_forward=False, **common)
        for module in self._fsdp_modules():
            # Losses arrive divided by global denominators: gradients are sums. Neither call reaches submodules, and
            # without the second a divisor is part of the reduction itself, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._prefetch()

    def _prefetch(self) -> None:
        """Gathers each layer's weights while the layer before it computes.

        In the backward pass FSDP does so by itself. In a forward pass it starts a gather once the CPU has arrived at
        the layer, which is too late where the CPU waits for the GPU inside of the layer before, as routers do.
        """
        following = [*self.layers[1:], self.head]
        for layer, after in zip(self.layers, following, strict=True):
            if isinstance(layer, FSDPModule) and isinstance(after, FSDPModule):
                layer.set_modules_to_forward_prefetch([after])

    @torch.no_grad()
    def _allocate(self, device: torch.device) -> None:
        """Allocates this rank's shards, uninitialised."""
        new = _pinned_like if self.options.cpu_offload else torch.empty_like
        self.module._apply(lambda t: new(t, device=device) if t.is_meta else t)
        left = [name for name, parameter in self.module.named_parameters() if parameter.is_meta]
        assert not left, f"still on the meta device: {left[:4]}"


def _pinned_like(shard: Tensor, *, device: torch.device) -> Tensor:
    """An uninitialised shard in CPU memory, which ``device`` copies from.

    Any other would be pinned in the first forward pass, in up to twice the memory, and replaced in the parameter, while
    optimizer and weight sync hold it.
    """
    found = torch.empty_like(shard, device="cpu")
    local = local_part(found)
    memory = pinned_memory.allocate(local.nbytes, device, "actor.memory.cpu_offload", _OFFLOAD_LESS)
    local.set_(memory.view(local.dtype).view(local.shape))
    return found


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that files contain, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def _precision(compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gathered weights in ``compute_dtype`` (None: in that of the shards), gradients reduced in float32. Inputs of
    modules are left as they are: the model computes as plain transformers does on such weights."""
    return MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def build_on_meta(config: PretrainedConfig, options: BuildOptions) -> PreTrainedModel:
    """The model on the meta device, in evaluation mode: the tokens' log-probs are those of a model without dropout."""
    config = copy.deepcopy(config)
    if options.head == "value":
        config.tie_word_embeddings = False
    try:
        with torch.device("meta"):
            # In float32, as buffers must be in any case.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=options.attention)
            if options.head == "value":
                _replace_head(model)
    except KeyError as error:
        if error.args != (options.attention,):
            raise
        raise UserError(
            f"{config.model_type!r} has attention of its own, which cannot be replaced",
            where="model.path",
            remedy="use a model with transformers' attention interface",
        ) from None
    except (ValueError, ImportError) as error:
        raise UserError(
            f"transformers cannot build {config.model_type!r} ({str(error)[:_LONGEST_REASON]})",
            where="model.path",
            remedy="use a causal language model that the installed transformers has",
        ) from None
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.shard_dtype)
    return model.eval()


@torch.no_grad()
def init_buffers(
    model: PreTrainedModel, device: torch.device, allocate: Callable[..., Tensor] = torch.empty_like
) -> None:
    """Allocates buffers and computes those that no file has, such as a rotary embedding's frequencies."""
    owners: dict[str, PreTrainedModel] = {}  # the innermost model that each module is of knows how
    for path, module in model.named_modules():
        outer = owners.get(path.rpartition(".")[0], model)
        owners[path] = module if isinstance(module, PreTrainedModel) else outer
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, allocate(buffer, device=device), persistent=persistent)
        if buffers:
            owners[path]._init_weights(module)  # of buffers only: parameters are still on the meta device


def _replace_head(model: PreTrainedModel) -> None:
    """Puts a value head named ``score``, as in HuggingFace's files of classifiers, in place of the model's head."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_children() if module is head), None)
    if name is None:
        raise UserError(
            f"{type(model).__name__} has no head that a value head could replace",
            where="model.path",
            remedy="use a causal language model whose head is one layer",
        )
    delattr(model, name)
    setattr(model, SCORE, ScoreHead(model.config.get_text_config().hidden_size))


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: what returns hidden states."""
    found = model.get_decoder()
    inner = found if isinstance(found, PreTrainedModel) else model
    if inner is not model and inner.get_output_embeddings() is None:
        return inner
    return next((child for child in inner.children() if isinstance(child, PreTrainedModel)), inner)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's transformer layers, in order."""
    count, kinds = model.config.get_text_config().num_hidden_layers, set(model._no_split_modules or ())
    lists = [module for module in decoder_of(model).children() if isinstance(module, nn.ModuleList)]
    for modules in lists:
        # Longcat counts two layers in each of its blocks.
        if len(modules) == count or {type(module).__name__ for module in modules} & kinds:
            return list(modules)
    raise UserError(
        f"{type(model).__name__} has no list of its {count} layers",
        where="model.path",
        remedy="use a model whose decoder is one stack of layers",
    )


def compile_layer(layer: nn.Module) -> None:
    """Compiles what a layer computes, but not the hooks around it, which gather its weights. A layer that is not one
    graph runs as it is."""
    for module in layer.modules():
        if hasattr(module, "config"):
            module.packed_traits = traits_of(module)
    layer.forward = CompiledFunction(layer.forward, type(layer).__name__)
