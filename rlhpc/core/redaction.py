"""Decides what is a secret of the user, and replaces it in text that is printed, logged or recorded.

A secret is known by its name (WANDB_API_KEY=…, api_key: …), its place in a URL (https://USER:PASSWORD@…) or its form
(hf_…), and then by its value: values of environment variables and of config keys are replaced wherever they appear.
Names such as max_tokens, tokenizer and eos_token are not secrets.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal
from urllib.parse import quote, unquote

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LAST = re.compile(r"(password|passphrase|secret|credential|apikey|webhook)s?$|(passwd|jwt)$")
_KEYS_OF = frozenset(
    ("api", "secret", "access", "private", "auth", "signing", "encryption", "account", "ssh", "deploy", "license")
)
# Words before _TOKEN and _KEY in names of what is public.
_TEXT_TOKENS = frozenset(
    (
        "pad", "eos", "bos", "eot", "unk", "sep", "cls", "mask", "special", "stop", "start", "end", "begin",
        "image", "audio", "video", "think", "tool", "system", "user", "assistant", "response", "prompt", "answer",
        "next", "last", "first", "new", "per", "each", "extra", "prefix", "middle", "suffix", "boundary", "max",
        "min", "public",
    )
)  # fmt: skip
_FORM = re.compile(r"(?=.*\d)[\w+/=.~:%-]{8,}|[\w+/=.~:%-]{20,}")

_URL = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]{0,20}:/(/?))([^\s/?#'\"<>`]+)@")
_TOKEN_FORMS = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]{8,}")
# Text of the form NAME=VALUE, 'NAME': 'VALUE', NAME: VALUE and --NAME VALUE, for names that may be a secret's.
_NAME = r"(?i:(?<![\w.-])(?P<name>[\w.-]*(?:password|passphrase|secret|credential|key|passwd|jwt|token|pass|pat)s?))"
_VALUE = r"(?P<value>[^\s\"'$&;,)}\]][^\s\"'&;,)}\]]{2,})"
_QUOTED = re.compile(
    rf"""{_NAME}(?P<between>["']?\s*[=:]\s*)(?P<quote>["'])(?P<value>(?:\\.|(?!(?P=quote)).)+)(?=(?P=quote))"""
)
_ASSIGNED = re.compile(rf"{_NAME}(?P<between>=){_VALUE}")
_WRITTEN = re.compile(rf"{_NAME}(?P<between>:\s*|\s+=\s+){_VALUE}")
_OPTION = re.compile(rf"(?<!\S)(?=--){_NAME}(?P<between>\s+)(?!-){_VALUE}")
_SIGNATURE = re.compile(r"([?&](?:[\w-]*-)?(?:sig|signature)=)[^\s&\"']+", re.IGNORECASE)

_SHORTEST = 6  # characters of a value that is searched for
_LOOK_SECONDS = 0.25
_learned: set[str] = set()


class _Values:
    """Values to search for, from the environment and ``learn``. The environment is read again when it may differ."""

    def __init__(self) -> None:
        self._key: tuple[int, int] = (-1, -1)
        self._looked = float("-inf")
        self._found: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None

    def pattern(self) -> re.Pattern[str] | None:
        key, now = (len(os.environ), len(_learned)), time.monotonic()
        if key != self._key or now - self._looked > _LOOK_SECONDS:
            self._key, self._looked = key, now
            found = frozenset(form for value in {*_of_environment(), *_learned} for form in _forms(value))
            if found != self._found:
                ordered = sorted(found, key=len, reverse=True)
                self._found, self._pattern = found, re.compile("|".join(map(re.escape, ordered))) if found else None
        return self._pattern


_values = _Values()


def is_secret(name: str, value: str | None = None) -> bool:
    """True if a variable, key or option of this name holds a secret. For names that can also be of something else, such
    as ``token``, the value must look like one."""
    kind = _kind(name)
    return kind == "sure" or (kind == "likely" and value is not None and _looks_secret(value))


@cache
def _kind(name: str) -> Literal["sure", "likely", "no"]:
    words = _WORD.findall(name.rpartition(".")[2])
    last = words[-1].lower() if words else ""
    before = words[-2].lower() if len(words) > 1 else ""
    shouted = name.isupper() and bool(before)
    if _LAST.search(last) or (last in ("key", "keys") and before in _KEYS_OF) or (before, last) == ("webhook", "url"):
        return "sure"
    if before in _TEXT_TOKENS or last not in ("token", "key", "pass", "pat"):
        return "no"
    if shouted:
        return "sure" if last in ("token", "pass") else "likely"
    return "likely" if last == "token" else "no"


def redact(text: str) -> str:
    """The text of a message, log or traceback with secrets replaced by ``***``."""
    if len(text) < _SHORTEST:
        return text
    text = _SIGNATURE.sub(rf"\1{HIDDEN}", _HEADER.sub(rf"\1{HIDDEN}", redact_known(text)))
    for pattern in (_QUOTED, _ASSIGNED, _WRITTEN, _OPTION):
        text = pattern.sub(_named, text)
    return text


def redact_known(text: str) -> str:
    """Redacts all but secrets that only the name before them reveals: output that may contain source code or
    prompts stays as it is."""
    if len(text) < _SHORTEST:
        return text
    pattern = _values.pattern()
    if pattern is not None:
        text = pattern.sub(HIDDEN, text)
    return _TOKEN_FORMS.sub(HIDDEN, _URL.sub(_without_user, text))


def learn(tree: Any) -> None:
    """Replaces the secrets in a tree of settings from now on, wherever they appear in this process's text."""
    shown, secrets = hide(tree)
    whole = {key for key, value in leaves(shown) if value == HIDDEN}
    for key, value in leaves(secrets) if secrets is not None else ():
        text = str(value)
        parts = (text, *text.splitlines()) if key in whole else ()  # of the others, their names tell
        _learned.update(part for part in (*parts, *_passwords(text)) if _is_distinct(part))


def hide(value: Any, name: str = "") -> tuple[Any, Any]:
    """A tree of dicts, lists and scalars without its secrets, and the secrets: the same tree with their places only,
    list items by their numbers; None without any."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else ((str(index), item) for index, item in enumerate(value))
        sure = _kind(name) == "sure"
        parts = {key: hide(item, name if sure or isinstance(value, list) else str(key)) for key, item in items}
        secrets = {key: secret for key, (_, secret) in parts.items() if secret is not None}
        left = {key: part for key, (part, _) in parts.items()}
        return (left if isinstance(value, dict) else [*left.values()]), secrets or None
    if value is None or isinstance(value, bool) or value == "":
        return value, None
    text = str(value) if isinstance(value, str | int | float | os.PathLike) else ""
    shown = HIDDEN if text and is_secret(name, text) else redact(text)
    return (shown, value) if shown != text else (value, None)


def restore(shown: Any, secrets: Any) -> Any:
    """The tree that ``hide`` was given. Values without ``***`` are new ones, and stay."""
    if isinstance(secrets, dict) and isinstance(shown, dict):
        return {key: restore(item, secrets.get(str(key))) for key, item in shown.items()}
    if isinstance(secrets, dict) and isinstance(shown, list):
        return [restore(item, secrets.get(str(index))) for index, item in enumerate(shown)]
    replaced = isinstance(shown, str) and HIDDEN in shown and secrets is not None
    return secrets if replaced and not isinstance(secrets, dict) else shown


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars of a tree by their dotted keys."""
    if isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def guard_output() -> None:
    """Redacts what this process prints from now on through Python's stdout and stderr, tracebacks and logs included.

    Children that are forked inherit it. What other programs and native code write to the descriptors is not seen.
    """
    for stream, change in ((sys.stdout, redact_known), (sys.stderr, redact)):
        write = getattr(stream, "write", None)
        if write is None or hasattr(write, "redacts"):
            continue

        def guarded(text: str, write: Any = write, change: Any = change) -> int:
            return int(write(change(text)) or 0)

        guarded.redacts = True  # type: ignore[attr-defined]
        stream.write = guarded  # type: ignore[method-assign]


def _of_environment() -> Iterator[str]:
    for name, value in list(os.environ.items()):
        found = (value, *value.splitlines()) if is_secret(name, value) else tuple(_passwords(value))
        yield from filter(_is_distinct, found)


def _is_distinct(value: str) -> bool:
    """True if a text can be searched for: not a short word or number, which logs contain by chance."""
    return len(value) >= _SHORTEST + 2 or (len(value) >= _SHORTEST and not value.isalpha() and not value.isdigit())


def _looks_secret(value: str) -> bool:
    return _FORM.fullmatch(value) is not None and not value.isdigit()


def _passwords(text: str) -> Iterator[str]:
    """Passwords in the URLs of a text."""
    if "@" in text:
        for match in _URL.finditer(text):
            if match[0] != _without_user(match):
                password = match[3].partition(":")[2] or match[3]
                yield from {password, unquote(password)}


def _forms(value: str) -> set[str]:
    """A value as it is, in a Python or JSON string, and in a URL."""
    escaped = repr(value)[1:-1]
    return {value, escaped, escaped.replace("'", "\\'"), json.dumps(value)[1:-1], quote(value, safe="")}


def _without_user(match: re.Match[str]) -> str:
    """A URL's beginning without user and password. ssh's user alone, and one slash without a password, are none."""
    start, second_slash, user = match[1], match[2], match[3]
    if ":" not in user and (not second_slash or "ssh" in start.lower()):
        return match[0]
    return f"{start}{HIDDEN}@"


def _named(match: re.Match[str]) -> str:
    """An assignment, with the value replaced if its name is a secret's."""
    groups = match.groupdict()
    name, value = groups["name"], groups["value"]
    kind = _kind(name)
    plain = match.re is _WRITTEN  # `api_key: must be given`
    if kind == "no" or HIDDEN in value or ((plain or kind == "likely") and not _looks_secret(value)):
        return match[0]
    return f"{name}{groups['between']}{groups.get('quote') or ''}{HIDDEN}"
