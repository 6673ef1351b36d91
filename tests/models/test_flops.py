"""Counted operations against PyTorch's own counter on HuggingFace's models."""

from __future__ import annotations

import pytest

from rlhpc.models import read_model
from rlhpc.models.flops import forward_flops, training_flops
from tests.helpers.tiny_models import make_model


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["llama", "qwen3", "dsv3"])
def test_products_equal_what_torch_counts(tmp_path, kind: str) -> None:
    """Eager attention computes the whole square; experts are counted by their tokens."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    length = 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None] % 60)
    shape = read_model(folder)
    key_value = shape.head_dim + (shape.latent.value_dim if shape.latent else shape.head_dim)
    upper_half = shape.num_layers * 2 * shape.num_heads * key_value * length * (length - 1) / 2
    assert counter.get_total_flops() == pytest.approx(forward_flops(shape, [length]) + upper_half, rel=0.01)


def test_training_is_three_forwards_and_sequences_add_up(tmp_path) -> None:
    from tests.helpers.plain_model import write_model

    shape = read_model(write_model(tmp_path))
    assert training_flops(shape, [8, 24]) == 3 * (forward_flops(shape, [8]) + forward_flops(shape, [24]))
    assert forward_flops(shape, [32]) > forward_flops(shape, [8, 24])
