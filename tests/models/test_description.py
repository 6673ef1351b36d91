"""Models described from config.json and headers, against transformers' own: tensors, counted operations, refusals."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhpc.checkpoint.formats.described import describe_model, read_tensors
from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, TensorHeader, describe_fields, has_dynamic_rope, read_model
from rlhpc.models.flops import forward_flops, training_flops
from rlhpc.models.rope import fix_fields
from rlhpc.sharding.shards import model_tensors, num_parameters
from tests.helpers.plain_model import FIELDS, write_model, write_other_model, write_safetensors
from tests.helpers.tiny_models import KINDS, OUTSIDE, UNDESCRIBED, make_model

PLAIN: dict[str, Any] = {**FIELDS, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": None,
    "vocab_size": 96,
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [*KINDS, *OUTSIDE, *UNDESCRIBED])
def test_a_saved_model_is_described_by_its_files(tmp_path: Path, kind: str) -> None:
    """Sizes, parameters, tied embeddings and the layers with experts; a known family's table counts the same."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = describe_fields(json.loads((folder / "config.json").read_text()), "config.json", read_tensors(folder))
    config = model.config
    assert (found.num_layers, found.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (found.num_heads, found.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert found.tied_embeddings == torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    routers = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
    held = sum(parameter.numel() for parameter in model.parameters()) + 8 * len(routers)
    assert num_parameters(found) == held
    with_experts = [layer for layer, part in enumerate(model.model.layers) if hasattr(part.mlp, "experts")]
    assert list(found.experts.layers if found.experts else ()) == with_experts
    attention = model.model.layers[0].self_attn
    assert found.head_dim == (getattr(attention, "qk_head_dim", None) or attention.head_dim)
    known = describe_model(folder)
    assert isinstance(known, ModelShape) == (kind in KINDS)
    assert num_parameters(known) == held
    assert forward_flops(known, [7]) == pytest.approx(forward_flops(found, [7]), rel=1e-9)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["gemma2", "glm4", "starcoder2", "gpt_oss"])
def test_products_of_an_unknown_family_equal_what_torch_counts(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, length = make_model(tmp_path, kind), 64
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None] % 60)
    shape = describe_model(folder)
    assert not isinstance(shape, ModelShape)
    upper_half = shape.num_layers * 4 * shape.num_heads * shape.head_dim * length * (length - 1) / 2
    assert counter.get_total_flops() == pytest.approx(forward_flops(shape, [length]) + upper_half, rel=0.01)


def test_older_names_and_defaults_of_fields_are_read() -> None:
    found = describe_fields(GPT2, "config.json")
    assert (found.num_layers, found.hidden_size, found.num_heads, found.max_positions) == (2, 64, 4, 128)
    assert (found.num_kv_heads, found.head_dim, found.ffn_size) == (4, 16, None)
    assert found.tied_embeddings  # not in files of older versions
    assert describe_fields({**GPT2, "multi_query": True}, "config.json").num_kv_heads == 1
    head = TensorHeader("lm_head.weight", (96, 64), "F32")
    assert not describe_fields(GPT2, "config.json", [head]).tied_embeddings


def test_the_sizes_of_a_model_that_also_reads_images_are_those_of_its_text() -> None:
    text = {key: value for key, value in PLAIN.items() if key != "architectures"}
    fields = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "vision_config": {"hidden_size": 7, "num_hidden_layers": 40},
    }
    tensors = [
        TensorHeader("language_model.model.layers.0.mlp.up_proj.weight", (128, 64), "F32"),
        TensorHeader("vision_tower.encoder.layers.30.mlp.fc1.weight", (64, 7), "F32"),
    ]
    found = describe_fields(fields, "config.json", tensors)
    assert (found.hidden_size, found.num_layers, found.model_type) == (64, 2, "gemma3")
    assert found.usable_positions == 256  # the factor is in it already
    assert num_parameters(found) == 128 * 64 + 64 * 7
    assert found.token_weights == (128 * 64, 0, 0)


def test_positions_of_a_run_with_longrope_are_those_of_its_table() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    for own in ({"original_max_position_embeddings": 64}, {}):  # beside the parameters, or among them
        scaling = {**rope, "original_max_position_embeddings": 32 if own else 64}
        found = describe_fields({**PLAIN, **own, "rope_scaling": scaling}, "config.json")
        assert [found.positions_in(tokens) for tokens in (1, 64, 65)] == [64, 64, 256]
    assert describe_fields(PLAIN, "config.json").positions_in(1) == 256


def test_buffers_and_layers_that_predict_several_tokens_do_not_count() -> None:
    names = ["model.layers.0.w.weight", "model.layers.2.w.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    tensors = [TensorHeader(name, (4, 4), "F32") for name in names]
    found = describe_fields({**PLAIN, "tie_word_embeddings": True}, "config.json", [*tensors, _head()])
    assert [tensor.name for tensor in found.tensors] == names[:1]


def _head() -> TensorHeader:
    return TensorHeader("lm_head.weight", (16, 64), "BF16")


def test_a_value_head_replaces_that_of_the_vocabulary(tmp_path: Path) -> None:
    found = describe_model(write_other_model(tmp_path))
    names = {tensor.name: tensor.shape for tensor in model_tensors(found.with_value_head)}
    assert names["score.weight"] == (1, 64)
    assert "lm_head.weight" not in names
    assert num_parameters(found) - num_parameters(found.with_value_head) == 15 * 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM' is not a causal language model"),
        ({"is_encoder_decoder": True}, "is not a causal language model"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        ({"hidden_size": -4}, "hidden_size = -4 is not a valid count"),
        ({"hidden_size": True}, "hidden_size = True is not a valid count"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide into num_key_value_heads 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is neither true nor false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor = 'x' is not a number above 0"),
        ({"rope_scaling": 3}, "rope_scaling is not an object"),
        ({"text_config": []}, "text_config is not an object"),
        ({"num_experts": 4}, "'num_experts_per_tok' is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5 of 4 experts"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"the weights are quantised \(quantization_config\)"),
    ],
)
def test_a_description_needs_valid_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        describe_fields({**PLAIN, **changes}, "config.json")
    assert caught.value.where == "config.json"


def test_any_value_of_a_field_is_read_or_refused() -> None:
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    fields = {**PLAIN, **latent, **experts, "first_k_dense_replace": 1, "text_config": {}, "head_dim": 8}
    fields |= {"rope_scaling": scaling, "multi_query": False, "quantization_config": None}
    odd = (None, 0, -1, 1, 10**30, 1.5, float("nan"), float("inf"), "", "x", [], [1], ["x"], {}, {"a": 1}, True, False)
    refused = read = 0
    for name, value in product([*fields, *(f"rope_scaling.{inner}" for inner in scaling)], odd):
        outer, _, inner = name.partition(".")
        changed = {**fields, outer: {**scaling, inner: value} if inner else value}
        try:
            found = describe_fields(changed, "config.json")
        except UserError:
            refused += 1
        else:
            read += 1
            assert found.usable_positions >= found.max_positions
            assert min(num_parameters(found), forward_flops(found, [3])) > 0
    assert min(read, refused) > 50


def test_classifiers_are_described_where_they_are_accepted() -> None:
    fields = {**PLAIN, "architectures": ["Gemma2ForSequenceClassification"]}
    assert describe_fields(fields, "config.json", classifier=True).num_layers == 2
    with pytest.raises(UserError, match="is not a causal language model"):
        describe_fields(fields, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 16},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"a_new_feature": 1},
    ],
)
def test_a_feature_that_a_family_lacks_leaves_a_description(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_model(tmp_path)
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), "model_type": "qwen2"}
    file.write_text(json.dumps(fields))
    assert isinstance(describe_model(folder), ModelShape)
    file.write_text(json.dumps({**fields, **changes}))
    found = describe_model(folder)
    assert not isinstance(found, ModelShape)
    assert len(found.tensors) == len(read_tensors(folder))
    file.write_text(json.dumps({**fields, "rms_norm_eps": -1}))
    with pytest.raises(UserError, match="rms_norm_eps = -1 is not a number above 0"):
        describe_model(folder)


def test_code_of_the_folder_is_refused_unless_the_configuration_allows_it(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoModelForCausalLM": "modeling.Ours"}}
    with pytest.raises(UserError, match=r"has no model type 'ours', and the folder has code of its own") as caught:
        describe_model(write_other_model(tmp_path, **own, model_type="ours"))
    assert "set model.trust_remote_code to true" in caught.value.remedy
    assert describe_model(tmp_path, trusted=True).model_type == "ours"
    assert describe_model(write_other_model(tmp_path / "phi", **own, model_type="phi3")).model_type == "phi3"


def test_weights_of_an_unknown_family_agree_with_config_and_index(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path)
    found = describe_model(folder)
    assert check_weights(folder, found).shapes == {tensor.name: tensor.shape for tensor in found.tensors}
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "gone": "a.safetensors"}}))
    with pytest.raises(UserError, match="lists 'gone', which no file has"):
        check_weights(folder, found)
    for changes, message in (
        ({"num_hidden_layers": 3}, "no tensor of layer 2, config.json has 3 layers"),
        ({"vocab_size": 17}, "has 16 rows, config.json a vocabulary of 17"),
    ):
        other = write_other_model(tmp_path / "other")
        file = other / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        with pytest.raises(UserError, match=message):
            check_weights(other, describe_model(other))


def test_parameters_are_estimated_without_files(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path)
    exact = num_parameters(describe_model(folder))
    (folder / "model.safetensors").unlink()
    assert num_parameters(describe_model(folder)) == pytest.approx(exact, rel=0.02)


def test_new_files_are_read_again(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path)
    before = describe_model(folder)
    write_safetensors(folder / "model.safetensors", {"model.layers.0.w.weight": (3, 5)})
    assert num_parameters(before) > num_parameters(describe_model(folder)) == 15


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


ROPE_FIELDS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 100}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
BASE = 1e4 * (3 * 400 / 100 - 2) ** (16 / 14)  # at 400 tokens, of heads of 16 dimensions
FIXED = {"rope_type": "default", "rope_theta": BASE}


@pytest.mark.parametrize(
    ("rope", "fixed"),
    [
        ({"rope_parameters": {**DYNAMIC, "rope_theta": 1e4}}, {"rope_parameters": FIXED}),
        ({"rope_parameters": DYNAMIC, "rope_theta": 1e4}, {"rope_parameters": FIXED, "rope_theta": BASE}),
        ({"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_theta": 1e4}, {"rope_theta": BASE}),
    ],
)
def test_files_of_each_age_keep_their_form(rope: dict[str, Any], fixed: dict[str, Any]) -> None:
    given = {**ROPE_FIELDS, **rope}
    found = fix_fields(given, 400)
    assert found == {**ROPE_FIELDS, **fixed, "max_position_embeddings": 400}
    assert has_dynamic_rope(given)
    assert not has_dynamic_rope(found)
    assert fix_fields(found, 800) == found
    within = fix_fields(given, 100)
    assert (within["max_position_embeddings"], "rope_scaling" in within) == (100, False)
    assert 1e4 in (within.get("rope_theta"), within.get("rope_parameters", {}).get("rope_theta"))


def test_part_of_a_head_is_rotated() -> None:
    partial = {"rope_theta": 1e4 * 10 ** (8 / 6), "rope_type": "default", "partial_rotary_factor": 0.5}
    inner = {**DYNAMIC, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert fix_fields({**ROPE_FIELDS, "rope_scaling": inner}, 400)["rope_parameters"] == pytest.approx(partial)
    outer = fix_fields({**ROPE_FIELDS, "rope_scaling": DYNAMIC, "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 400)
    assert outer["rope_theta"] == pytest.approx(partial["rope_theta"])
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "head_dim": 99, "rope_scaling": DYNAMIC, "rope_theta": 1e4}
    assert fix_fields({**ROPE_FIELDS, **latent}, 400)["rope_theta"] == pytest.approx(partial["rope_theta"])


def test_kinds_of_layers_are_fixed_where_they_are_dynamic() -> None:
    other = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    kinds = {"full_attention": {**DYNAMIC, "rope_theta": 1e4}, "sliding_attention": other}
    found = fix_fields({"text_config": {**ROPE_FIELDS, "rope_parameters": kinds}, "vision_config": {}}, 400)
    assert found["vision_config"] == {}
    assert found["text_config"]["rope_parameters"] == {"full_attention": FIXED, "sliding_attention": other}
    assert found["text_config"]["max_position_embeddings"] == 400


def test_other_kinds_stay() -> None:
    for rope in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}):
        assert fix_fields({**ROPE_FIELDS, **rope}, 400) == {**ROPE_FIELDS, **rope}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**DYNAMIC, "alpha": 1000.0}, "dynamic RoPE with alpha = 1000.0 does not depend on length; leave it out"),
        (DYNAMIC, "config.json has rope_theta = None, but dynamic RoPE is fixed by a number above 0; add rope_theta"),
        ({**DYNAMIC, "rope_theta": 1e4, "factor": "2"}, "config.json has factor = '2', but"),
    ],
)
def test_what_cannot_be_fixed_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        fix_fields({**ROPE_FIELDS, "rope_parameters": rope}, 400)
    assert caught.value.where == "model.rope_tokens"
