"""Mixtral (Jiang et al. 2024): Llama whose every feed-forward part is a mixture of experts."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.description import Experts
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import Family, Row, attention_rows, expert_rows, frame_table

_DEFAULTS = Defaults(theta=1e6, norm_epsilon=1e-5, num_kv_heads=8)


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("sliding_window", (None,))  # on whenever the field is set
    reader.expect("router_jitter_noise", (0.0,))
    experts = Experts(
        num_experts=int(reader.need("num_local_experts")),
        top_k=int(reader.need("num_experts_per_tok")),
        ffn_size=int(reader.need("intermediate_size")),
        layers=tuple(range(int(reader.need("num_hidden_layers")))),
    )
    return read_dense(reader, "mixtral", architecture, _DEFAULTS, experts=reader.checked_experts(experts))


def _table(shape: ModelShape) -> list[Row]:
    return frame_table(shape, attention_rows(shape), expert_rows(shape, "block_sparse_moe.", ("w1", "w3", "w2")))


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), _read, _table)
