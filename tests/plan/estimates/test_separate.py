"""A step of a separate placement, its sync and its virtual costs, against values computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.rollout import AsynchronySection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.rollout_time import Engines, decoding_step, prompts_time
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.separate import SeparateStep, full_slots, full_slots_time, mean_context, staged_sync
from rlhpc.plan.estimates.step_time import StepTime, predict_step, predicted_costs
from rlhpc.plan.estimates.workload import step_workload
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import engine_ranks
from rlhpc.sharding.shards import num_parameters

READY = Path(__file__).parents[3] / "configs" / "ready"
HALVES = ("placement=separate", "rollout.ranks=4", "rollout.gpu_memory_utilization=0.9")
MACHINE = MachineSpeed(GPUS["h100"], EfficiencySection(), 8)


def parts(*changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / "qwen2.5-7b-1node.yaml", [*HALVES, *changes])
    layout = make_layout(config.actor.parallel, config.world_size - (engine_ranks(config) or 0))
    return config, read_model(config.model.path), layout


def step_of(*changes: str) -> StepTime:
    return predict_step(*parts(*changes), GPUS["h100"], EfficiencySection())


@pytest.mark.parametrize(
    ("times", "staleness", "seconds", "limit", "idle"),
    [
        ((6.0, 4.0, 10.0, 1.0), 0, 15.0, "staleness", (1 / 3, 11 / 15)),
        ((6.0, 4.0, 10.0, 1.0), 1, 7.5, "staleness", (0.0, 3.5 / 7.5)),
        ((6.0, 4.0, 10.0, 1.0), 2, 6.0, "engines", (0.0, 1 / 3)),
        ((6.0, 20.0, 10.0, 1.0), 2, 20.0, "trainers", (0.5, 0.0)),
    ],
)
def test_a_step_takes_the_longest_of_three(
    times: tuple[float, float, float, float], staleness: int, seconds: float, limit: str, idle: tuple[float, float]
) -> None:
    step = SeparateStep(*times, staleness)
    assert (step.seconds, step.limit) == (seconds, limit)
    assert (step.idle_engines, step.idle_trainers) == pytest.approx(idle)


def test_responses_wait_as_long_as_the_bound_allows_unless_engines_limit() -> None:
    assert SeparateStep(6.0, 4.0, 10.0, 1.0, 1).staleness == 1.0
    assert SeparateStep(6.0, 20.0, 10.0, 1.0, 4).staleness == 4.0
    # A batch starts over 6 s and its last response ends 4 s later: 7 s in the mean, of steps of 6 s.
    assert SeparateStep(6.0, 4.0, 10.0, 1.0, 4).staleness == pytest.approx(7 / 6)


def test_full_slots_have_no_tail() -> None:
    even, long = (parts(f"planning.response_spread={spread}", "rollout.max_num_seqs=64") for spread in (0, 1))
    for (config, shape, _), tailed in ((even, False), (long, True)):
        work = step_workload(config)
        engines = Engines(shape, config.rollout, MACHINE, 4, "bfloat16")
        keep = AsynchronySection(max_staleness=1, in_flight="keep")
        assert full_slots(engines, work, 1) == 64
        waves = 2048 / 4 / 64
        decoding = waves * 300 * sum(decoding_step(engines, 64, mean_context(work)).values())
        full = full_slots_time(engines, work, keep)
        assert decoding < full < 1.1 * decoding, "prompts are computed too"
        assert full_slots_time(engines, work, AsynchronySection(max_staleness=1)) > full, "requests in flight again"
        makespan = (
            step_of(f"planning.response_spread={int(tailed)}", "rollout.max_num_seqs=64").phase("rollout").seconds
        )
        assert (makespan > 1.15 * full) == tailed
    # Equal lengths of 300 after prompts of 130: half of a response is there in the mean.
    assert mean_context(step_workload(even[0])) == 130 + 150


def test_a_bound_of_staleness_limits_what_is_in_flight() -> None:
    config, shape, _ = parts()
    engines = Engines(shape, config.rollout, MACHINE, 4, "bfloat16")
    few = step_workload(parts("train.prompts_per_step=16")[0])
    assert full_slots(engines, few, 0) == 16 * 8 / 4
    assert full_slots(engines, few, 1) == 2 * 16 * 8 / 4


def test_a_sync_crosses_the_network_once_for_each_node() -> None:
    shape = read_model(READY / "models" / "Qwen2.5-7B")
    section = parts("rollout.tp=2")[0].rollout
    model = 2 * num_parameters(shape)
    for nodes in (1, 2):
        sync = staged_sync(Engines(shape, section, MACHINE, 8 * nodes), ParallelLayout(8), 8)
        assert sync.received == pytest.approx(model / 2, rel=1e-3)
        assert sync.sent_across == pytest.approx(nodes * model, rel=1e-3)
    # Over the network: an eighth from each trainer, a quarter to each of the ranks that forward it to three others.
    forwarded = 0.75 * model / 2 / (450e9 * 0.7)
    assert sync.transfer == pytest.approx(2 * model / 8 / (50e9 * 0.6) + forwarded, rel=0.01)
    beside = staged_sync(Engines(shape, section, MACHINE, 4), ParallelLayout(4), 8)
    assert beside.sent_across == 0.0
    # Trainers copy their part to CPU memory, engines theirs back, and pack it.
    assert beside.stage == pytest.approx(model / 4 / (64e9 * 0.5), rel=1e-3)
    assert beside.write == pytest.approx(model / 2 / (64e9 * 0.5) + model / (3350e9 * 0.7), rel=1e-3)


def test_a_step_has_both_sides() -> None:
    step = step_of()
    sides, sync = step.sides, step.sync
    assert sides is not None
    assert sync is not None
    training = sum(phase.seconds for phase in step.phases if phase.name not in ("weight sync", "rollout"))
    assert (step.ranks, step.training_ranks, step.engine_ranks) == (8, 4, 4)
    assert sides.trainers == pytest.approx(training + sync.stage)
    assert sides.makespan == step.phase("rollout").seconds
    assert step.seconds == sides.seconds == sides.trainers
    finishing = step_of("asynchrony.in_flight=finish").sides
    assert finishing is not None
    assert finishing.engines == pytest.approx(sides.makespan + sync.write)


def test_costs_are_those_of_an_engine_step_and_of_a_training_step() -> None:
    config, shape, _ = parts("rollout.max_num_seqs=64")
    costs = predicted_costs(config, shape, GPUS["h100"], EfficiencySection())
    assert costs.step_seconds is not None
    assert costs.sequence_seconds is not None
    engines = Engines(shape, config.rollout, MACHINE, 4, "bfloat16")
    context = mean_context(step_workload(config))
    prompt = sum(prompts_time(engines, 130 / 8).values()) / 300  # shared by 8 responses of 300 steps
    for running in (1, 64):
        step = costs.step_seconds + running * costs.sequence_seconds
        decoding = sum(decoding_step(engines, running, context).values())
        assert step == pytest.approx(decoding + running * prompt, rel=1e-3)
    sides = step_of("rollout.max_num_seqs=64").sides
    assert sides is not None
    assert costs.train_seconds == pytest.approx(sides.trainers + sides.sync, rel=1e-3)
