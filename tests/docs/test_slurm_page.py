"""The pages about Slurm and shared clusters: commands, options, states and templates are those of the code."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from rlhpc.cli.main import cli
from rlhpc.launch.runs import direct
from rlhpc.launch.runs.logs import RANK_LOG
from rlhpc.launch.slurm.queue import STATE_WORDS
from tests.docs.pages import DOCS, ROOT, blocks, table_names
from tests.slurm.test_shared import KNOWN

PAGE = DOCS / "slurm.md"
COMMANDS = [line for text in blocks(PAGE, "sh") for line in text.splitlines() if line.startswith("rlhpc ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    command = cli.commands[name]
    command.make_context(name, words)


@pytest.mark.parametrize("page", ["slurm.md", "recovery.md"])
def test_logs_of_ranks_are_named_as_runs_name_them(page: str) -> None:
    (name,) = set(re.findall(r"[\w-]+\.log", (DOCS / page).read_text()))
    assert name == "rank-00000.log"
    assert RANK_LOG.fullmatch(name)


def test_an_option_that_is_not_there_is_seen() -> None:
    with pytest.raises(click.NoSuchOption):
        cli.commands["submit"].make_context("submit", ["my.yaml", "--arrray"])


def test_every_option_of_the_new_commands_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name in ("submit", "status", "logs", "cancel", "resume"):
        shown = [
            option for option in cli.commands[name].params if isinstance(option, click.Option) and not option.hidden
        ]
        absent = {option.opts[-1] for option in shown} - {"--lines", "--run-dir", "--help"}
        assert not {option for option in absent if option not in text}


def test_states_are_those_that_status_shows() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE)
    states = {word for row in rows for word in re.findall(r"`([\w ]+)`", row)}
    assert {"finished", "failed", "stopped", "retrying", "gone", "unknown"} <= states
    assert {"queued", "running", "ending", "cancelled", "out of time", "node failed"} <= states & set(
        STATE_WORDS.values()
    )


def test_every_template_is_on_the_page() -> None:
    tables = table_names(DOCS / "slurm.md")
    assert {file.name for file in (ROOT / "rlhpc" / "sbatch").iterdir()} in map(set, tables)
    assert [names[0] for names in (direct.NODES, direct.RANKS, direct.CPUS, direct.GPUS)] in tables


def test_everything_that_listens_is_on_the_page() -> None:
    """A program on a node beyond these fails the test."""
    text = (DOCS / "shared_clusters.md").read_text()
    rows = re.findall(r"^\| ([^|`]+?) \| .* \|$", text, re.MULTILINE)
    assert set(rows) - {"what", "---"} == set(KNOWN)
