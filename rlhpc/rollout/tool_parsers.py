"""Parsers of the policy's tool calls: Hermes' and harmony's forms, and vLLM's parsers without its server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhpc.core.errors import UserError, one_line
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.rewards.calls import Failure
from rlhpc.rollout.tool_calls import ToolCall, parse_calls

Calls = list[ToolCall | Failure]
Parser = Callable[[str], Calls]
_KEY = "rollout.tool_parser"
_PROBE = ToolCall("look_up", {"word": "cat", "count": 2})
_SCHEMA = {
    "name": _PROBE.name,
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}}},
}
# vLLM's parsers of a form that others of its parsers take as well.
_PREFERRED = ("llama3_json", "deepseek_v3", "deepseek_v31", "glm45", "mistral", "qwen3_xml", "kimi_k2", "minimax_m2")
_HARMONY = re.compile(r"to=functions\.([\w.-]+)(?:(?!<\|message\|>).)*<\|message\|>(.*?)(?:<\|call\|>|$)", re.DOTALL)


def find_parser(name: str, tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]]) -> Parser:
    """The parser ``name``; for ``auto`` the one that reads the calls which the chat template writes.

    ``schemas``: of the tools. Raises a UserError for one that is missing, cannot be used, or is in doubt.
    """
    own: dict[str, Parser] = {"hermes": parse_calls, "harmony": _harmony}
    if name in own:
        return _after_reasoning(own[name])
    if name != "auto":
        return _after_reasoning(_vllm_parser(name, tokenizer, schemas))
    template = tokenizer.template
    written = template.written_call(_PROBE.name, _PROBE.arguments) if template else None
    if written is None:  # the template shows no form of calls
        return _after_reasoning(parse_calls)
    for parse in own.values():
        if _reads(parse, written):
            return _after_reasoning(parse)
    found, lacking = _vllm_readers(tokenizer, written, _PREFERRED)
    if not found:
        found, lacking = _vllm_readers(tokenizer, written, _others())
        if len(found) > 1:
            wrong = f"{', '.join(found)} read the chat template's calls{lacking}"
            raise UserError(wrong, where=_KEY, remedy="choose one")
    if not found:
        wrong = f"no parser reads the chat template's call {written[:80]!r}{lacking}"
        raise UserError(wrong, where=_KEY, remedy="install what is lacking, or use another data.chat_template")
    return _after_reasoning(_vllm_parser(found[0], tokenizer, schemas))


def _others() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return sorted({*ToolParserManager.list_registered()} - {*_PREFERRED})


def _after_reasoning(parse: Parser) -> Parser:
    """Calls within a block of reasoning are thoughts."""
    return lambda text: parse(text.rpartition("</think>")[2])


def _reads(parse: Parser, written: str) -> bool:
    try:
        return parse(written.rpartition("</think>")[2]) == [_PROBE]
    except Exception:  # vLLM's parsers raise any
        return False


def _harmony(text: str) -> Calls:
    """Calls in the form of gpt-oss: ``to=functions.NAME … <|message|>{…}<|call|>``."""
    return [_call(name, arguments) for name, arguments in _HARMONY.findall(text)]


def _call(name: str, arguments: str) -> ToolCall | Failure:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return Failure("result", f"the call is not valid JSON ({error})")
    if not isinstance(given, dict):
        return Failure("result", "a call's arguments must be a JSON object")
    return ToolCall(name, given)


def _vllm_readers(tokenizer: Tokenizer, written: str, names: Sequence[str]) -> tuple[list[str], str]:
    """Those of vLLM's parsers that read a call; and which packages the others lack."""
    found, lacking = [], set()
    schema = {"type": "function", "function": _SCHEMA}
    for name in names:
        try:
            parse = _vllm_parser(name, tokenizer, [schema])
        except UserError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                lacking.add(str(error.__cause__.name))
            continue
        if _reads(parse, written):
            found.append(name)
    return found, f" ({', '.join(sorted(lacking))} missing, which other parsers need)" if lacking else ""


def _vllm_parser(name: str, tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]]) -> Parser:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": ""}], tools=list(schemas))
    try:
        kind = ToolParserManager.get_tool_parser(name)
        made = partial(kind, tokenizer.inner, asked.tools)
        made()
    except Exception as error:  # vLLM's parsers raise any
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__ or error
        raise UserError(
            f"vLLM's parser {name!r} cannot be used ({type(cause).__name__}: {one_line(str(cause))[:200]})",
            where=_KEY,
            remedy="install what it lacks, or name another: auto, hermes, harmony or one of vLLM's",
        ) from cause

    def parse(text: str) -> Calls:
        found = made().extract_tool_calls(text, asked)
        return [_call(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse
