"""Guesses of a policy's own multi-token-prediction layer change no token; its weights are the policy's folder's."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.described import describe_model
from rlhpc.config.schema import RolloutSection
from rlhpc.plan.estimates.engine_weights import draft_kv_elements, draft_weights
from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_mtp
from tests.rollout import engines
from tests.rollout.guesses import head_requests, heading, in_parts

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


def generated(policies: list[Path], section: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Responses of each of the policies, asleep before each sync."""
    shape = describe_model(policies[0])
    engine = engines.build(policies[0], speculative=section, shape=shape)
    found = []
    for policy in policies:
        engines.sync(engine, policy)
        engine.statistics()
        sampled, cut = head_requests(1.0)[1:], head_requests(0.8, 0.9, top_k=20)[1:3]
        completions = engine.generate([*head_requests(0.0)[1:4], *sampled, *cut])
        acceptance = engine.statistics().get("engine/guess_acceptance_mean")
        completions += in_parts(engine, sampled, 7, 4)
        engine.sleep()
        found.append({"tokens": [one.tokens.tolist() for one in completions], "acceptance": acceptance})
    model = getattr(getattr(engines.worker(engine).model_runner, "drafter", None), "model", None)
    if model is not None:
        found[0]["own"] = sum(map(prod, model.packed_weights.shapes.values()))
    return found


def compare(folder: Path, kind: str) -> None:
    changes = {"vocab_size": engines.VOCAB, "max_position_embeddings": engines.CONTEXT, **engines.CHANGES.get(kind, {})}
    policies = [make_mtp(folder / name, kind, seed, **changes) for seed, name in enumerate("ab")]
    (plain,), (guessed,) = (run_ranks(generated, 1, policies, given) for given in (None, heading("mtp", None)))
    for one, other in zip(guessed, plain, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["acceptance"] > 0.97, "the embedding and LM head are the newest policy's"
    section = RolloutSection(speculative={"method": "mtp"})
    predicted = draft_weights(section, describe_model(policies[0]), "float32")
    assert predicted == 4 * guessed[0]["own"]


@pytest.mark.long
def test_deepseek_s_layer_guesses_and_changes_no_token(tmp_path: Path) -> None:
    compare(tmp_path, "dsv3")


def test_glm_s_layer_guesses_and_changes_no_token(tmp_path: Path) -> None:
    compare(tmp_path, "glm4_moe")


def test_keys_and_values_of_a_layer_that_guesses_are_one_layer_s(tmp_path: Path) -> None:
    make_mtp(tmp_path / "dsv3", "dsv3", 0)
    shape = describe_model(tmp_path / "dsv3")
    assert draft_kv_elements(RolloutSection(speculative={"method": "mtp"}), shape) == 32 + 16
