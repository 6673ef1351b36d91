"""The page on the architecture: its pictures and lists are of today's sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_layers import LAYER_OF, MODULES, imports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH_OF_A_SAMPLE = re.findall(r"^\d+\. `([\w/]+)\.py`", PAGE, re.M)
BUILDERS = ("trainer/build", "trainer/models", "trainer/megatron_models", "trainer/parts")  # pass what they make


def module(path: str) -> str:
    return "rlhpc." + path.replace("/", ".")


def imported_by(path: str) -> set[str]:
    tree = ast.parse(MODULES[module(path)].read_text(encoding="utf-8"))
    return {name for _, name in imports(tree)}


def reached(path: str) -> set[str]:
    """What it imports, and through the package of an ``__init__`` that gathers its files."""
    names = imported_by(path)
    gathered = [name for name in names if name in MODULES and MODULES[name].name == "__init__.py"]
    return names.union(*(imported_by(name.removeprefix("rlhpc.").replace(".", "/")) for name in gathered))


def test_a_sample_passes_fifteen_files_at_most() -> None:
    assert 5 < len(PATH_OF_A_SAMPLE) <= 15
    assert PATH_OF_A_SAMPLE[-1] == "backends/megatron/optimizer"


@pytest.mark.parametrize("place", range(1, len(PATH_OF_A_SAMPLE)), ids=lambda place: PATH_OF_A_SAMPLE[place])
def test_a_file_on_the_way_is_imported_by_one_above_or_built_and_passed(place: int) -> None:
    above = [*PATH_OF_A_SAMPLE[:place], *BUILDERS]
    assert any(module(PATH_OF_A_SAMPLE[place]) in reached(path) for path in above)


def test_the_picture_has_every_room_below_those_that_import_it() -> None:
    picture = PAGE[PAGE.index("```text") : PAGE.index("```\n\n`launch`")]
    rows = [re.findall(r"[a-z_.0-9]+", line[:46]) for line in picture.splitlines()[1:]]
    drawn = [(number, room) for number, names in enumerate(rows) for room in names if room in LAYER_OF]
    assert sorted(room for _, room in drawn) == sorted(LAYER_OF)
    layers = [LAYER_OF[room] for _, room in drawn]
    assert layers == sorted(layers, reverse=True)
