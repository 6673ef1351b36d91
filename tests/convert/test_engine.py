"""A folder that came back from Megatron's format, in vLLM as it is: it answers as with the files it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.convert.helpers import to_huggingface, to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

KINDS = ("qwen2_tied", "qwen3moe")


def answers(folders: list[Path]) -> list[Any]:
    from tests.rollout.engines import stock_greedy

    return [stock_greedy(folder, 1, max_tokens=8) for folder in folders]


@pytest.mark.ranks
@pytest.mark.vllm
def test_vllm_answers_the_same(tmp_path: Path) -> None:
    pairs = []
    for kind in KINDS:
        model = make_model(tmp_path / kind, kind, vocab_size=200)
        there = to_megatron(model, tmp_path / f"{kind}-megatron", tp=2)
        pairs.append((model, to_huggingface(there, tmp_path / f"{kind}-back", file_bytes=300_000)))
        assert len(list(pairs[-1][1].glob("*.safetensors"))) > 1
    found = run_ranks(answers, 1, [folder for pair in pairs for folder in pair])[0]
    assert found[0::2] == found[1::2]
