"""Console that shows text of others as it is: messages of libraries, logs, responses, names.

It is the only one that rlhpc makes. Text that is not printed through it goes through `rlhpc.core.shown.show` or
`rlhpc.cli.output.echo`, which replace control characters too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rlhpc.core.text import printable


class Terminal(Console):
    """Console without markup, emoji codes and highlighting: ``[rank3]`` and ``:x:`` in a text are only text. Control
    characters are replaced, except for those of the console's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
