"""The table of parts: names, functions and times."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.acceptance.driver import PARTS
from bench.acceptance.results import Part

ROOT = Path(__file__).parents[3]
# Half an hour on a bare machine: pieces are brought there first (tools/pieces/README.md), then a tier runs.
PIECES_MINUTES = 1.5  # 0.6 on an H100: docs/measurements/2026-11-h100.md
TIER_MINUTES = {"first": 27.0, "rest": 26.0}
LONGEST_MINUTES = 8.0  # per part


def function_arguments(part: Part) -> list[str]:
    """Arguments of a part's function, read from its file because an import would load torch."""
    module, _, name = part.function.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [argument.arg for node in functions if node.name == name for argument in node.args.args]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_s_function_takes_a_context(part: Part) -> None:
    assert function_arguments(part) == ["context"]


@pytest.mark.parametrize("tier", TIER_MINUTES)
def test_a_tier_fits_into_half_an_hour_on_a_bare_machine(tier: str) -> None:
    minutes = [part.minutes for part in PARTS if part.tier == tier]
    assert sum(minutes) + PIECES_MINUTES <= TIER_MINUTES[tier]
    assert max(minutes) <= LONGEST_MINUTES


def test_the_first_tier_comes_first_and_names_are_unique() -> None:
    tiers = [part.tier for part in PARTS]
    assert tiers == sorted(tiers, key=list(TIER_MINUTES).index)
    assert len({part.name for part in PARTS}) == len(PARTS)
