"""Qwen3 dense (Yang et al. 2025): Llama with RMS norms on each head's query and key."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import Family, dense_table

_DEFAULTS = Defaults(num_kv_heads=32, head_dim=128)


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("attention_bias", (False,))
    return read_dense(reader, "qwen3", architecture, _DEFAULTS, qk_norm=True)


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), _read, dense_table)
