"""A model family of one's own: Mistral (Jiang et al. 2023), which is Llama with a sliding window that must be off."""

from __future__ import annotations

from rlhpc.models import ConfigReader, Family, ModelShape, Row, attention_rows, frame_table, mlp_rows, read_dense


def read(reader: ConfigReader, architecture: str) -> ModelShape:
    """The fields of config.json. One that is not read here, nor by read_dense, is refused by name."""
    reader.expect("sliding_window", (None,))
    return read_dense(reader, "mistral", architecture)


def table(shape: ModelShape) -> list[Row]:
    """Places of the files' tensors in Megatron's model, and their division among ranks."""
    return frame_table(shape, attention_rows(shape), mlp_rows(shape))


MISTRAL = Family("mistral", ("MistralForCausalLM",), read, table)
