"""The table of parts: its names, its functions, its time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlhpc.site.acceptance.part import Part
from rlhpc.site.acceptance.table import PARTS

ROOT = Path(__file__).parents[3]
# A start on a bare machine of half an hour: pieces are brought there first (docs/offline_gpu.md), then a tier runs.
PIECES_MINUTES = 4.0
TIER_MINUTES = {"first": 24.0, "rest": 26.0}
LONGEST_MINUTES = 8.0  # of a part


def function_arguments(part: Part) -> list[str]:
    """Of the function that the part names, read from its file: imports would bring torch."""
    module, _, name = part.function.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [argument.arg for node in functions if node.name == name for argument in node.args.args]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_s_function_takes_a_context(part: Part) -> None:
    assert function_arguments(part) == ["context"]


@pytest.mark.parametrize("tier", TIER_MINUTES)
def test_a_tier_fits_into_one_start_on_a_bare_machine(tier: str) -> None:
    minutes = [part.minutes for part in PARTS if part.tier == tier]
    assert sum(minutes) + PIECES_MINUTES <= TIER_MINUTES[tier]
    assert max(minutes) <= LONGEST_MINUTES


def test_the_first_tier_comes_first_and_names_are_unique() -> None:
    tiers = [part.tier for part in PARTS]
    assert tiers == sorted(tiers, key=list(TIER_MINUTES).index)
    assert len({part.name for part in PARTS}) == len(PARTS)
