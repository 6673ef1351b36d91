"""Fields of config.json that an engine ignores are found and named, and vLLM is refused what it computes otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.plan.checks.architecture import ProbeResult
from tests.helpers.distributed import run_ranks
from tests.rollout.engines import cpu_only
from tools.architectures_table import RESULTS, probe_apart, served_kinds

PARTS = 10  # of the architectures

# A model_type, with the fields that its engine ignores. Of each, the tiny copy has another value than its class.
PLANTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ("llama", {"rms_norm_eps": 1e-2}),
    ("olmoe", {"clip_qkv": 8.0, "norm_topk_prob": True}),
    ("phi3", {"sliding_window": 2047}),
    ("granite", {"attention_multiplier": 0.015625}),
    ("granite", {"residual_multiplier": 0.22}),
    ("granite", {"logits_scaling": 8.0}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
]


def _config(kind: str, fields: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**fields)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "fields"), PLANTED, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_fields_that_an_engine_ignores_are_named(kind: str, fields: dict[str, Any]) -> None:
    """The engine is transformers' own model with the defaults of its class."""
    from rlhpc.backends.fsdp.probe import random_model, tiny_copy
    from rlhpc.trainer import engine_proof

    torch.manual_seed(0)
    config = _config(kind, fields)
    tiny = tiny_copy(config, real_heads=True)
    reference = engine_proof.scaled(random_model(tiny))
    defaults = type(config)().to_dict()
    engine = engine_proof.with_fields(tiny, {name: defaults[name] for name in fields}, reference)
    result = engine_proof.compared(config, tiny, reference, _sampled(engine), engine_proof.LIMIT)
    assert not result.works
    named, _, apart = result.reason.removeprefix("vLLM ignores ").partition(" (config.json): ")
    assert {part.partition(" = ")[0] for part in named.split(", ") if " = " in part} >= fields.keys(), result.reason
    assert apart.startswith("log-probs differ by ")
    assert engine_proof.compared(config, tiny, engine, _sampled(engine), engine_proof.LIMIT).works


@torch.no_grad()
def _sampled(model: Any) -> list[Any]:
    """A model's own log-probs of random responses."""
    from rlhpc.trainer.engine_proof import ProofSample, sequences

    found = []
    for prompt in sequences():
        tokens = torch.tensor([[*prompt, *range(20, 36)]])
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        selected = log_probs[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        found.append(ProofSample(tuple(tokens[0].tolist()), selected))
    return found


@pytest.mark.long
@pytest.mark.workers
@pytest.mark.vllm
@cpu_only
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_stored_of_vllm_is_found_again(part: int) -> None:
    rows = json.loads(RESULTS.read_text())["architectures"]
    kinds = [kind for kind in served_kinds(rows) if "engine" in rows[kind]][part::PARTS]
    found = probe_apart(kinds, engines=True)
    assert {kind: row["engine"]["works"] for kind, row in found.items()} == {
        kind: rows[kind]["engine"]["works"] for kind in kinds
    }


def _proofs(configs: list[tuple[str, dict[str, Any]]]) -> list[ProbeResult]:
    from rlhpc.trainer.engine_proof import prove

    return [prove(_config(kind, fields)) for kind, fields in configs]


@pytest.mark.ranks
@pytest.mark.vllm
@cpu_only
def test_vllm_is_refused_what_it_computes_otherwise_or_cannot_load(tmp_path: Path) -> None:
    configs: list[tuple[str, dict[str, Any]]] = [("qwen3", {}), ("olmoe", {"clip_qkv": 8.0}), ("phi", {})]
    ((qwen, olmoe, phi),) = run_ranks(_proofs, 1, configs)
    assert qwen.works
    assert qwen.differences["engine, log-probs"] < 1e-4
    assert olmoe.reason.startswith("vLLM ignores clip_qkv = 8.0 (config.json): log-probs differ by ")
    assert not phi.works
    assert "\n" not in phi.reason
