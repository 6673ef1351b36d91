"""Generated text between a pair of ``<!-- name -->`` lines in a Markdown file."""

from __future__ import annotations

from pathlib import Path


def between(path: Path, name: str) -> str:
    """Text between the two markers."""
    return _parts(path, name)[1]


def rewrite(path: Path, name: str, text: str) -> None:
    """Replace the text between the two markers."""
    before, _, after = _parts(path, name)
    marker = f"<!-- {name} -->\n"
    path.write_text(f"{before}{marker}{text}{marker}{after}", encoding="utf-8")


def _parts(path: Path, name: str) -> tuple[str, str, str]:
    parts = path.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    if len(parts) != 3:
        raise ValueError(f"{path} has {len(parts) - 1} lines <!-- {name} -->, not 2")
    return parts[0], parts[1], parts[2]
