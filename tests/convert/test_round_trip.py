"""HuggingFace to Megatron and back: every family through twenty layouts, in every type, bit for bit."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.plan import plan_layout
from rlhpc.convert.sides import read_side
from rlhpc.core.errors import UserError
from tests.convert.compare_commits import digest
from tests.convert.helpers import differing, tensors_of, to_huggingface, to_megatron, write_random_model
from tests.helpers.tiny_models import KINDS, make_model

LAYOUTS = [
    dict(zip(("tp", "pp", "vpp", "ep", "etp"), sizes, strict=True))
    for sizes in product((1, 2, 4), (1, 2, 4), (None, 2), (1, 2, 4), (1, 2))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, kind, num_hidden_layers=8, vocab_size=67) for kind in KINDS}


def twenty(model: Path) -> list[dict[str, Any]]:
    """Layouts that suit the model, spread over all that do."""
    side, fitting = read_side(model), []
    for axes in LAYOUTS:
        try:
            plan_layout(side, axes)
        except UserError:
            continue
        fitting.append(axes)
    return [*fitting, *fitting][:: max(1, len(fitting) // 20)][:20]


def retype(model: Path, folder: Path, dtype: str) -> Path:
    """The same model in another type, every tensor of it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(
        {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors_of(model).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    fields = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": dtype}))
    return folder


# Of write_random_model, by the rlhpc that wrote torch's format itself.
FORMER = {
    "megatron": "8572d6eb3c65a6e7dfb827b250c9bfb99a9b7c1537b63937d413033185cfb9ad",
    "hf": "b05dc12c4ceeb90dc1570adcef53ee4b8018e1c3b7e2db7eb657d7af80b5dd2d",
}


def test_tensors_and_files_are_those_of_a_former_rlhpc(tmp_path: Path) -> None:
    """``python -m tests.convert.compare_commits`` compares all families with any commit."""
    source = write_random_model(tmp_path / "source", num_hidden_layers=4, vocab_size=67)
    there = to_megatron(source, tmp_path / "megatron", tp=2, pp=2)
    back = to_huggingface(there, tmp_path / "hf", file_bytes=100_000)
    assert {"megatron": digest(there), "hf": digest(back)} == FORMER


@pytest.mark.workers
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_layouts_give_the_same_tensors_back(tmp_path: Path, models: dict[str, Path], kind: str) -> None:
    layouts = twenty(models[kind])
    assert len(layouts) >= (20 if "tied" not in kind else 10)
    for axes in layouts:
        there = to_megatron(models[kind], tmp_path / "megatron", piece_bytes=1 << 30, **axes)
        back = to_huggingface(there, tmp_path / "back", piece_bytes=1 << 30)
        assert not differing(models[kind], back), axes


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["qwen2_tied", "dsv3"])
def test_every_type_comes_back_as_it_was(tmp_path: Path, models: dict[str, Path], kind: str, dtype: str) -> None:
    model = retype(models[kind], tmp_path / "model", dtype)
    there = to_megatron(model, tmp_path / "megatron", tp=2, pp=2)
    assert not differing(model, to_huggingface(there, tmp_path / "back"))
    biases = [tensor for key, tensor in read_index(there / "release").tensors.items() if key.endswith("expert_bias")]
    assert all(tensor.dtype == "F32" for tensor in biases)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_another_type_is_rounded_as_torch_rounds(
    tmp_path: Path, models: dict[str, Path], before: str, after: str
) -> None:
    import torch

    model = retype(models["dsv3"], tmp_path / "model", before)
    there = to_megatron(model, tmp_path / "megatron", dtype=after, ep=2)
    found = tensors_of(to_huggingface(there, tmp_path / "back"))
    for name, tensor in tensors_of(model).items():
        wanted = tensor.float() if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, after))
        assert torch.equal(found[name], wanted), name
    assert json.loads((there / "config.json").read_text())["dtype"] == after


@pytest.mark.heavy
def test_a_number_beyond_float16_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    from safetensors.torch import save_file

    model = retype(models["qwen3"], tmp_path / "model", "float32")
    tensors = tensors_of(model)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight: contains numbers beyond the range of float16"):
        to_megatron(model, tmp_path / "megatron", dtype="float16")
    assert not (tmp_path / "megatron").exists()


def test_types_may_differ_inside_one_model(tmp_path: Path, models: dict[str, Path]) -> None:
    """Tensors that Megatron fuses become one type, which has all their numbers, and go back to their own."""
    from safetensors.torch import save_file

    model = retype(models["qwen2"], tmp_path / "model", "bfloat16")
    tensors = tensors_of(model)
    for name in tensors:
        if name.endswith(("layernorm.weight", "q_proj.weight")):
            tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    there = to_megatron(model, tmp_path / "megatron", tp=2)
    assert not differing(model, to_huggingface(there, tmp_path / "back"))


@pytest.mark.heavy
def test_several_files_and_their_index(tmp_path: Path, models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    there = to_megatron(models["qwen3moe"], tmp_path / "megatron", ep=4)
    back = to_huggingface(there, tmp_path / "back", file_bytes=1_000_000)
    files = list(back.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    headers = [int.from_bytes(file.read_bytes()[:8], "little") for file in files]
    assert all(size % 8 == 0 for size in headers), "as the format demands: tensors begin at multiples of 8"
    assert not differing(models["qwen3moe"], back)
    assert not differing(models["qwen3moe"], to_huggingface(to_megatron(back, tmp_path / "again"), tmp_path / "last"))
    loaded = AutoModelForCausalLM.from_pretrained(back).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(models["qwen3moe"]).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(expected[name]) for name in expected)


@pytest.mark.heavy
def test_a_new_layout_of_a_checkpoint_keeps_every_number(tmp_path: Path, models: dict[str, Path]) -> None:
    first = to_megatron(models["dsv3"], tmp_path / "first", tp=4, ep=4)
    second = to_megatron(first, tmp_path / "second", ep=8)
    assert read_index(first / "release").tensors["output_layer.weight"].shape[0] == 68
    assert read_index(second / "release").tensors["output_layer.weight"].shape[0] == 68, "padding may have been trained"
    assert not differing(models["dsv3"], to_huggingface(second, tmp_path / "back"))
    third = to_megatron(second, tmp_path / "third", tp=4, ep=4)
    assert {f.name: f.read_bytes() for f in first.glob("__*")} == {f.name: f.read_bytes() for f in third.glob("__*")}


def test_what_belongs_to_the_model_goes_with_it(tmp_path: Path, models: dict[str, Path]) -> None:
    model = retype(models["llama"], tmp_path / "model", "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (model / name).write_text(f'"{name}"')
    (model / "pytorch_model.bin").write_bytes(b"a pickle that nobody opens")
    there = to_megatron(model, tmp_path / "megatron")
    back = to_huggingface(there, tmp_path / "back")
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    for folder in (there, back):
        assert {name for name in names if (folder / name).read_bytes() == (model / name).read_bytes()} == names
        assert not (folder / "pytorch_model.bin").exists()


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings_must_be_the_same(tmp_path: Path, models: dict[str, Path], same: bool) -> None:
    from safetensors.torch import save_file

    model = retype(models["qwen2_tied"], tmp_path / "model", "float32")
    tensors = tensors_of(model)
    head = tensors["model.embed_tokens.weight"].clone()
    head[3, 5] += 0 if same else 1
    save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors", metadata={"format": "pt"})
    if same:
        back = to_huggingface(to_megatron(model, tmp_path / "megatron", pp=2), tmp_path / "back")
        assert not differing(models["qwen2_tied"], back)
        return
    with pytest.raises(UserError, match=r"'lm_head\.weight' differs from the embedding"):
        to_megatron(model, tmp_path / "megatron")


def test_tensors_that_nobody_knows_are_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    from safetensors.torch import save_file

    model = retype(models["qwen3"], tmp_path / "model", "float32")
    extra = {"model.layers.0.self_attn.q_proj.lora_A.weight": tensors_of(model)["model.norm.weight"].clone()}
    save_file({**tensors_of(model), **extra}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"q_proj\.lora_A\.weight', which the model of config\.json has not"):
        to_megatron(model, tmp_path / "megatron")
