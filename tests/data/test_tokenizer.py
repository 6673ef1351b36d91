"""Prompts to tokens with and without a chat template, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from rlhpc.data.arithmetic import ASSISTANT, END, USER, VOCABULARY
from rlhpc.data.tokenizer import Tokenizer


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(demo_folder / "model", tmp_path / "model"))


def ids(*tokens: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(token) for token in tokens)


def test_a_plain_text_is_one_user_message(tokenizer: Tokenizer):
    expected = ids(USER, *"1+2=", ASSISTANT)
    messages = [{"role": "user", "content": "1+2="}]
    assert tokenizer.encode_prompts(["1+2=", messages]) == [expected, expected]


def test_earlier_turns_are_rendered(tokenizer: Tokenizer):
    messages = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "2+2="},
    ]
    expected = ids(USER, *"1+2=", ASSISTANT, "3", END, USER, *"2+2=", ASSISTANT)
    assert tokenizer.encode_prompts([messages]) == [expected]


def test_without_template_contents_are_joined(folder: Path):
    tokenizer = Tokenizer.load(folder, vocab_size=16, chat_template=False)
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]
    assert tokenizer.encode_prompts([messages, "1+2="]) == [ids(*"1+2=")] * 2


def test_responses_end_with_the_end_token(tokenizer: Tokenizer):
    assert tokenizer.encode_responses(["46", ""]) == [ids("4", "6", END), ids(END)]


def test_decoding_leaves_special_tokens_out_unless_asked(tokenizer: Tokenizer):
    tokens = ids(USER, "4", "6", END)
    assert tokenizer.decode(tokens) == "46"
    assert tokenizer.decode(tokens, special=True) == "<|user|>46<|end|>"


def test_end_tokens_come_from_tokenizer_then_generation_config(folder: Path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3, 1]}))
    assert Tokenizer.load(folder, 16, True).end_tokens == (3, 0, 1)


def test_no_tokenizer_names_the_folder(tmp_path: Path):
    with pytest.raises(UserError, match=f"^{tmp_path}: no tokenizer can be loaded .*; save the tokenizer"):
        Tokenizer.load(tmp_path, 16, True)


def test_no_chat_template_names_the_key(folder: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"^data.chat_template: .* has no chat template; set it to false"):
        Tokenizer.load(folder, 16, True)
    assert Tokenizer.load(folder, 16, False).encode_prompts(["1"]) == [ids("1")]


def test_ids_beyond_the_model_name_both_numbers(folder: Path):
    with pytest.raises(UserError, match=r"token ids go up to 15, but config.json has vocab_size 15"):
        Tokenizer.load(folder, 15, True)


def test_no_end_token_is_refused(folder: Path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="names an end token; set eos_token"):
        Tokenizer.load(folder, 16, True)


def test_messages_that_the_template_refuses_are_shown(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"data.chat_template: .*'1\+1='.*\(roles must alternate\)"):
        Tokenizer.load(folder, 16, True).encode_prompts(["1+1="])
