"""The page on the architecture: its picture is of today's sources."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_layers import LAYER_OF

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_has_every_room_below_those_that_import_it() -> None:
    picture = PAGE[PAGE.index("```text") : PAGE.index("```\n\n`launch`")]
    rows = [re.findall(r"[a-z_.0-9]+", line[:46]) for line in picture.splitlines()[1:]]
    drawn = [(number, room) for number, names in enumerate(rows) for room in names if room in LAYER_OF]
    assert sorted(room for _, room in drawn) == sorted(LAYER_OF)
    layers = [LAYER_OF[room] for _, room in drawn]
    assert layers == sorted(layers, reverse=True)
