"""Each family's table against what HuggingFace saves: every tensor, by name and shape, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.models import read_model
from rlhpc.sharding.shards import model_tensors
from tests.helpers.tiny_models import KINDS, make_model

MIXED = [  # layers with and without experts
    ("qwen3moe", {"num_hidden_layers": 5, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    ("dsv3", {"num_hidden_layers": 4, "first_k_dense_replace": 2, "n_shared_experts": 2}),
]


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in KINDS), *MIXED])
def test_the_tensors_are_those_of_the_saved_model(tmp_path: Path, kind: str, changes: dict) -> None:
    folder = make_model(tmp_path, kind, **changes)
    shape = read_model(folder)
    saved = check_weights(folder, shape)
    assert {tensor.name: tensor.shape for tensor in model_tensors(shape)} == saved.shapes


@pytest.mark.parametrize("kind", ["dsv3", "dsv3_direct"])
def test_the_softmax_scale_is_huggingfaces(tmp_path: Path, kind: str) -> None:
    import transformers

    folder = make_model(tmp_path, kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = model.model.layers[0].self_attn.scaling
    assert read_model(folder).softmax_scale == pytest.approx(expected, rel=1e-12)
    assert (abs(expected - 48**-0.5) > 0.01) == (kind == "dsv3")
