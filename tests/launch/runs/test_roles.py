"""Commands show the roles of ranks, and both sides of a separate placement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.jobs import RecoverySection
from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core import attempts
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.roles import attempt_roles, roles_of
from rlhpc.launch.runs.logs import log_files
from rlhpc.launch.runs.rank_phases import rank_groups
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.status import as_json, run_status
from rlhpc.launch.runs.status_view import details, show
from rlhpc.launch.supervise.diagnosis import Diagnosis
from rlhpc.launch.supervise.engine_losses import EngineLife, EnginesRecord, after_loss, may_go_on, started_again
from rlhpc.observe.engine_activity import EngineActivity
from tests.docs.fields import SECTIONS, differences
from tests.helpers.plain_model import write_inputs
from tests.launch.runs.test_follow import write_phases

SEPARATE = ["placement=separate", "resources.ranks_per_node=8", "rollout.ranks=4", "rollout.tp=2"]


@pytest.fixture
def run(tmp_path: Path) -> RunEntry:
    """A run of four trainers and two engines of two ranks."""
    folder = RunFolder(tmp_path / "run").create()
    attempt = begin(folder)
    save_config(folder, load_config(write_inputs(tmp_path), SEPARATE), attempt.config)
    return RunEntry(folder, None)


def begin(folder: RunFolder) -> AttemptFolder:
    known = {"job_id": "", "restart_count": 0, "nodes": ("here",), "saved_step": -1, "hang_timeout_seconds": 60.0}
    return attempts.begin(folder, **known, world_size=8)


def activity(count: int = 2) -> EngineActivity:
    found = EngineActivity(ranks=range(4, 4 + 2 * count, 2))
    for engine in range(count):
        found.add(engine, 10.0, {"weights": 2.5}, 1000 * (engine + 1), 6)
    found.metrics()
    return found


def test_roles_are_those_of_the_configuration(run: RunEntry, tmp_path: Path) -> None:
    roles = attempt_roles(run.folder.attempt(1), 8)
    assert roles is not None
    assert [roles.label(rank) for rank in (0, 3, 4, 5, 6)] == ["trainer", "trainer", "engine 0", "engine 0", "engine 1"]
    config = load_config(tmp_path / "config.yaml", SEPARATE)
    assert roles_of(config, 2) is None  # a replay of an update, on fewer ranks
    assert roles_of(load_config(tmp_path / "config.yaml"), 8) is None
    run.folder.attempt(1).config.write_text("name: [\n")
    assert attempt_roles(run.folder.attempt(1), 8) is None


def test_judges_are_a_role_of_their_own(run: RunEntry, tmp_path: Path) -> None:
    judges = ["judges.ranks=2", "algorithm.name=ppo", "critic.on=judges"]
    save_config(run.folder, load_config(tmp_path / "config.yaml", [*SEPARATE, *judges]), run.folder.attempt(1).config)
    roles = attempt_roles(run.folder.attempt(1), 8)
    assert roles is not None
    assert [roles.label(rank) for rank in (1, 2, 3, 4)] == ["trainer", "judge", "judge", "engine 0"]
    write_phases(run, ["update"] * 8, 3)
    assert rank_groups(run)[:2] == ["update, step 3: ranks 0-1 (trainers)", "update, step 3: ranks 2-3 (judges)"]


def test_status_shows_engines_that_were_lost(run: RunEntry, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(run_status(run, None))["engine_losses"] is None
    attempt, policy = run.folder.attempt(1), RecoverySection(retries=1, wait_seconds=60)
    diagnosis = Diagnosis("crash", "was killed", 4, "here")
    waiting = after_loss(EngineLife(since=1e9), diagnosis, policy, 1e9 + 60)
    assert waiting is not None
    assert waiting.due == 1e9 + 65
    gone = after_loss(started_again(waiting, 1e9 + 70), diagnosis, policy, 1e9 + 80)
    assert gone is not None
    EnginesRecord((gone, EngineLife(since=1e9)), losses=2).write(attempt.engine_losses)
    status = run_status(run, None)
    show(details(status))
    shown = capsys.readouterr().out
    assert "2 loss(es) of engines in this attempt" in shown
    assert "engine 0: not started again since " in shown
    assert "(was killed)" in shown
    assert "engine 1:" not in shown
    known = as_json(status)["engine_losses"]
    assert [(one["phase"], one["generation"]) for one in known["engines"]] == [("gone", 1), ("running", 0)]
    fields = {
        name: always for name, always in SECTIONS["`rlhpc status`"].items() if name.startswith("[].engine_losses")
    }
    assert not differences(fields, [{"engine_losses": known}])


def test_an_engine_with_an_error_of_the_user_is_not_started_again_and_old_losses_do_not_count() -> None:
    policy = RecoverySection(retries=1, wait_seconds=2)
    assert after_loss(EngineLife(), Diagnosis("user", "no such file"), policy, 5.0) is None
    lost = EngineLife(since=0.0, failures=1)
    late = after_loss(lost, Diagnosis("crash", "was killed"), policy, 1000.0)
    assert late is not None
    assert (late.phase, late.failures, late.due) == ("waiting", 1, 1002.0)
    assert not may_go_on([replace(lost, phase="gone")])


def test_status_shows_both_sides(run: RunEntry, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(run_status(run, None))["sides"] is None
    record = {"trainers/idle_fraction": 0.125, "rollout/queued_groups": 3.0, "sampling/staleness_max": 2.0}
    record |= {"weight_sync/sent_bytes_sum": 1.25e6, "weight_sync/weights_bytes_sum": 2e9}
    activity().write(run.folder.attempt(1), 7, record)
    status = run_status(run, None)
    show(details(status))
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert (
        "trainers   12% idle | 3 finished group(s) queued | staleness up to 2 | weight sync: 1.2 MB of 2,000.0 MB"
        in shown
    )
    assert "engines    engine 0 (rank 4): 100 tokens/s, 25% idle, weights of step 6" in shown
    assert "engine 1 (rank 6): 200 tokens/s, 25% idle, weights of step 6" in shown
    found = json.loads(json.dumps(as_json(status)))
    assert found["sides"]["engines"][1]["tokens_per_second"] == 200
    fields = {name: always for name, always in SECTIONS["`rlhpc status`"].items() if name.startswith("[].sides")}
    assert not differences(fields, [{"sides": found["sides"]}])


def test_the_slowest_of_many_engines_are_shown(run: RunEntry, capsys: pytest.CaptureFixture[str]) -> None:
    activity(20).write(run.folder.attempt(1), 7, {})
    show(details(run_status(run, None)))
    shown = capsys.readouterr().out
    assert "engine 7 (rank 18)" in shown
    assert "engine 8 " not in shown
    assert "and 12 faster ones" in shown


def test_a_new_attempt_has_no_sides_yet(run: RunEntry) -> None:
    activity().write(run.folder.attempt(1), 7, {})
    begin(run.folder)
    assert run_status(run, None).sides is None


def test_phases_group_ranks_by_role(run: RunEntry) -> None:
    phases = ["update"] * 4 + ["generate", "generate", "waiting for weights", "update"]
    write_phases(run, phases, 6)
    assert rank_groups(run) == [
        "waiting for weights, step 6: rank 6 (engine 1)",
        "update, step 6: rank 7 (engine 1)",
        "generate, step 6: ranks 4-5 (engine 0)",
        "update, step 6: ranks 0-3 (trainers)",
    ]


def test_logs_name_the_role(run: RunEntry) -> None:
    folder = run.folder.attempt(1)
    for rank in (0, 6):
        (folder.logs / f"rank-{rank:05d}.log").write_text("x")
    titles = [log.title for log in log_files(run, all_ranks=True)]
    assert titles == ["rank 0 (trainer), attempt 1", "rank 6 (engine 1), attempt 1"]
