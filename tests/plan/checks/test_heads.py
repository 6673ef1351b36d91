"""Heads that guess: what is not the policy's, or no head, is refused in one line; memory is that of their tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlhpc.config.schema import RunConfig
from rlhpc.models import shape_of
from rlhpc.models.heads import read_head
from rlhpc.plan.checks.speculative import draft_faults, speculative_faults
from rlhpc.plan.estimates import engine_weights
from rlhpc.plan.estimates.memory import engine_bytes
from tests.helpers.configs import least_config
from tests.helpers.published import DEEPSEEK_V3_BF16, MIXTRAL_8X7B, QWEN25_72B

POLICY = shape_of(QWEN25_72B)
EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 152064,
}
EAGLE3 = {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SMALL_POLICY = shape_of({**QWEN25_72B, **SMALL})


@pytest.fixture(autouse=True)
def _other_files() -> None:
    read_head.cache_clear()
    engine_weights._own_tables.cache_clear()


def config_of(folder: Path, method: str, **rollout: Any) -> RunConfig:
    own = {"speculative": {"method": method, "model": str(folder)}, **rollout}
    return least_config(rollout=own)


def of_head(folder: Path, method: str, fields: dict[str, Any], policy: Any = POLICY, **rollout: Any) -> list[str]:
    """Faults of a head with these fields, whose files are on another machine."""
    (folder / "config.json").write_text(json.dumps(fields))
    read_head.cache_clear()
    config = config_of(folder, method, **rollout)
    assert list(speculative_faults(config)) == []
    return [str(fault) for fault in draft_faults(config, policy, weights=False)]


@pytest.mark.parametrize(("method", "fields"), [("eagle", EAGLE), ("eagle3", EAGLE3), ("eagle3", EAGLE)])
def test_published_heads_are_taken(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert of_head(tmp_path, method, fields) == []
    assert of_head(tmp_path, method, fields, tp=8) == []


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "eagle",
            {"vocab_size": 640},
            "a vocabulary of 640, not of 152064 as the policy's; use a head that was made for",
        ),
        (
            "eagle",
            {"hidden_size": 2048},
            "hidden states of 2048, not of 8192 as the policy's; use a head that was made",
        ),
        ("eagle3", {"target_hidden_size": 512}, "hidden states of 512, not of 8192 as the policy's; use a head that"),
    ],
)
def test_a_head_of_another_policy_is_refused(method: str, changes: Any, message: str, tmp_path: Path) -> None:
    (fault,) = of_head(tmp_path, method, {**EAGLE, **changes})
    assert fault.startswith(f"rollout.speculative.model: {message}")


def test_a_head_that_engines_cannot_cut_or_feed_is_refused(tmp_path: Path) -> None:
    (fault,) = of_head(tmp_path, "eagle", EAGLE, tp=3)[:1]
    assert fault == "rollout.tp: the head: 3 does not divide 64 heads; lower it"
    policy = shape_of(MIXTRAL_8X7B)
    fields = {**EAGLE, "vocab_size": policy.vocab_size, "hidden_size": policy.hidden_size}
    (fault,) = of_head(tmp_path, "eagle3", fields, policy)
    assert fault.startswith("rollout.speculative.method: vLLM returns no hidden states of MixtralForCausalLM")
    assert of_head(tmp_path, "eagle", fields, policy) == []


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle", {"architectures": ["Qwen3ForCausalLM"]}, "architecture ['Qwen3ForCausalLM']; use one of Llama"),
        ("eagle", {"architectures": ["LlamaForCausalLMEagle3"]}, "architecture ['LlamaForCausalLMEagle3']; use one"),
        ("eagle", {"num_hidden_layers": None}, "num_hidden_layers is None in its config.json; use a head as it was"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc of its config.json; use a head without it"),
    ],
)
def test_no_head_is_refused(method: str, changes: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE, **changes}))
    with pytest.raises(Exception, match="no head that guesses") as raised:
        list(draft_faults(config_of(tmp_path, method), POLICY))
    assert str(raised.value).startswith(f"rollout.speculative.model: no head that guesses: {message}")


def with_files(folder: Path, method: str, **changes: Any) -> list[str]:
    """Faults of a small head with its files, of which ``changes`` have another shape, or None: are missing."""
    fields = {**EAGLE, **SMALL, "draft_vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    read_head.cache_clear()
    shapes = {**read_head(folder, method).tensors, **changes}
    save_file({n: np.zeros(s, np.float32) for n, s in shapes.items() if s is not None}, folder / "model.safetensors")
    return [str(fault) for fault in draft_faults(config_of(folder, method), SMALL_POLICY)]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_s_files_have_its_tensors(method: str, tmp_path: Path) -> None:
    assert with_files(tmp_path, method) == []
    assert with_files(tmp_path, method, **{"embed_tokens.weight": (128, 64)}) == []
    for changes, message in (
        ({"fc.weight": None}, "no tensor 'fc.weight'"),
        ({"fc.weight": (64, 64)}, "fc.weight is of [64, 64], not [64, "),
        ({"embed_tokens.weight": (64, 64)}, "embed_tokens.weight is of [64, 64], not [128, 64]"),
        ({"model.norm.weight": (64,)}, "a tensor 'model.norm.weight'"),
    ):
        (fault,) = with_files(tmp_path, method, **changes)
        assert fault.startswith(f"{tmp_path}: no head of {method}: {message}")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_s_memory_is_that_of_its_files(method: str, tmp_path: Path) -> None:
    own = {"embed_tokens.weight": (128, 64)}
    assert with_files(tmp_path, method, **own) == []
    shapes = {**read_head(tmp_path, method).tensors, **own}
    sections = config_of(tmp_path, method).rollout, least_config().rollout
    found, without = (engine_bytes(section, SMALL_POLICY, "bfloat16", None, 1000) for section in sections)
    longs = 6 * 64 if method == "eagle3" else 0  # places in the table of tokens have 8 bytes, not 2
    assert found.weights - without.weights == 2 * sum(map(prod, shapes.values())) + longs
    assert found.token - without.token == 2 * 2 * 2 * 16


def of_layers(folder: Path, policy: dict[str, Any], tensor: str) -> list[str]:
    """Faults of a policy's own layers, of whose files there is one tensor."""
    (folder / "config.json").write_text(json.dumps(policy))
    save_file({tensor: np.zeros(1, np.float32)}, folder / "model.safetensors")
    own = {"model": {"path": str(folder)}, "rollout": {"speculative": {"method": "mtp"}}}
    config = least_config(**own)
    assert list(speculative_faults(config)) == []
    return [str(fault) for fault in draft_faults(config, shape_of(policy))]


def test_a_policy_has_the_layer_that_mtp_needs(tmp_path: Path) -> None:
    own = "model.layers.61.eh_proj.weight"
    assert of_layers(tmp_path, DEEPSEEK_V3_BF16, own) == []
    (fault,) = of_layers(tmp_path, DEEPSEEK_V3_BF16, "model.layers.60.eh_proj.weight")
    assert fault.startswith(f"{tmp_path}: no layer that predicts a further token, as mtp needs: no tensor {own!r}")
    (fault,) = of_layers(tmp_path, {**DEEPSEEK_V3_BF16, "num_nextn_predict_layers": 0}, own)
    assert "as mtp needs: num_nextn_predict_layers is 0 in its config.json; use a folder" in fault
    (fault,) = of_layers(tmp_path, QWEN25_72B, own)
    assert fault.startswith("rollout.speculative.method: engines of Qwen2ForCausalLM are not known to guess by its own")
