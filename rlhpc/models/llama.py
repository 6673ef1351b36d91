"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.shape import ModelShape, read_dense
from rlhpc.models.tables import Family, dense_table


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    reader.expect("attention_bias", (False,))
    reader.expect("mlp_bias", (False,))
    return read_dense(reader, "llama", architecture)


LLAMA = Family("llama", ("LlamaForCausalLM",), _read, dense_table)
