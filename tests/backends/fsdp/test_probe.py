"""The proof that an architecture can be trained: what passes, what fails and why, and faults that it must see."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.backends.fsdp import attention_interface
from rlhpc.core.errors import UserError
from rlhpc.models import describe_fields
from rlhpc.models import read_config as read_fields
from rlhpc.plan.checks.architecture import ProbeResult

pytestmark = pytest.mark.heavy  # imports transformers

WORKING = ("gpt_oss", "gemma2", "qwen3_moe", "deepseek_v3")
MORE = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma3", "phi3", "olmo2", "glm4", "granite", "starcoder2"),
    *("smollm3", "cohere2", "exaone4", "afmoe", "gpt2", "opt", "longcat_flash", "laguna", "gemma4_text"),
)
FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({}, "the architecture has layers of linear_attention"),
    "bamba": (
        {},
        r"packed documents influence each other \(2 of 2 layers do not use .*\): logits differ by 1\.\d of the",
    ),
    "llama4_text": ({}, "the architecture has attention in chunks shorter than a document"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "the architecture has layers of conv",
    ),
    "gpt_neo": ({}, "'gpt_neo' has attention of its own, which cannot be replaced"),
    "bert": ({}, "its logits are not the output of its head: they differ by "),
    "mamba": ({}, "packed documents influence each other"),
    "t5": ({}, "a tiny copy does not run in transformers itself: ValueError: Unrecognized configuration"),
}
# What attention may forget, by an architecture that has it.
OPTIONS = {"gemma2": "softcap", "gpt_oss": "s_aux", "mistral": "sliding_window", "granite": "scaling"}


def _probe(kind: str, **changes: Any) -> ProbeResult:
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.probe import probe_config

    return probe_config(AutoConfig.for_model(kind, **changes))


@pytest.mark.parametrize("kind", [*WORKING, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)])
def test_an_architecture_works(kind: str) -> None:
    result = _probe(kind)
    assert result.works, result.reason
    assert set(result.differences) == {f"{what}, {of}" for what in ("packed", "cp 2") for of in ("logits", "gradients")}
    assert max(result.differences.values()) < (2e-5 if kind.startswith("gemma4") else 1e-5)


@pytest.mark.parametrize("kind", FAILING)
def test_an_architecture_fails_with_a_reason(kind: str) -> None:
    changes, reason = FAILING[kind]
    result = _probe(kind, **changes)
    assert not result.works
    assert re.match(reason, result.reason), result.reason
    assert "\n" not in result.reason
    assert len(result.reason) <= 300


def test_linear_attention_shows_in_the_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_interface, "_KINDS", {*attention_interface._KINDS, "linear_attention"})
    result = _probe("qwen3_next")
    assert result.reason.startswith("packed documents influence each other (1 of 2 layers do not use")
    assert result.differences["packed, logits"] > 0.1


def test_attention_across_documents_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the pack as one document."""
    from rlhpc.backends.fsdp import probe
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to

    right = probe.packed_attention

    def attend(module: Any, query: Any, *inputs: Any, **options: Any) -> Any:
        with attending_to(DocumentPack([query.size(2)], query.device)):
            return right(module, query, *inputs, **options)

    monkeypatch.setattr(probe, "packed_attention", attend)
    assert _probe("llama").reason.startswith("packed documents influence each other: logits differ by")


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_forgotten_option_of_attention_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.backends.fsdp import probe

    right, option = probe.packed_attention, OPTIONS[kind]

    def attend(module: Any, *inputs: Any, **options: Any) -> Any:
        options.pop(option)
        return right(module, *inputs, **options)

    monkeypatch.setattr(probe, "packed_attention", attend)
    result = _probe(kind)
    assert not result.works
    assert result.differences.get("packed, logits", 1.0) > 1e-3, result.reason


def test_a_forgotten_scale_of_logits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.backends.fsdp import probe

    assert _probe("granite", logits_scaling=3.0).works
    monkeypatch.setattr(probe, "head_curve", lambda config: (None, 1.0))
    result = _probe("granite", logits_scaling=3.0)
    assert result.reason == "its logits are not the output of its head: they differ by 2 of the largest"


def test_a_wrong_exchange_between_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_interface.heads_to_tokens
    monkeypatch.setattr(attention_interface, "heads_to_tokens", lambda output, *given: right(output.flip(1), *given))
    assert _probe("llama").reason.startswith("2 context-parallel ranks compute other values than one: logits differ")


def test_buffers_that_nothing_computes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.backends.fsdp import probe

    def allocate(model: Any, device: Any) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)

    monkeypatch.setattr(probe, "init_buffers", allocate)
    assert not _probe("llama").works


def test_the_process_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    _probe("llama")
    assert torch.equal(torch.rand(1), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_folder_is_probed_by_its_config(tmp_path: Path) -> None:
    from rlhpc.backends.fsdp.probe import probe

    for fields, works in (({"model_type": "qwen3", "head_dim": 64}, True), ({"model_type": "none_such"}, False)):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        result = probe(tmp_path)
        assert result.works == works
        assert works or result.reason.startswith("transformers cannot read its config.json: ValueError")


def test_a_rotary_embedding_that_depends_on_the_pack_limits_documents() -> None:
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.attention_interface import longest_document
    from rlhpc.backends.fsdp.sharded_model import with_run_rope

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope["original_max_position_embeddings"] = 4096
    result = _probe("phi3", rope_parameters=rope)
    assert result.works, result.reason
    assert result.longest is None, "a run has one table"
    longrope = AutoConfig.for_model("phi3", rope_parameters=rope)
    assert longest_document(longrope) == longest_document(with_run_rope(longrope, 4096)) == 4096
    assert longest_document(with_run_rope(longrope, 4097)) is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert longest_document(AutoConfig.for_model("llama", rope_parameters=dynamic)) == 2048
    assert _probe("llama", rope_parameters=dynamic).longest == 2048
    assert longest_document(AutoConfig.for_model("llama")) is None


def test_dimensions_that_transformers_rotates_by_default_are_refused(tmp_path: Path) -> None:
    """A quarter of a head in StableLM, which a file may leave out."""
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.source import check_base, read_config

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    AutoConfig.for_model("stablelm", rope_parameters=dict(rope), architectures=["StableLmForCausalLM"]).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    for partial in ({"partial_rotary_factor": 0.25}, {}):
        fields = {name: value for name, value in json.loads(file.read_text()).items() if "partial" not in name}
        file.write_text(json.dumps({**fields, "rope_parameters": {**rope, **partial}}))
        config = read_config(tmp_path, tokens=9000, rope_tokens=9000)
        model = describe_fields({**read_fields(tmp_path, 9000), "num_key_value_heads": 32}, str(file))
        if partial:
            check_base(config, model)
            continue
        with pytest.raises(UserError, match=r"transformers rotates with base .*; add partial_rotary_factor") as caught:
            check_base(config, model)
        assert caught.value.where == "model.rope_tokens"
