"""A tool with state: each conversation has a notebook of its own."""

from __future__ import annotations


class Notebook:
    def __init__(self, most_lines: int = 100) -> None:
        """``most_lines`` comes from ``arguments`` of the config."""
        self.lines: list[str] = []
        self.most_lines = most_lines

    def write(self, line: str) -> str:
        """
        Write a line into the notebook.

        Args:
            line: What to write.
        """
        if len(self.lines) == self.most_lines:
            raise ValueError("the notebook is full")
        self.lines.append(line)
        return f"line {len(self.lines)}"

    def read(self) -> str:
        """Read the whole notebook."""
        return "\n".join(self.lines)

    def close(self) -> None:
        """The conversation has ended."""
