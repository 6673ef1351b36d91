"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlhpc.api import RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder, Superseded
from tests.helpers.checkpoints import begin_attempt, checkpoint_names, writes

pytestmark = pytest.mark.usefixtures("alone")


def test_the_newest_comes_back_with_its_state_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=2)
    for step in (1, 2, 3):
        store.save(RunState(sft_step=10, step=step, prompt_cursor=step * 8, policy_version=step), writes(f"at {step}"))
    saved = store.latest()
    assert saved.state == RunState(sft_step=10, step=3, prompt_cursor=24, policy_version=3)
    assert (saved.folder / "weights").read_text() == "at 3"
    assert checkpoint_names(tmp_path) == ["step-00000012", "step-00000013"]


def test_the_best_one_stays_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=2)
    names = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, 5)):
        store.save(RunState(step=step, best_step=best), writes(f"at {step}"))
        names.append([int(name.removeprefix("step-")) for name in checkpoint_names(tmp_path)])
    assert names == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    (tmp_path / "checkpoints" / "step-00000007" / "weights").unlink()
    assert store.latest().state.step == 6


def test_policy_versions_of_a_checkpoint_that_counted_weight_syncs_are_older_than_its_weights(tmp_path: Path) -> None:
    """Tokens of carried groups would else count as those of the weights that the run resumes with."""
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    folder = store.save(RunState(step=3, policy_version=7), writes("new"))
    assert store.latest().state.policy_version == 7
    document = json.loads((folder / "state.json").read_text())
    for name in ("trained_responses", "trained_tokens", "dropped_responses", "dropped_tokens"):
        del document["state"][name]
    (folder / "state.json").write_text(json.dumps(document))
    assert store.latest().state == RunState(step=3, policy_version=8)


def test_only_the_newest_attempt_is_current(tmp_path: Path) -> None:
    first = begin_attempt(tmp_path)
    first.check_current()
    second = begin_attempt(tmp_path)
    assert (first.is_current(), second.is_current()) == (False, True)
    with pytest.raises(Superseded, match="0001"):
        first.check_current()


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(RunFolder(tmp_path / "absent").attempt(1), keep=1).latest() is None


@pytest.mark.parametrize("damage", ["cut", "remove", "state"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=5)
    store.save(RunState(step=1), writes("first"))
    newest = store.save(RunState(step=2), writes("second"))
    {
        "cut": lambda: (newest / "weights").write_text("sec"),
        "remove": lambda: (newest / "weights").unlink(),
        "state": lambda: (newest / "state.json").write_text("{"),
    }[damage]()
    assert store.latest().state.step == 1
    assert "skipping checkpoint" in caplog.text


@pytest.mark.heavy
def test_a_kill_in_the_middle_of_a_save_leaves_the_former_one(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    store.save(RunState(step=1), writes("first"))
    program = f"""
        import os, signal, torch.distributed as dist
        from pathlib import Path
        from rlhpc.api import RunState
        from rlhpc.checkpoint.store import CheckpointStore
        from rlhpc.core.folder import RunFolder
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        def write(folder):
            (folder / "weights").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        CheckpointStore(RunFolder({str(tmp_path)!r}).attempt(1), keep=1).save(RunState(step=2), write)
    """
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == -signal.SIGKILL
    assert store.latest().state.step == 1
    store.save(RunState(step=2), writes("again"))  # what the dead left behind is cleared away
    assert checkpoint_names(tmp_path) == ["step-00000002"]


def test_a_full_disk_is_one_clear_line_and_costs_nothing_saved(tmp_path: Path) -> None:
    store = CheckpointStore(begin_attempt(tmp_path), keep=1)
    store.save(RunState(step=1), writes("first"))

    def full(folder: Path) -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(UserError, match=r"cannot save a checkpoint \(No space left on device\); free disk space"):
        store.save(RunState(step=2), full)
    assert store.latest().state.step == 1


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_orphan_of_an_earlier_start_saves_nothing_more(tmp_path: Path, moment: str) -> None:
    """The orphan's ranks may still run when a later start begins: before, while and after they write."""
    orphan = CheckpointStore(begin_attempt(tmp_path), keep=1)
    orphan.save(RunState(step=1), writes("at 1"))

    def write(folder: Path) -> None:
        if moment == "during":
            begin_attempt(tmp_path)
        (folder / "weights").write_text("the orphan's")
        if moment == "after":
            begin_attempt(tmp_path)

    if moment == "before":
        begin_attempt(tmp_path)
    with pytest.raises(Superseded):
        orphan.save(RunState(step=1), write)  # the same step: what is saved under it must stay
    assert checkpoint_names(tmp_path) == ["step-00000001"]
    assert (orphan.latest().folder / "weights").read_text() == "at 1"
