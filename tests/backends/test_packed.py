"""Rotary angles, against transformers' and vLLM's own modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.backends.kernels.rotary import rotate
from rlhpc.backends.megatron.packed import RotaryTable
from rlhpc.models import Rope, read_model, shape_of
from tests.helpers.distributed import run_ranks
from tests.helpers.plain_model import FIELDS
from tests.helpers.tiny_models import KINDS

SHAPE = shape_of({**FIELDS, "head_dim": 32})
_LLAMA3 = KINDS["llama3"][1]["rope_parameters"]
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "yarn with its own factor on cos and sin": {**_YARN, "attention_factor": 1.25},
    "yarn, ramp not truncated": {**_YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
}
LATENT_ROPES = {
    "default": ROPES["default"],
    "as DeepSeek-V3": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "as DeepSeek-V2": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "not cancelled": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}
POSITIONS = torch.tensor([0, 1, 2, 63, 64, 127, 128, 500])
# As models of 131,072 positions are published: with those of Qwen2.5, Llama 3.1 and older long Llamas.
LONG_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {**_LLAMA3, "original_max_position_embeddings": 8192},
    "yarn": {**_YARN, "original_max_position_embeddings": 32_768},
}
LONG_POSITIONS = torch.arange(131_072)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ROPES)
def test_angles_equal_huggingfaces(tmp_path: Path, name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(ROPES[name])
    )
    assert _difference(config, "LlamaForCausalLM", LlamaRotaryEmbedding, tmp_path) < 1e-6


@pytest.mark.parametrize("name", LONG_ROPES)
def test_angles_of_131072_positions_equal_huggingfaces(tmp_path: Path, name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=len(LONG_POSITIONS),
        rope_parameters=dict(LONG_ROPES[name]),
    )
    assert _difference(config, "LlamaForCausalLM", LlamaRotaryEmbedding, tmp_path, LONG_POSITIONS) < 1e-6


@pytest.mark.parametrize("name", LATENT_ROPES)
def test_angles_of_latent_attention_equal_huggingfaces(tmp_path: Path, name: str) -> None:
    """Of its rotated dimensions alone."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    sizes = {key: value for key, value in KINDS["dsv3"][1].items() if key != "rope_parameters"}
    config = DeepseekV3Config(
        **{**sizes, "qk_rope_head_dim": 16, "hidden_size": 128, "num_attention_heads": 4},
        max_position_embeddings=512,
        rope_parameters=dict(LATENT_ROPES[name]),
    )
    assert _difference(config, "DeepseekV3ForCausalLM", DeepseekV3RotaryEmbedding, tmp_path) < 1e-6


@pytest.mark.ranks
def test_angles_equal_the_engines() -> None:
    """Of vLLM's own tables, bit for bit."""
    (differences,) = run_ranks(_differences_to_engine, 1, join=False)
    assert differences == dict.fromkeys(differences, 0.0)


def test_rotation_equals_huggingfaces() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    x, angles = torch.randn(9, 3, 16), torch.randn(9, 8)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=0, atol=1e-6)


def _differences_to_engine() -> dict[str, float]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    found = {}
    for family, ropes in (("llama", ROPES), ("long llama", LONG_ROPES), ("deepseek", LATENT_ROPES)):
        positions, size = (LONG_POSITIONS, len(LONG_POSITIONS)) if family == "long llama" else (POSITIONS, 512)
        for name, given in ropes.items():
            parameters = dict(given)
            rope = Rope(parameters.pop("rope_theta"), parameters.pop("rope_type"), parameters)
            # vLLM gives DeepSeek's models a yarn of their own (deepseek_v2.py).
            kind = "deepseek_yarn" if family == "deepseek" and rope.kind == "yarn" else rope.kind
            with set_current_vllm_config(VllmConfig()):
                theirs = get_rope(32, size, True, {**given, "rope_type": kind}, torch.float32).cos_sin_cache
            cos, sin = RotaryTable(replace(SHAPE, rope=rope, max_positions=size), torch.device("cpu"))(positions)
            ours = torch.cat([cos[:, :16], sin[:, :16]], dim=-1)
            found[f"{family}, {name}"] = float((ours - theirs[positions]).abs().max())
    return found


def _difference(
    config: Any, architecture: str, module: Any, folder: Path, positions: torch.Tensor = POSITIONS
) -> float:
    """Of cos and sin by our table, made from the file that transformers saves, and by its module."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    ours = RotaryTable(read_model(folder), torch.device("cpu"))(positions)
    theirs = module(config)(torch.zeros(1), positions[None])
    return max(float((a - b[0]).abs().max()) for a, b in zip(ours, theirs, strict=True))
