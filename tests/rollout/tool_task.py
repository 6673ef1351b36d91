"""A task whose policy calls tools without having learnt to: whole calls are tokens of its small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import make_model

USER, ASSISTANT, TOOL, END, NONE = "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|none|>"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}+{% endfor %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT = 512


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    call("add", a=12, b=30),
    call("count"),
    call("reach", host="x"),
    call("talk", words=500),
    "<tool_call>{]</tool_call>",
)


def make_tokenizer() -> Any:
    from transformers import AddedToken, Qwen2Tokenizer

    words = [NONE, END, USER, ASSISTANT, TOOL, *"0123456789+=", *"eror: ".replace(" ", "Ġ")]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(dict.fromkeys(words))},
        merges=[],
        unk_token=NONE,
        pad_token=NONE,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT, TOOL],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CALLS])
    return tokenizer


def make_task(folder: Path, kind: str = "qwen2") -> Path:
    """``model/`` and ``train.jsonl`` in the folder."""
    tokenizer = make_tokenizer()
    make_model(folder / "model", kind, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    tokenizer.save_pretrained(folder / "model")
    # The first two calls end a turn by themselves, so that many are made; the others before the end token as usual.
    ends = tokenizer.convert_tokens_to_ids([END, *CALLS[:2]])
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "reward_model": {"ground_truth": str(2 * n)},
        }
        for n in range(10, 42)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tool_sections() -> list[dict[str, Any]]:
    module = "tests.rollout.tool_functions"
    return [
        {"name": "add", "function": f"{module}:add", "arguments": {"places": 1}},
        {"name": "reach", "function": f"{module}:reach"},
        {"name": "wait", "function": f"{module}:wait"},
        {"name": "talk", "function": f"{module}:talk"},
        {"name": "die", "function": f"{module}:die"},
        {"name": "count", "function": f"{module}:Counter"},
    ]
