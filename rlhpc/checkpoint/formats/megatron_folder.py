"""Folders of checkpoints as Megatron-LM lays them out, and the values that its loader reads before the weights.

FOLDER/latest_checkpointed_iteration.txt   "release", or the number of an iteration
       release/                            a model without iteration, or
       iter_0000350/                       the one of iteration 350: .metadata, *.distcp, common.pt, metadata.json
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.storage import patiently
from rlhpc.models import ModelShape
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import padded_vocab

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CHECKPOINT_VERSION = 3.0  # of Megatron-LM's checkpoints, since 2021
_ITERATION = re.compile(r"iter_(\d{7,})")
_INDEXES = (".metadata", "metadata.json")


def iteration_name(iteration: int | None) -> str:
    """Name of the folder of an iteration; None: of a model without one."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def tracker_text(iteration: int | None) -> str:
    """Contents of the tracker file."""
    return RELEASE if iteration is None else str(iteration)


def iteration_of(checkpoint: Path) -> int | None:
    """Iteration of a checkpoint, by the name of its folder."""
    found = _ITERATION.fullmatch(checkpoint.name)
    return int(found[1]) if found else None


def has_index(folder: Path) -> bool:
    """True if the folder has the index of a checkpoint."""
    return any((folder / name).is_file() for name in _INDEXES)


def checkpoint_folder(folder: Path, iteration: int | None = None) -> Path:
    """Folder of a checkpoint's own files: ``folder`` itself, or the one in it that the tracker file, or ``iteration``,
    names. Raises UserError if that does not exist."""
    if not (folder / TRACKER).is_file():
        return folder
    name = _named(folder / TRACKER) if iteration is None else iteration_name(iteration)
    if not has_index(folder / name):
        found = sorted(path.name for path in folder.iterdir() if has_index(path))
        raise UserError(
            f"no checkpoint in {name!r}" + ("" if iteration is not None else f", which {TRACKER} names"),
            where=str(folder),
            remedy=f"choose one of {', '.join(found)}" if found else "copy the checkpoint again",
        )
    return folder / name


def _named(tracker: Path) -> str:
    text = patiently(lambda: tracker.read_text(encoding="utf-8", errors="replace"), tracker).strip()
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UserError(
            f"is neither a number nor {RELEASE!r}: {text[:40]!r}",
            where=str(tracker),
            remedy="write the iteration of the checkpoint to load into it",
        )
    return iteration_name(int(text))


def common_values(
    shape: ModelShape, layout: ParallelLayout, iteration: int | None, rows: int | None = None
) -> dict[str, Any]:
    """Values of common.pt that Megatron-LM's loader reads (training/checkpointing.py), with ``args`` as a plain dict.

    ``rows``: those of the vocabulary in the checkpoint, by default for the layout.
    """
    args = {**_model_args(shape), **_layout_args(layout), "iteration": iteration or 0}
    args["padded_vocab_size"] = rows or padded_vocab(shape.vocab_size, layout.tp)
    return {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0,
    }


def _model_args(shape: ModelShape) -> dict[str, Any]:
    """The model by the names of Megatron-LM's command line."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "group_query_attention": shape.num_kv_heads < shape.num_heads,
        "kv_channels": shape.head_dim,
        "seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions,
        "norm_epsilon": shape.norm_epsilon,
        "normalization": "RMSNorm",
        "swiglu": True,
        "squared_relu": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm or shape.latent is not None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "position_embedding_type": "rope",
        "add_position_embedding": True,  # the default, which its loader compares; without effect beside rope
        "rotary_base": shape.rope.theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "tokenizer_type": "HuggingFaceTokenizer",
        "vocab_size": shape.vocab_size,
        "make_vocab_size_divisible_by": 1,
        **_latent_args(shape),
        **_expert_args(shape),
    }


def _latent_args(shape: ModelShape) -> dict[str, Any]:
    latent = shape.latent
    if latent is None:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _expert_args(shape: ModelShape) -> dict[str, Any]:
    if shape.experts is None:
        return {"num_experts": None}
    return {"num_experts": shape.experts.num_experts, "moe_grouped_gemm": True, **expert_options(shape)}


def expert_options(shape: ModelShape) -> dict[str, Any]:
    """The model's experts by the names that Megatron's command line and its TransformerConfig share."""
    experts = shape.experts
    assert experts is not None
    return {
        "moe_layer_freq": layer_frequency(shape),
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        # Softmax over the selected experts alone equals softmax over all, normalized afterwards.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalise,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.groups_kept,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
    }


def layer_frequency(shape: ModelShape) -> int | list[int]:
    """Megatron's ``moe_layer_freq``: 1 where every layer has experts, which stacks the layers of a checkpoint."""
    assert shape.experts is not None
    held = set(shape.experts.layers)
    return 1 if len(held) == shape.num_layers else [int(layer in held) for layer in range(shape.num_layers)]


def _layout_args(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": layout.cp,
        "data_parallel_size": layout.size("dp"),
        "world_size": layout.world_size,
    }
