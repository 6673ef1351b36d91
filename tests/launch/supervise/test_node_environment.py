"""Where the ranks' environment goes on each node, and what a node without it means for an attempt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.launch.supervise.diagnosis import diagnose
from rlhpc.launch.supervise.node_environment import NotPlaced, environment_place
from rlhpc.plan.checks.slurm import archive_kind, check_archive_file, check_environment_archive
from tests.helpers.plain_model import write_inputs

# Four of its twelve ranks are in a rollout job.
ATTEMPT, PER_NODE = Attempt(1, "7", 0, ("node1", "node2"), 12, 0.0, -1), 4


def test_the_folder_is_the_jobs_own_and_another_for_a_changed_archive(tmp_path: Path) -> None:
    archive = tmp_path / "env.tar.zst"
    archive.write_bytes(b"one")
    first = environment_place(archive, "4711", "/local")
    assert first.folder.startswith(f"/local/rlhpc-{os.getuid()}-4711/env-")
    assert first.python == f"{first.folder}/bin/python"
    assert environment_place(archive, "4711", "/local") == first, "a later attempt finds it again"
    archive.write_bytes(b"another")
    assert environment_place(archive, "4711", "/local").folder != first.folder
    assert environment_place(archive, "4711", "").folder.startswith("/tmp/rlhpc-")
    assert environment_place(archive, "4711", "/local/" + 60 * "x").folder.startswith("/tmp/rlhpc-"), (
        "no room for sockets"
    )


def test_an_archive_is_unpacked_by_its_name() -> None:
    kinds = {name: archive_kind(Path(name)) for name in ("a.tar.zst", "a.sqsh", "a.squashfs", "a.b.tgz", "a.tar")}
    assert list(kinds.values()) == ["tar.zst", "squashfs", "squashfs", "tar", "tar"]
    with pytest.raises(UserError, match=r"slurm.environment_archive: 'a.zip' is no archive by its name; use one of "):
        archive_kind(Path("a.zip"))


def test_one_node_without_it_is_at_fault_and_all_nodes_are_not() -> None:
    one = diagnose(NotPlaced({"node2": "cannot be made"}).evidence(ATTEMPT, PER_NODE))
    assert (one.cause, one.node, one.rank) == ("bad_node", "node2", 4)
    assert "slurm.environment_archive: node node2: cannot be made" in one.message
    every = diagnose(
        NotPlaced(dict.fromkeys(ATTEMPT.nodes, "the archive has no bin/python")).evidence(ATTEMPT, PER_NODE)
    )
    assert every.cause == "user"
    full = diagnose(NotPlaced({"node1": "tar: x: Cannot write: No space left on device"}).evidence(ATTEMPT, PER_NODE))
    assert (full.cause, full.node) == ("bad_node", "node1"), "its own disk, not that of the run folder"
    assert diagnose(NotPlaced({}, "sbcast: error: no such job").evidence(ATTEMPT, PER_NODE)).cause == "launch"


def test_a_container_or_a_missing_file_is_refused_at_submission(tmp_path: Path) -> None:
    archive = tmp_path / "env.sqsh"
    config = load_config(write_inputs(tmp_path), [f"slurm.environment_archive={archive}"])
    check_environment_archive(config)
    with pytest.raises(UserError, match=r"slurm.environment_archive: no such file"):
        check_archive_file(config)
    archive.touch()
    check_archive_file(config)
    keys = (f"slurm.environment_archive={archive}", "slurm.container={runtime: apptainer, image: /i.sif}")
    with pytest.raises(UserError, match=r"slurm.environment_archive: is not used with slurm.container"):
        check_environment_archive(load_config(write_inputs(tmp_path), keys))
