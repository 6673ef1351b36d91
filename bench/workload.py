"""Workloads of the GRPO benchmark, shared by all systems. No dependencies."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SEED = 0
KL_COEFFICIENT = 0.001
# Small enough that weights, and hence response lengths, do not change.
LEARNING_RATE = 1e-8


class Vocabulary:
    """Byte-pair vocabulary in which each word of two syllables, with or without a leading blank, is one token.

    For the pre-tokenizer of Qwen2 ("Ġ" is its blank), which transformers uses for every qwen2 model regardless of the
    tokenizer in its folder.
    """

    def __init__(self, size: int) -> None:
        consonants = "bcdfghjklmnpqrstvwxyz"[: 21 if size > 1000 else 5]
        syllables = [(c, v) for c in consonants for v in "aeiou"]
        tokens = ["<pad>", "<eos>", "<unk>", "Ġ", *"aeiou", *consonants, *(c + v for c, v in syllables)]
        pairs = [("".join(a), "".join(b)) for a in syllables for b in syllables]
        pairs = pairs[: (size - len(tokens)) // 2]
        self.words = [a + b for a, b in pairs]
        self.merges = [*syllables, *pairs, *(("Ġ", word) for word in self.words)]
        tokens += self.words + ["Ġ" + word for word in self.words]
        tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
        self.ids = {token: i for i, token in enumerate(tokens)}


@dataclass(frozen=True)
class Workload:
    """A Qwen2 model with an untied head, and the size of a GRPO step."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    prompt_tokens: tuple[int, int]  # shortest and longest
    max_response: int
    hazard: float  # probability that a sampled token ends the response
    prompts_per_step: int = 8
    samples_per_prompt: int = 8

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def prompts(self, count: int) -> list[str]:
        """Prompts of ragged lengths, one token per word, from a fixed seed."""
        rng = random.Random(SEED)
        words = Vocabulary(self.vocab).words
        return [" ".join(rng.choices(words, k=rng.randint(*self.prompt_tokens))) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        # The demo's model: responses up to 32 tokens, a quarter of them truncated.
        Workload("tiny", 2, 128, 4, 2, 512, 128, prompt_tokens=(6, 10), max_response=32, hazard=0.044),
        # 32 million parameters: mean response 170 tokens, one in seventeen truncated at 512.
        Workload("30m", 8, 512, 8, 4, 1408, 8192, prompt_tokens=(8, 64), max_response=512, hazard=1 / 180),
    )
}


def write_prompts(file: Path, prompts: Iterable[str]) -> None:
    """Writes prompts with the columns of rlhpc's data files."""
    columns = {"data_source": "bench", "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {}}
    file.write_text("".join(json.dumps({**columns, "prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def parity(text: str) -> float:
    """Reward for all systems: 1 for a text of even length. Costs nothing and varies within a group."""
    return float(len(text) % 2 == 0)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """``parity`` with the signature of rlhpc's reward functions."""
    return parity(solution_str)


def varied(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """A reward from 0 to 1 that depends only on the text, so that every group has non-zero advantages."""
    return zlib.crc32(solution_str.encode()) % 256 / 255
