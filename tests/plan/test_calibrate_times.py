"""What a run measured outside of its steps: the start and the bandwidths that made up its seconds come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.site import DiskSection
from rlhpc.core.attempts import AttemptTimes, write_times
from rlhpc.core.folder import RunFolder
from rlhpc.plan.calibrate import calibrate_times, read_attempts
from rlhpc.plan.scenario import Scenario, make_scenario

ROOT = Path(__file__).parents[2]
NODES, ALL = ("node_read_gbps", "node_write_gbps"), ("read_gbps", "write_gbps")


def scenario(nodes: int, **disk: float) -> Scenario:
    changes = [f"slurm.nodes={nodes}", "algorithm.kl.coefficient=0"]
    found = make_scenario(load_config(ROOT / "configs" / "ready" / "qwen2.5-7b-math-4nodes.yaml", changes))
    assert found is not None
    return replace(found, disk=DiskSection(**disk))


def measured(truth: Scenario, start: float) -> list[AttemptTimes]:
    """A first attempt and a resumed one on a machine that is as ``truth`` says."""
    run = truth.run(truth.step())
    models = run.read_bytes / run.read_rate
    return [AttemptTimes(start, models, None, (run.write,)), AttemptTimes(start + 2, models, run.resume, (run.write,))]


@pytest.mark.parametrize(
    ("nodes", "truth", "keys"),
    [
        (1, {"node_read_gbps": 1.3, "node_write_gbps": 0.7}, NODES),  # a node is the limit
        (16, {"read_gbps": 2.5, "write_gbps": 1.5}, ALL),  # the file system is
        (1, {"node_read_gbps": 20.0, "node_write_gbps": 9.0, "read_gbps": 20.0, "write_gbps": 9.0}, (*NODES, *ALL)),
        (16, {"node_read_gbps": 4.0, "read_gbps": 64.0, "node_write_gbps": 1.0, "write_gbps": 20.0}, None),
    ],
)
def test_what_a_run_was_made_of_is_found_again(nodes: int, truth: dict[str, float], keys: tuple[str, ...]) -> None:
    made = scenario(nodes, **truth)
    found = calibrate_times(scenario(nodes), measured(made, 47.0))
    assert found.planning == {"start_seconds": 48.0}
    for name in ("models", "resume", "save"):
        assert found.after[name] == pytest.approx(found.measured[name], rel=0.01)
        assert abs(found.before[name] - found.measured[name]) > 0.1 * found.measured[name]
    if keys is not None:
        assert set(found.disk) == set(keys)
        for name in keys:
            assert found.disk[name] == pytest.approx(getattr(made.disk, name), rel=0.01)


def test_what_was_not_measured_stays() -> None:
    case = scenario(4)
    nothing = calibrate_times(case, [])
    assert (nothing.planning, nothing.disk, nothing.measured) == ({}, {}, {})
    assert nothing.after == nothing.before
    started = calibrate_times(case, [AttemptTimes(30.0, 0.0)])
    assert (started.planning, started.disk) == ({"start_seconds": 30.0}, {})
    (instant,) = [calibrate_times(case, [AttemptTimes(30.0, 1e-9, None, (1e-9,))])]
    assert DiskSection(**instant.disk).node_read_gbps > 1e6, "a file in memory; and a save is never shorter than copies"
    assert "node_write_gbps" not in instant.disk


def test_attempts_that_measured_nothing_are_passed_over(tmp_path: Path) -> None:
    run, times = RunFolder(tmp_path), AttemptTimes(30.0, 2.0)
    assert read_attempts(tmp_path) == []
    for number in (1, 2):
        run.attempt(number).path.mkdir(parents=True)
    write_times(run.attempt(2), times)
    assert read_attempts(tmp_path) == [times]
