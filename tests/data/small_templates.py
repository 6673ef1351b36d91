"""Chat templates in the structure of each family's, and a tokenizer of bytes for any template."""

from __future__ import annotations

import re
from typing import Any

from rlhpc.config.data import DataSection
from rlhpc.data.tokenizer import Tokenizer

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_IM_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

SMALL = {
    # Drops roles that it does not know; answers of tools are in users' turns.
    "qwen2.5": _TOOLS + "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}" + _IM_OPEN,
    # A last answer has an empty block of reasoning; earlier ones lose theirs.
    "qwen3": _TOOLS + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role in ['system', 'user'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if m.reasoning_content or '</think>' in m.content else '' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}" + _CALLS + "<|im_end|>\n{% elif m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% endif %}{% endfor %}"
    + _IM_OPEN,
    # The generation prompt opens a block of reasoning that answers do not have; calls only with null content.
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}<|Assistant|>"
    "{% for c in m.tool_calls %}<|call|>{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<|output|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    # Trims, and writes answers of tools as JSON.
    "llama": "{{ bos_token }}{% if tools %}<|header|>system<|header_end|>{{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|header|>{{ m.role }}<|header_end|>\n\n{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function | tojson }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header_end|>\n\n{% endif %}",
    # Turns alternate; the end of a turn is not the tokenizer's.
    "gemma": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    # The system message moves into the last user's; no generation prompt.
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls | tojson }}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% endif %}{% endfor %}",
    # A channel; a last answer ends otherwise than earlier ones; reasoning of earlier turns is left out.
    "harmony": "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # The next turn's first token ends a turn.
    "glm": "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    + _CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|user|><|system|><|observation|> #}",
    # Nothing but texts ends a turn.
    "text": "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}",
}


def byte_tokenizer(template: str) -> Tokenizer:
    """A tokenizer of bytes and of the names of tokens that a template writes; those of markup are not special."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Tokens
    from transformers import PreTrainedTokenizerFast

    found = dict.fromkeys(re.findall(r"<[|\uff5c]?[\w▁/]+[|\uff5c]?>|\[/?[A-Z_]+\]", template))
    special = [name for name in found if not re.match(r"</?(tool|arg|think|tools|function|parameter)", name)]
    inner = Tokens(models.BPE(vocab={name: i for i, name in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|bos|>", "<|eos|>", *special)])
    inner.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_response>")])
    tokens: Any = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|eos|>")
    tokens.chat_template = template
    return Tokenizer(tokens, (tokens.eos_token_id,), DataSection())
