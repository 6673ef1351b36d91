"""Finds the words of words.txt in the project's text files.

python -m tools.words [PATH ...]
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LIST = Path(__file__).with_name("words.txt")
# Between two words of a phrase: blanks, or a line break with the comment sign of the next line.
_GAP = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:#+[ \t]*)?)"


@dataclass(frozen=True)
class Words:
    """The sections of words.txt."""

    phrases: dict[str, str]  # to its replacement
    openings: dict[str, str]  # first word of a docstring, to its replacement
    names: dict[str, str]  # to its replacement
    fine: dict[str, str]  # to its reason
    allowed: dict[str, str]  # path from the project's root, to its reason


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: "{self.word}" -> {self.replacement}'


def read(path: Path = _LIST) -> Words:
    sections: dict[str, dict[str, str]] = {"phrases": {}, "openings": {}, "names": {}, "fine": {}, "allowed": {}}
    current: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            current = sections[line.strip("[]")]
            continue
        entry, _, remark = line.partition(" -> ") if " -> " in line else line.partition(": ")
        assert remark, f"{path.name}: {line!r} has neither a replacement nor a reason"
        current[entry] = remark
    return Words(**sections)


class Checker:
    """The list, compiled."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._fine = [re.compile(_phrase(entry), re.IGNORECASE) for entry in words.fine]
        plain = [entry for entry in words.names if entry.isalpha()]
        self._phrases = _Patterns(words.phrases, [*words.phrases], _phrase, re.IGNORECASE)
        self._openings = _Patterns(words.openings, [*words.openings], _opening, re.MULTILINE)
        self._names = _Patterns(words.names, [entry for entry in words.names if entry not in plain], _name)
        self._plain = _Patterns(words.names, plain, _name)

    def is_allowed(self, file: str) -> bool:
        return any(file == path or file.startswith(f"{path}/") for path in self._words.allowed)

    def findings(self, file: str, text: str) -> list[Finding]:
        """Words of one file and of its name, by line."""
        base = Path(file).name
        found = [(1, base, self._words.names[base])] if base in self._words.names else []
        checked = text
        for pattern in self._fine:
            checked = pattern.sub(lambda match: re.sub(r"\S", "·", match[0]), checked)
        found += self._phrases.matches(checked)
        if file.endswith(".py") and not file.startswith("tests/"):
            found += self._openings.matches(checked)
        found += self._names.matches(text)
        found += self._plain.matches(_code(file, text))
        return [Finding(file, *each) for each in sorted(found)]


class _Patterns:
    """Entries as regular expressions, tried only in a text that contains an entry's longest word."""

    def __init__(
        self, replacements: dict[str, str], entries: list[str], pattern: Callable[[str], str], flags: int = 0
    ) -> None:
        self._entries = [
            (max(re.findall(r"\w+", entry), key=len).lower(), re.compile(pattern(entry), flags), replacements[entry])
            for entry in entries
        ]

    def matches(self, text: str) -> Iterator[tuple[int, str, str]]:
        """(line, what was found, replacement) of each."""
        lower = text.lower()
        for word, pattern, replacement in self._entries:
            for match in pattern.finditer(text) if word in lower else ():
                words = match[0].replace("#", " ").split()
                yield text.count("\n", 0, match.start()) + 1, " ".join(words), replacement


def _phrase(entry: str) -> str:
    return r"\b" + _GAP.join(_wild(word) for word in entry.split()) + r"\b"


def _opening(entry: str) -> str:
    return rf'^[ \t]*r?"""{_wild(entry)}(?!\w)'


def _name(entry: str) -> str:
    return rf"(?<![\w/]){_wild(entry)}(?!\w)"


def _wild(word: str) -> str:
    return re.escape(word).replace(r"\*", r"\w*")


def _code(file: str, text: str) -> str:
    """Names of things: names and whole strings of Python, code words of a page, keys of YAML; line by line."""
    lines: list[list[str]] = [[] for _ in text.splitlines()]
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                lines[token.start[0] - 1].append(token.string)
            elif token.type == tokenize.STRING and re.fullmatch(r"([\"'])\w+\1", token.string):
                lines[token.start[0] - 1].append(token.string[1:-1])
    fenced = file.endswith((".yaml", ".yml"))
    for words, line in zip(lines, text.splitlines(), strict=True):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        words += re.findall(r"`([\w./:\[\]-]+)`", line)
        if fenced:
            words += re.findall(r"(?:^|[\s{,-])(\w+):(?:\s|$)", line)
    return "\n".join(" ".join(words) for words in lines)


def tracked(root: Path, paths: list[str]) -> list[str]:
    """Files that git knows under ``paths``, or all, from the project's root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--full-name", "--", *paths], cwd=root, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name]


def check(root: Path, files: list[str], words: Words) -> list[Finding]:
    checker = Checker(words)
    found = []
    for file in files:
        path = root / file
        if checker.is_allowed(file) or not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            found += checker.findings(file, content.decode("utf-8"))
    return found


def main() -> None:
    root = Path(
        subprocess.run(
            ["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    paths = [str(Path(path).resolve()) for path in sys.argv[1:]]
    found = check(root, tracked(root, paths), read())
    if found:
        print(*found, sep="\n")
        sys.exit(f"{len(found)} words that tools/words.txt replaces")


if __name__ == "__main__":
    main()
