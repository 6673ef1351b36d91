"""How the installed vLLM serves an architecture, as vLLM itself resolves it."""

from __future__ import annotations

import sys

import pytest

from rlhpc.core.errors import UserError
from rlhpc.plan.checks.architecture import check_served, served_by
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.vllm
KINDS = {
    "LlamaForCausalLM": "native",
    "Gemma2ForCausalLM": "native",
    "GptOssForCausalLM": "native",
    "Olmo2ForCausalLM": "transformers",  # in vLLM's own list
    "HeliumForCausalLM": "transformers",  # because transformers' class has the attention interface
    "CodeGenForCausalLM": "no",  # it has not
    "UnheardOfForCausalLM": "no",
}


def kinds() -> dict[str, str]:
    from rlhpc.rollout import served

    return {architecture: served.served_by(architecture) for architecture in KINDS}


@pytest.mark.ranks
def test_architectures_are_served_by_vllm_by_transformers_or_not():
    assert run_ranks(kinds, 1, join=False) == [KINDS]


def test_an_architecture_that_is_not_served_is_refused_without_importing_vllm():
    before = {"vllm", "transformers"} & sys.modules.keys()
    with pytest.raises(UserError) as caught:
        check_served("UnheardOfForCausalLM", "model.path")
    assert str(caught.value).startswith("model.path: the installed vLLM does not serve UnheardOfForCausalLM")
    assert {"vllm", "transformers"} & sys.modules.keys() == before


def test_nothing_is_said_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    served_by.cache_clear()
    assert served_by("LlamaForCausalLM") is None
    served_by.cache_clear()
