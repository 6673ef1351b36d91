"""The pages that users read, and their contents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("bench/*/README.md"), *ROOT.glob("tools/*/README.md")]
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page that are marked as ``language``."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for marked, text in found if marked == language]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_names(page: Path) -> list[list[str]]:
    """For each table of the page, the code words that begin its rows."""
    tables: list[list[str]] = []
    inside = False
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            tables.append([])
        inside = True
        row = re.match(r"\| `([^`]+)` \|", line)
        if row:
            tables[-1].append(row[1])
    return tables
