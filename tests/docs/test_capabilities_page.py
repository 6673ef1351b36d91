"""Each capability on the page has a command, a page and a test that are there, and the test runs in `make test`."""

from __future__ import annotations

import ast
import importlib.util
import re

import pytest

from rlhpc.cli.main import cli
from tests.docs.pages import DOCS, ROOT
from tests.tiers.durations import read_table

PAGE = DOCS / "capabilities.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| .*`tests/", line)
]


def test_the_page_has_rows_for_every_command() -> None:
    used = {words[0] for _, command, _, _ in ROWS if (words := command.strip("`").split())[0] != "python"}
    assert used == cli.commands.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_command_page_and_test_are_there(row: list[str]) -> None:
    _, command, page, test = row
    words = command.strip("`").split()
    if words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[0] in cli.commands
    assert (DOCS / re.fullmatch(r"\[.*\]\((.*)\)", page)[1]).is_file()
    file, _, name = test.strip("`").partition("::")
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in {function.name for function in functions}


def test_the_tests_run_in_make_test() -> None:
    functions = {row.function for row in read_table() if row.tier in ("check", "test")}
    assert {test.strip("`") for _, _, _, test in ROWS} <= functions
