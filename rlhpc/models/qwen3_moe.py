"""Qwen3 with experts (Yang et al. 2025), such as Qwen3-30B-A3B and Qwen3-235B-A22B."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.description import Experts
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import Family, Row, attention_rows, expert_rows, frame_table

_DEFAULTS = Defaults(num_kv_heads=4)


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("attention_bias", (False,))
    dense, step = set(reader.get("mlp_only_layers") or ()), int(reader.get("decoder_sparse_step", 1))
    layers = range(int(reader.need("num_hidden_layers")))
    experts = Experts(
        # transformers 5 renamed the field
        num_experts=int(reader.get("num_local_experts") or reader.need("num_experts")),
        top_k=int(reader.need("num_experts_per_tok")),
        ffn_size=int(reader.need("moe_intermediate_size")),
        layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        normalise=bool(reader.get("norm_topk_prob", False)),
    )
    reader.get("num_experts")  # some files have both names
    features = {"qk_norm": True, "experts": reader.checked_experts(experts)}
    return read_dense(reader, "qwen3_moe", architecture, _DEFAULTS, **features)


def _table(shape: ModelShape) -> list[Row]:
    return frame_table(shape, attention_rows(shape), expert_rows(shape))


QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, _table)
