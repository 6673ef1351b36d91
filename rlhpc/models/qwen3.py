"""Qwen3 dense (Yang et al. 2025): Llama with RMS norms on each head's query and key."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.dense import dense_table
from rlhpc.models.shape import ModelShape, read_dense
from rlhpc.models.tables import Family


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("attention_bias", (False,))
    return read_dense(reader, "qwen3", architecture, qk_norm=True)


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), _read, dense_table)
