"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import Family, dense_table

_DEFAULTS = Defaults(num_kv_heads=32)


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("use_mrope", (False,))  # in the base models' files; true for vision models
    return read_dense(reader, "qwen2", architecture, _DEFAULTS, qkv_bias=True)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), _read, dense_table)
