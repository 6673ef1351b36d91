"""Parsers of tool calls, found by the calls that a chat template writes."""

from __future__ import annotations

import pytest

from rlhpc.core.errors import UserError
from rlhpc.rollout.tool_calls import ToolCall
from rlhpc.rollout.tool_parsers import find_parser
from tests.data.small_templates import SMALL, byte_tokenizer

CALL = ToolCall("add", {"a": 1, "b": "two"})
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
LLAMA = SMALL["llama"].replace("m.tool_calls[0].function | tojson", "{'name': m.tool_calls[0].function.name, "
    "'parameters': m.tool_calls[0].function.arguments} | tojson") + "{# <|python_tag|> #}"  # fmt: skip
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<|Assistant|><|tool▁calls▁begin|>"
    "{% for c in m.tool_calls %}<|tool▁call▁begin|>function<|tool▁sep|>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments }}\n```<|tool▁call▁end|>{% endfor %}<|tool▁calls▁end|>{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content }}{{ eos_token }}"
    "{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
).replace("|", "\uff5c")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "harmony"])
def test_forms_of_hermes_and_harmony_are_found_by_the_template(name: str):
    template = SMALL[name].replace("assistant to=", "assistant to=functions.")
    tokenizer = byte_tokenizer(template)
    assert tokenizer.template is not None
    written = tokenizer.template.written_call(CALL.name, CALL.arguments)
    parse = find_parser("auto", tokenizer, [SCHEMA])
    assert written is not None
    assert parse(written) == [CALL]
    assert parse(f"<think>{written}</think>3") == []


@pytest.mark.heavy
@pytest.mark.parametrize("template", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_vllms_parsers_are_found_by_the_template(template: str):
    tokenizer = byte_tokenizer(template)
    assert tokenizer.template is not None
    written = tokenizer.template.written_call(CALL.name, CALL.arguments)
    assert written is not None
    assert find_parser("auto", tokenizer, [SCHEMA])(written) == [CALL]


@pytest.mark.heavy
def test_a_form_that_no_parser_reads_is_refused_with_what_parsers_lack():
    unknown = SMALL["qwen2.5"].replace("<tool_call>", "@@").replace("</tool_call>", "@@")
    with pytest.raises(UserError, match=r"^rollout.tool_parser: no parser reads .*@@"):
        find_parser("auto", byte_tokenizer(unknown), [SCHEMA])
    with pytest.raises(UserError, match=r"^rollout.tool_parser: vLLM's parser 'nothing' cannot be used"):
        find_parser("nothing", byte_tokenizer(unknown), [SCHEMA])
