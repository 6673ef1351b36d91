"""``rlhpc replay``: which update and weights are meant, and what is refused before ranks start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlhpc.config.load import dump_config, load_config
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder, SkippedUpdate
from rlhpc.launch.runs.derived_runs import replay_of
from tests.cli.test_main import error_line
from tests.helpers.plain_model import write_inputs


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """With two skipped updates of four ranks on two nodes, the second of them the newer one."""
    config = load_config(write_inputs(tmp_path), ["slurm.nodes=2", "resources.ranks_per_node=2", "seed=5"])
    folder = RunFolder(config.folder)
    folder.create()
    folder.attempt(3).path.mkdir()
    for file in (folder.config, folder.attempt(3).config):
        file.write_text(dump_config(config))
    for time, name in enumerate(("rl-00000009-actor-001", "rl-00000002-actor-001")):
        update = SkippedUpdate(folder.skipped_updates / name)
        update.path.mkdir(parents=True)
        update.record.write_text(json.dumps({"attempt": 3, "world_size": 4}))
        os.utime(update.record, (time, time))
    (folder.skipped_updates / ".writing-0003").mkdir()
    return folder


def test_a_replay_has_the_ranks_of_its_update_on_one_machine(run: RunFolder) -> None:
    config = replay_of(str(run.path))
    assert config.folder == run.skipped_updates / "rl-00000002-actor-001" / "replay"
    assert (config.slurm.nodes, config.resources.ranks_per_node, config.seed) == (1, 4, 5)
    assert replay_of(str(run.path), "rl-00000009-actor-001").folder.parent.name == "rl-00000009-actor-001"


def test_weights_are_of_the_newest_checkpoint_by_default(run: RunFolder) -> None:
    assert replay_of(str(run.path)).model.weights is None
    for step in (90, 100):
        (run.checkpoints / f"step-{step:08d}" / "actor").mkdir(parents=True)
    assert replay_of(str(run.path)).model.weights == run.checkpoints / "step-00000100" / "actor"
    assert replay_of(str(run.path), step=90).model.weights == run.checkpoints / "step-00000090" / "actor"


@pytest.mark.heavy
def test_what_is_not_there_is_one_line(run: RunFolder) -> None:
    with pytest.raises(UserError, match="no skipped update 'rl-2'; valid: rl-00000002-actor-001, rl-0"):
        replay_of(str(run.path), "rl-2")
    with pytest.raises(UserError, match="--step: no checkpoint of step 3; choose one of: none"):
        replay_of(str(run.path), step=3)
    run.skipped_updates.rename(run.path / "elsewhere")
    line = f"rlhpc: {run.path}: no skipped updates; replay a run whose log reports one"
    assert error_line("replay", str(run.path)) == line
