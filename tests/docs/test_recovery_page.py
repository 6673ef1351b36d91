"""docs/recovery.md lists every cause and action there is, and says of each what the code decides."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from rlhpc.config.jobs import RecoverySection
from rlhpc.config.load import load_config
from rlhpc.core.attempts import Action, Attempt, Cause
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.status import CAUSE_WORDS
from rlhpc.launch.supervise.diagnosis import Diagnosis
from rlhpc.launch.supervise.policy import Situation, decide
from tests.docs.pages import DOCS, ROOT, blocks, prose, table_names

PAGE = DOCS / "recovery.md"
CAUSES, ACTIONS = get_args(Cause), get_args(Action)
# What the launcher makes of it when it knows who asked, or that Slurm ends the job (rlhpc.launch.supervise.supervisor).
BY_THE_LAUNCHER = {"stopped": {"requeue"}, "requeued": {"none"}}


def rows() -> dict[str, list[str]]:
    """The cells after the cause, by cause."""
    found = {}
    for line in prose(PAGE).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].strip("`") in CAUSES:
            found[cells[0].strip("`")] = cells[1:]
    return found


def decided(cause: Cause) -> set[str]:
    """The actions that the first failure of this cause can have with the default policy and time enough."""
    config = load_config(ROOT / "configs" / "demo.yaml")
    attempt = Attempt(1, "7", 0, ("node1", "node2"), 2, 0.0, saved_step=-1)
    return {
        decide(Diagnosis(cause, node=node), config, Situation(attempt, None, -1, 0.0, float("inf"), usable)).action
        for node, usable in product(("", "node1", "node2"), (0, 1))
    }


def test_the_page_lists_the_causes_in_order_and_the_actions() -> None:
    tables = table_names(PAGE)
    assert list(CAUSES) in tables
    assert list(ACTIONS) in tables


@pytest.mark.parametrize("cause", CAUSES)
def test_a_row_says_what_is_done(cause: Cause) -> None:
    _, done, key, words = rows()[cause]
    named = {word for word in re.findall(r"`(\w+)`", done) if word in ACTIONS}
    assert named == decided(cause) | BY_THE_LAUNCHER.get(cause, set())
    assert words == CAUSE_WORDS[cause]
    wanted = key.strip("`").removeprefix("recovery.")
    if wanted:  # the key's policy is the one that is asked
        config = load_config(ROOT / "configs" / "demo.yaml", [f"recovery.{wanted}=stop"])
        attempt = Attempt(1, "7", 0, ("node1", "node2"), 2, 0.0, saved_step=-1)
        situation = Situation(attempt, None, -1, 0.0, float("inf"), 1)
        assert decide(Diagnosis(cause, node="node2"), config, situation).action == "stop"


def test_every_key_of_the_section_is_on_the_page() -> None:
    text = PAGE.read_text()
    absent = [name for name in RecoverySection.model_fields if f"recovery.{name}" not in text]
    assert not absent


def test_the_files_of_an_attempt_are_named_as_they_are() -> None:
    folder = RunFolder(Path("/r")).attempt(1)
    parts = (
        folder.record,
        folder.verdict,
        folder.config,
        folder.exits,
        folder.logs,
        folder.heartbeats,
        folder.deadline,
    )
    text = PAGE.read_text()
    assert [part for part in parts if f"`{part.relative_to('/r')}" not in text] == []
    assert blocks(PAGE, "yaml"), "its configurations are tried by test_pages"
