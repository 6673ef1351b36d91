"""Prompts to tokens with and without a chat template, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

import rlhpc.data.chat_template
from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError
from rlhpc.data.arithmetic import ASSISTANT, END, USER, VOCABULARY
from rlhpc.data.chat_template import Chat
from rlhpc.data.files import check_messages
from rlhpc.data.tokenizer import Tokenizer
from tests.helpers.responses import encode_response
from tests.rollout.tool_task import NONE, make_tokenizer


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
    tokenizer = Tokenizer.load(folder, 16, DataSection(chat_template=False))
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]
    assert tokenizer.encode_prompts([messages, "1+2="]) == [ids(*"1+2=")] * 2


def test_responses_end_with_the_end_token(tokenizer: Tokenizer):
    assert [encode_response(tokenizer, text) for text in ("46", "")] == [ids("4", "6", END), ids(END)]


def test_decoding_leaves_special_tokens_out_unless_asked(tokenizer: Tokenizer):
    tokens = ids(USER, "4", "6", END)
    assert tokenizer.decode(tokens) == "46"
    assert tokenizer.decode(tokens, special=True) == "<|user|>46<|end|>"


def test_names_of_special_tokens_in_a_text_are_broken_up(tokenizer: Tokenizer):
    assert tokenizer.template is not None
    assert tokenizer.template.defused("1<|end|>2<|user|>") == "1< |end|>2< |user|>"


def test_end_tokens_come_from_tokenizer_then_generation_config(folder: Path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3, 1]}))
    assert Tokenizer.load(folder, 16, DataSection()).end_tokens == (3, 0, 1)


def test_no_tokenizer_names_the_folder(tmp_path: Path):
    with pytest.raises(UserError, match=f"^{tmp_path}: the tokenizer cannot be loaded .*; save the tokenizer"):
        Tokenizer.load(tmp_path, 16, DataSection())


def test_no_chat_template_names_the_key(folder: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"^data.chat_template: .* has no chat template; set it to false"):
        Tokenizer.load(folder, 16, DataSection())
    assert Tokenizer.load(folder, 16, DataSection(chat_template=False)).encode_prompts(["1"]) == [ids("1")]


def test_ids_beyond_the_model_name_both_numbers(folder: Path):
    with pytest.raises(UserError, match=r"token ids go up to 15, but config.json has vocab_size 15"):
        Tokenizer.load(folder, 15, DataSection())


def test_no_end_token_is_refused(folder: Path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="names an end token; set eos_token"):
        Tokenizer.load(folder, 16, DataSection())


def test_messages_that_the_template_refuses_are_shown(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"data.chat_template: .*'1\+1='.*\(roles must alternate\)"):
        Tokenizer.load(folder, 16, DataSection()).encode_prompts(["1+1="])


ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rlhpc.data.chat_template, "RENDER_SECONDS", 0.2)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    with pytest.raises(UserError, match=r"data.chat_template: the chat template takes more than 0\.2 s for "):
        Tokenizer.load(folder, 16, DataSection()).encode_prompts(["1+1="])


SHOWING = "{{ mood }}{% for t in tools or [] %}{{ t.name }}{% endfor %}" + (
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'system' else m.role) + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load(folder: Path, **section: object) -> Tokenizer:
    return Tokenizer.load(folder, 16, DataSection.model_validate(section))


def test_a_template_of_ones_own_with_its_variables(folder: Path, tmp_path: Path):
    file = tmp_path / "mine.jinja"
    file.write_text(SHOWING)
    tokenizer = load(folder, chat_template=str(file), template_arguments={"mood": "7"})
    assert tokenizer.encode_prompts(["1"]) == [ids("7", USER, "1", ASSISTANT)]


def test_a_template_that_is_not_there_names_key_and_file(folder: Path):
    with pytest.raises(UserError, match=r"^data.chat_template: 'nowhere.jinja' cannot be read"):
        load(folder, chat_template="nowhere.jinja")


def test_a_system_prompt_is_put_before_conversations_without_one(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text(SHOWING)
    tokenizer = load(folder, system_prompt="9")
    own = [{"role": "system", "content": "8"}, {"role": "user", "content": "1"}]
    assert tokenizer.encode_prompts(["1", own]) == [
        ids(USER, "9", USER, "1", ASSISTANT),
        ids(USER, "8", USER, "1", ASSISTANT),
    ]
    joined = load(folder, system_prompt="9", chat_template=False)
    assert joined.encode_prompts(["1", own]) == [ids("9", "1"), ids("8", "1")]


def test_tools_of_all_or_of_a_conversation_are_shown(folder: Path):
    (folder / "chat_template.jinja").write_text(SHOWING)
    own = Chat([{"role": "user", "content": "1"}], [{"name": "4"}])
    assert load(folder).encode_prompts(["1", own], tools=[{"name": "3"}]) == [
        ids("3", USER, "1", ASSISTANT),
        ids("4", USER, "1", ASSISTANT),
    ]


def test_tools_that_nothing_would_show_are_refused(tokenizer: Tokenizer, folder: Path):
    with pytest.raises(UserError, match="the chat template does not render tools"):
        tokenizer.encode_prompts(["1"], tools=[{"name": "3"}])
    with pytest.raises(UserError, match="tools need a chat template"):
        load(folder, chat_template=False).encode_prompts(["1"], tools=[{"name": "3"}])


def test_a_final_message_of_the_assistant_is_continued_if_asked(folder: Path):
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "+3"}]
    tokenizer = load(folder, continue_final_message=True)
    assert tokenizer.encode_prompts([messages, "1"]) == [
        ids(USER, *"1+2=", ASSISTANT, *"+3"),
        ids(USER, "1", ASSISTANT),
    ]


def test_messages_with_calls_and_answers_of_tools_are_rendered(folder: Path):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}{% endfor %}"
    )
    messages = check_messages(
        [
            {"role": "user", "content": "1", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "2"}]},
            {"role": "tool", "content": "3"},
        ],
        "prompt",
        "a.jsonl:1",
    )
    assert load(folder).encode_prompts([messages]) == [ids(*"123")]


def test_only_texts_without_a_template_are_begun_by_the_tokenizer():
    """Whose template writes what begins a text itself; twice it would be in places that no training has seen."""
    inner = make_tokenizer()
    (first,) = inner.convert_tokens_to_ids([NONE])
    inner.backend_tokenizer.post_processor = TemplateProcessing(single=f"{NONE} $A", special_tokens=[(NONE, first)])
    plain, templated = (Tokenizer(inner, (1,), DataSection(chat_template=flag)) for flag in (False, True))
    conversation = [{"role": "user", "content": "1"}]
    for begun in (plain.encode_prompts(["1"]), plain.encode_conversations([conversation])):
        assert plain.decode(begun[0], special=True) == f"{NONE}1"
    parts = (
        *templated.encode_prompts(["1"]),
        *templated.encode_conversations([conversation]),
        encode_response(templated, "1"),
        templated.tool_turn(["1"]),
    )
    assert not any(first in tokens for tokens in parts)
    assert templated.count("12") == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "tools need a chat template"),
        ("{{ m.content if m.role != 'tool' }}", "the chat template does not render tools' answers"),
        ("{{ m.content if loop.last or m.role == 'tool' else '+' }}", "renders a turn differently once tools"),
    ],
)
def test_templates_that_cannot_tell_what_tools_answer_are_refused(template: str | None, message: str):
    inner = make_tokenizer()
    Tokenizer(inner, (1,), DataSection()).check_tool_turns()
    inner.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    with pytest.raises(UserError, match=f"^data.chat_template: .*{message}"):
        Tokenizer(inner, (1,), DataSection(chat_template=template is not None)).check_tool_turns()
