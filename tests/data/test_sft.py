"""Supervised examples from both forms of rows."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.schema import SFTSection
from rlhpc.core.errors import UserError
from rlhpc.data.prompts import Readers
from rlhpc.data.sft import Example, SFTSet
from rlhpc.data.tokenizer import Tokenizer
from tests.helpers.waiting import PATIENCE

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


def load(tokenizer: Tokenizer, tmp_path: Path, *rows: dict[str, Any]) -> SFTSet:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTSet.load(SFTSection(data=[path], steps=1), tokenizer)


def parts(tokenizer: Tokenizer, example: Example) -> tuple[str, str]:
    """Text before the first trained token, and the trained text."""
    rest = example.tokens[example.prompt_len :]
    return (
        tokenizer.decode(example.tokens[: example.prompt_len], special=True),
        tokenizer.decode(rest[example.trained], special=True),
    )


def test_both_forms_give_the_same_example(tokenizer: Tokenizer, tmp_path: Path):
    examples = load(tokenizer, tmp_path, {"messages": CHAT}, {"prompt": "1+2=", "response": "3"})
    for example in examples.sequences:
        assert parts(tokenizer, example) == ("<|user|>1+2=<|assistant|>", "3<|end|>")


def test_only_the_last_answer_is_trained_on(tokenizer: Tokenizer, tmp_path: Path):
    turns = [*CHAT, {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    (example,) = load(tokenizer, tmp_path, {"messages": turns}).sequences
    begun = "<|user|>1+2=<|assistant|>3<|end|><|user|>2+2=<|assistant|>"
    assert parts(tokenizer, example) == (begun, "4<|end|>")


def test_an_example_starts_with_the_prompt_that_rl_uses(tokenizer: Tokenizer, tmp_path: Path):
    (example,) = load(tokenizer, tmp_path, {"messages": CHAT}).sequences
    assert tuple(example.tokens[: example.prompt_len]) == tokenizer.encode_prompts([CHAT[:1]])[0]


def test_taking_wraps_and_repeats_for_the_same_cursor(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{"prompt": str(i), "response": str(i)} for i in range(5)]
    examples = load(tokenizer, tmp_path, *rows)
    taken, cursor = examples.take(3, 4, seed=0)
    again, _ = examples.take(3, 4, seed=0)
    assert cursor == 7
    assert (len(taken), taken) == (4, again)
    assert sorted(examples.take(5, 5, seed=0)[0]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_tokenize_a_part_each_have_the_same_examples(tokenizer: Tokenizer, tmp_path: Path, count: int):
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in (3, 1, 30, 222, 5, 40, 7)]
    alone = load(tokenizer, tmp_path, *rows)
    section = SFTSection(data=[tmp_path / "sft.jsonl"], steps=1)
    parts: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    encoded: list[int] = []

    def read(rank: int) -> SFTSet:
        def gather(part: Any) -> list[Any]:
            parts[rank] = part
            encoded.append(len(part[2]))
            barrier.wait(timeout=PATIENCE)
            found = list(parts)
            barrier.wait(timeout=PATIENCE)
            return found

        return SFTSet.load(section, tokenizer, readers=Readers(rank, count, gather))

    with ThreadPoolExecutor(count) as ranks:
        everyone = list(ranks.map(read, range(count)))
    assert sum(encoded) == len(rows), "each example once"
    for examples in everyone:
        for found, expected in zip(examples.sequences, alone.sequences, strict=True):
            assert (found.tokens.tolist(), found.prompt_len) == (expected.tokens.tolist(), expected.prompt_len)


def test_an_example_longer_than_the_model_names_its_row(tokenizer: Tokenizer, tmp_path: Path):
    """Not a step of the run that happens to meet it."""
    load(tokenizer, tmp_path, {"prompt": "1+2=", "response": "3"}, {"prompt": "1+2=", "response": "33"})
    section = SFTSection(data=[tmp_path / "sft.jsonl"], steps=1)
    tokens = 1 + 4 + 1 + 1 + 1  # of the first one: user, question, assistant, answer, end
    assert len(SFTSet.load(section, tokenizer, longest=tokens + 1)) == 2
    with pytest.raises(
        UserError, match=rf"sft.jsonl:2: the example has {tokens + 1} tokens, but the model has {tokens} positions"
    ):
        SFTSet.load(section, tokenizer, longest=tokens)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CHAT[:1]}, "do not end with an assistant's response"),
        ({"messages": [*CHAT, CHAT[0]]}, "do not end with an assistant's response"),
        ({"messages": CHAT[1:]}, "do not end with an assistant's response"),
        ({"messages": "1+2="}, "column 'messages' is '1\\+2='"),
        ({"text": "1+2=3"}, "neither a column 'messages' nor 'prompt' and 'response'; add them; the row has 'text'"),
        ({"prompt": "1"}, "column 'response' is missing"),
        ({"prompt": "1", "response": 3}, "column 'response' is 3"),
    ],
)
def test_other_rows_are_refused_by_line(tokenizer: Tokenizer, tmp_path: Path, row: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"sft.jsonl:2: .*{message}"):
        load(tokenizer, tmp_path, {"messages": CHAT}, row)


def test_an_empty_file_is_an_error(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"sft.data: holds no examples"):
        load(tokenizer, tmp_path)
