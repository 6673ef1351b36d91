"""megatron-core's own GPT model by its own layer specs, and checkpoints as Megatron-LM saves and loads them.

The specs of Transformer Engine, which does not run on a CPU, are built with stand-ins for its module classes: the same
parameters and states under the same names.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rlhpc.checkpoint.formats.megatron_folder import TRACKER, iteration_name, layer_frequency, tracker_text
from rlhpc.models import ModelShape
from rlhpc.parallel.compat import megatron_device
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import padded_vocab

_LOCAL_NAMES = [
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
]


class PlainNorm(torch.nn.Module):
    """RMS norm that sequence parallelism allows."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self._eps = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self._eps)


class Norm(PlainNorm):
    """With the state that Transformer Engine's has."""

    def get_extra_state(self) -> Any:
        return io.BytesIO(b"scales of this norm in FP8")

    def set_extra_state(self, state: Any) -> None: ...


class NormLinear(ColumnParallelLinear):
    """Linear layer with the norm before it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight, self._eps = torch.nn.Parameter(torch.ones(input_size)), config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self._eps), *args, **options)


class Attention(torch.nn.Module):
    """Causal attention of one sequence, with a state as Transformer Engine's has."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # from [S, B, heads, d]
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def get_extra_state(self) -> None: ...

    def set_extra_state(self, state: Any) -> None: ...


class _Local(LocalSpecProvider):
    def layer_norm(self, *_: Any, **__: Any) -> type:
        return PlainNorm

    def core_attention(self) -> type:
        return Attention


class _TransformerEngine(_Local):
    def layer_norm(self, *_: Any, **__: Any) -> type:
        return Norm

    def linear(self) -> type:
        return Linear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormLinear


def build_peer(shape: ModelShape, layout: ParallelLayout, spec: str, inv_freq: torch.Tensor) -> GPTModel:
    """The model of ``shape``; ``spec``: te or local; ``inv_freq``: frequencies of the rotary embedding."""
    config = _config(shape, layout)
    with _own_modules(), megatron_device():
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, spec == "te", normalization="RMSNorm")
        model = GPTModel(
            config,
            block,
            vocab_size=padded_vocab(shape.vocab_size, layout.tp),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=False,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope" if shape.latent is None else "none",
            rotary_base=int(shape.rope.theta),
        )
    for module in model.modules():
        if type(module).__name__ == "RotaryEmbedding":
            module.inv_freq = inv_freq
    return model.eval()


def _config(shape: ModelShape, layout: ParallelLayout) -> TransformerConfig:
    latent, experts = shape.latent, shape.experts
    options: dict[str, Any] = {}
    if latent is not None:
        options = {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "rope_type": "rope",
            "rotary_base": shape.rope.theta,
            "rotary_interleaved": False,
        }
    else:
        options = {"num_query_groups": shape.num_kv_heads, "kv_channels": shape.head_dim}
    if experts is not None:
        options |= {
            "num_moe_experts": experts.num_experts,
            "moe_layer_freq": layer_frequency(shape),
            "moe_ffn_hidden_size": experts.ffn_size,
            "moe_router_topk": experts.top_k,
            "moe_router_score_function": experts.score,
            "moe_router_enable_expert_bias": experts.bias,
            "moe_router_num_groups": experts.num_groups,
            "moe_router_group_topk": experts.groups_kept,
            "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    return (MLATransformerConfig if latent is not None else TransformerConfig)(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or latent is not None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_cpu_initialization=False,
        perform_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **options,
    )


@contextlib.contextmanager
def _own_modules() -> Iterator[None]:
    """Makes the specs take the stand-ins; without Transformer Engine upstream leaves these names undefined."""
    changes: list[tuple[Any, str, Any]] = [
        (gpt_layer_specs, "TESpecProvider", _TransformerEngine),
        (gpt_layer_specs, "LocalSpecProvider", _Local),
        (gpt_layer_specs, "TENorm", Norm),
        (gpt_layer_specs, "LNImpl", PlainNorm),
        (multi_latent_attention, "HAVE_TE", False),
        (moe_utils, "te_general_gemm", None),
    ]
    before = [(place, name, getattr(place, name, None)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before[:-1]:  # the last one is read when the model runs
            setattr(place, name, value)


def save_as_megatron_lm(model: GPTModel, folder: Path, iteration: int, *, per_layer: bool = False) -> None:
    """Saves in the folders and with the common values of Megatron-LM. Collective."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if per_layer:
        metadata["non_homogeneous_layers"] = True
    target = folder / iteration_name(iteration)
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True)
        (folder / TRACKER).write_text(tracker_text(iteration))
    torch.distributed.barrier()
    common = {
        "args": Namespace(backend=AttnBackend.auto, kind=ModelType.encoder_or_decoder, load=Path("/elsewhere")),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    with megatron_device(), torch.no_grad():
        state = {**common, "model": _sharded(model, metadata)}
        dist_checkpointing.save(state, str(target), content_metadata=metadata)


def load_as_megatron_lm(model: GPTModel, folder: Path) -> dict[str, Any]:
    """Loads what the tracker file names, and returns the common values. Collective."""
    text = (folder / TRACKER).read_text().strip()
    source = str(folder / (text if text == "release" else f"iter_{int(text):07d}"))
    with megatron_device(), torch.no_grad():
        common = dist_checkpointing.load_common_state_dict(source)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        state = dist_checkpointing.load({"model": _sharded(model, metadata)}, source)
        model.load_state_dict(state["model"])
    return dict(common)


def _sharded(model: GPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dict(model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}))


def logits_of(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, vocabulary] of tokens [S]; on one pipeline stage."""
    positions = torch.arange(len(tokens))[None]
    with megatron_device(), torch.no_grad():
        return model(tokens[None], positions, None)[0]


def copy_to_local(source: GPTModel, target: GPTModel) -> None:
    """Copies weights from a model of the spec with Transformer Engine to one without, whose checkpoints can be of other
    names."""
    weights = {
        re.sub(pattern, name, key): value
        for key, value in source.state_dict().items()
        if not key.endswith("_extra_state")
        for pattern, name in [next((pair for pair in _LOCAL_NAMES if re.search(pair[0], key)), ("$^", ""))]
    }
    missing = target.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(key.endswith("_extra_state") for key in missing.missing_keys)


def weights_of(model: GPTModel) -> dict[str, torch.Tensor]:
    """Copies of its weights by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def spoil(model: GPTModel) -> None:
    """Fills all weights with a number that no model has."""
    for value in model.state_dict().values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.fill_(math.pi)
