"""The demo's generated inputs: sums of two two-digit numbers, a tokenizer of single characters, a small Qwen2 with
random weights.

The demonstrations for the supervised warm-up often forget to carry, so that the warmed-up model mostly answers 47+38
with 75. RL then rewards correct answers only.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, write_json

NONE, USER, ASSISTANT, END = "<|none|>", "<|user|>", "<|assistant|>", "<|end|>"
VOCABULARY = (NONE, USER, ASSISTANT, END, *"0123456789+=")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_RECIPE = "recipe.json"
_MAX_POSITIONS = 64
_MODEL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 512}

Problem = tuple[int, int]


def make(folder: str, seed: int = 0, validation: int = 256, forgotten_carries: float = 0.6) -> None:
    """Creates ``model/``, ``train.parquet``, ``validation.jsonl`` and ``sft.jsonl`` in ``folder``, atomically.

    Does nothing if they exist; raises UserError if they were created with other arguments. ``validation`` is the number
    of held-out problems; neither a+b nor b+a of these is in the other files. ``forgotten_carries`` is the share of
    demonstrations without carries.
    """
    recipe = {"seed": seed, "validation": validation, "forgotten_carries": forgotten_carries, **_MODEL}
    target = Path(folder)
    if target.exists():
        _check_recipe(target, recipe)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _save_model(work / "model", seed)
        _save_data(work, seed, validation, forgotten_carries)
        write_json(work / _RECIPE, recipe)
        os.rename(work, target)
    except OSError:
        # Renaming onto a folder that is not empty fails: another process may have created it first.
        if not (target / _RECIPE).is_file():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def split_problems(seed: int, validation: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems, each shuffled. For a held-out a+b, b+a is in neither list."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    held_out = [pair if generator.random() < 0.5 else pair[::-1] for pair in generator.sample(pairs, validation)]
    excluded = {tuple(sorted(pair)) for pair in held_out}
    training = [(a, b) for a in range(10, 100) for b in range(10, 100) if tuple(sorted((a, b))) not in excluded]
    generator.shuffle(training)
    return training, held_out


def add_without_carrying(a: int, b: int) -> int:
    """Sum without carries: 47+38 gives 75."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def _check_recipe(target: Path, recipe: dict[str, Any]) -> None:
    file = target / _RECIPE
    if not file.is_file():
        raise UserError(
            f"{str(target)!r} exists, but was not created by this function",
            where="prepare.arguments",
            remedy="name another folder",
        )
    for name, former in read_json(file).items():
        if recipe.get(name) != former:
            raise UserError(
                f"{name} is {recipe.get(name)!r}, but {str(target)!r} was created with {former!r}",
                where="prepare.arguments",
                remedy="name another folder, or remove this one",
            )


def _save_data(folder: Path, seed: int, validation: int, forgotten_carries: float) -> None:
    import pyarrow
    from pyarrow import parquet

    training, held_out = split_problems(seed, validation)
    generator = random.Random(seed)
    parquet.write_table(
        pyarrow.Table.from_pylist([_prompt_row(problem, "train", i) for i, problem in enumerate(training)]),
        folder / "train.parquet",
    )
    _write_lines(folder / "validation.jsonl", [_prompt_row(p, "validation", i) for i, p in enumerate(held_out)])
    demonstrations = []
    for a, b in training:
        answer = add_without_carrying(a, b) if generator.random() < forgotten_carries else a + b
        demonstrations.append({"messages": [_question(a, b), {"role": "assistant", "content": str(answer)}]})
    _write_lines(folder / "sft.jsonl", demonstrations)


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a}+{b}="}


def _prompt_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    a, b = problem
    return {
        "data_source": "rlhpc/addition",
        "prompt": [_question(a, b)],
        "ability": "maths",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _save_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    end, none = VOCABULARY.index(END), VOCABULARY.index(NONE)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        num_hidden_layers=_MODEL["layers"],
        hidden_size=_MODEL["hidden"],
        num_attention_heads=_MODEL["heads"],
        num_key_value_heads=_MODEL["kv_heads"],
        intermediate_size=_MODEL["ffn"],
        max_position_embeddings=_MAX_POSITIONS,
        initializer_range=0.05,  # small models learn faster than with the usual 0.02
        eos_token_id=end,
        pad_token_id=none,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=none)
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY, _MAX_POSITIONS).save_pretrained(folder)


def make_tokenizer(tokens: Sequence[str], max_length: int) -> Any:
    """Tokenizer without merges; ``tokens`` are single characters and NONE, USER, ASSISTANT and END."""
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=NONE,
        pad_token=NONE,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )
