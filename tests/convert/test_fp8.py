"""DeepSeek-V3's fp8 weights with their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, tensors_of, to_huggingface, to_megatron
from tests.helpers.tiny_models import make_model

QUANTISATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def blocks(scale: Any, shape: tuple[int, ...]) -> Any:
    """The factor of each element."""
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model as DeepSeek publishes it, and what its weights are in bfloat16."""
    import torch
    from safetensors.torch import save_file

    model = make_model(tmp_path / "plain", "dsv3", hidden_size=160, moe_intermediate_size=144, intermediate_size=272)
    saved, expected = {}, {}
    for name, tensor in tensors_of(model).items():
        if tensor.dim() != 2 or name.endswith(("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")):
            saved[name] = expected[name] = tensor if tensor.dim() == 1 and "bias" in name else tensor.bfloat16()
            continue
        scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) + 0.5
        values = (tensor * 30).to(torch.float8_e4m3fn)
        saved[name], saved[name + "_scale_inv"] = values, scale
        # As inference/kernel.py of its repository: in float32, then rounded.
        expected[name] = (values.float() * blocks(scale, tensor.shape)).bfloat16()
    saved["model.layers.2.eh_proj.weight"] = torch.ones(3, 5)  # of a layer that predicts further tokens
    save_file(saved, model / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "quantization_config": QUANTISATION}))
    return model, expected


@pytest.mark.heavy
def test_weights_are_multiplied_by_the_scale_of_their_block(
    tmp_path: Path, quantised: tuple[Path, dict[str, Any]]
) -> None:
    model, expected = quantised
    there = to_megatron(model, tmp_path / "megatron", tp=2, ep=2)
    found = tensors_of(to_huggingface(there, tmp_path / "back"))
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in found.items() if not tensor.equal(expected[name])]
    assert "quantization_config" not in json.loads((there / "config.json").read_text())
    assert not verify(model, there, workers=1).faults


def test_in_float32_nothing_is_rounded(tmp_path: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    import torch

    model, _ = quantised
    found = tensors_of(to_huggingface(to_megatron(model, tmp_path / "megatron", dtype="float32"), tmp_path / "back"))
    source, name = tensors_of(model), "model.layers.1.mlp.experts.5.up_proj.weight"
    scale = blocks(source[name + "_scale_inv"], source[name].shape)
    assert torch.equal(found[name], source[name].float() * scale)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A model as Qwen3-FP8 is published: all linears but the head in fp8, scales in bfloat16."""
    import torch
    from safetensors.torch import save_file

    model = make_model(tmp_path / "qwen3", "qwen3", hidden_size=160, intermediate_size=272, head_dim=64)
    saved = {}
    for name, tensor in tensors_of(model).items():
        if "_proj." in name:
            saved[name] = (tensor * 30).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) + 0.5
            saved[name + "_scale_inv"] = scale.bfloat16()
        else:
            saved[name] = tensor.bfloat16()
    save_file(saved, model / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "quantization_config": QUANTISATION}))
    return model


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scales_may_have_any_type(tmp_path: Path, qwen3: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = tensors_of(qwen3)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, qwen3 / "model.safetensors", metadata={"format": "pt"})
    there = to_megatron(qwen3, tmp_path / "megatron", tp=2)
    found = tensors_of(to_huggingface(there, tmp_path / "back"))
    for name, tensor in found.items():
        scale = tensors.get(name + "_scale_inv")
        plain = tensors[name].float()
        expected = plain if scale is None else plain * blocks(scale.float(), tensor.shape)
        assert tensor.equal(expected.bfloat16()), name
    assert not verify(qwen3, there, workers=1).faults


def test_a_huggingface_folder_becomes_one_in_bfloat16(tmp_path: Path, qwen3: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    back = to_huggingface(qwen3, tmp_path / "plain")
    through = to_huggingface(to_megatron(qwen3, tmp_path / "megatron"), tmp_path / "back")
    assert not differing(back, through)
    assert not verify(qwen3, back, workers=1).faults
    loaded = AutoModelForCausalLM.from_pretrained(back).state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert all(loaded[name].equal(tensor) for name, tensor in tensors_of(back).items())


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((), "_scale", r"_proj\.weight_scale' is F32 \[\]; dequantize the weights first; supported: F32, BF16, F16 \["),
        ((272, 1), "_scale_inv", r"_proj\.weight_scale_inv' is F32 \[272, 1\]; dequantize the weights first"),
    ],
)
def test_scales_of_tensors_and_rows_are_refused_with_what_to_do(
    tmp_path: Path, qwen3: Path, shape: tuple[int, ...], kind: str, message: str
) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = tensors_of(qwen3)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        del tensors[name]
        tensors[name.removesuffix("_scale_inv") + kind] = torch.ones(shape)
    save_file(tensors, qwen3 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        to_megatron(qwen3, tmp_path / "megatron")


@pytest.mark.parametrize("value", ["fp8", ["fp8"], {"quant_method": "fp8", "weight_block_size": 128}])
def test_odd_quantisations_are_refused(tmp_path: Path, qwen3: Path, value: Any) -> None:
    fields = json.loads((qwen3 / "config.json").read_text())
    (qwen3 / "config.json").write_text(json.dumps({**fields, "quantization_config": value}))
    with pytest.raises(UserError, match=r"config\.json: .*quanti"):
        to_megatron(qwen3, tmp_path / "megatron")


def test_a_missing_scale_is_refused(tmp_path: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.torch import save_file

    model, _ = quantised
    tensors, name = tensors_of(model), "model.layers.0.mlp.up_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match=f"the scale '{name}' is missing"):
        to_megatron(model, tmp_path / "megatron")


def test_other_quantisations_are_refused(tmp_path: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    model, _ = quantised
    fields = json.loads((model / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (model / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="weights quantized by 'awq'"):
        to_megatron(model, tmp_path / "megatron")
