"""Predicted memory and time of a reference beside engines: on their ranks, and no longer on those that train."""

from __future__ import annotations

import pytest

from rlhpc.config.site import EfficiencySection
from rlhpc.plan.checks.limits import check_limits
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.step_time import predicted_costs
from rlhpc.sharding.shards import num_parameters
from tests.plan.estimates.test_memory_by_role import HALVES, parts, phases
from tests.plan.estimates.test_separate import step_of

TWO_RANKS = (*HALVES, "rollout.tp=2", "algorithm.kl.coefficient=0.1")
ENGINES = (*TWO_RANKS, "reference.on=engines")
OFFLOAD = "reference.memory.offload={}"


@pytest.mark.parametrize("offload", [False, True])
def test_an_engines_rank_has_its_slice_of_the_reference(offload: bool) -> None:
    """While the engine is awake, also if it is offloaded between two uses; then CPU memory has it too."""
    setting = OFFLOAD.format(str(offload).lower())
    on_trainers, on_engines = (predict_memory(*parts(*where, setting), 80.0) for where in (TWO_RANKS, ENGINES))
    shape = parts(*ENGINES)[1]
    plain, rollout = phases(on_trainers, 4)["rollout"], phases(on_engines, 4)["rollout"]
    weights = rollout.pop("reference: weights")
    assert weights == pytest.approx(2 * num_parameters(shape) / 2, rel=0.01), "2 bytes each, of two ranks"
    assert rollout.pop("activations") > 0
    assert rollout == plain
    assert any("reference: weights" in found for found in phases(on_trainers, 0).values())
    assert not any("reference: weights" in found for found in phases(on_engines, 0).values())
    assert on_engines.cpu.engine_parts.get("offloaded", 0) == (weights if offload else 0)
    assert on_trainers.cpu.parts.get("offloaded", 0) - on_engines.cpu.parts.get("offloaded", 0) == pytest.approx(
        2 * num_parameters(shape) / 2 if offload else 0, rel=0.01
    )


def test_an_engine_without_room_for_the_reference_is_warned_of() -> None:
    """With the largest share of the GPU that leaves it some."""

    def warnings(share: float) -> list[str]:
        config, shape, layout = parts(*ENGINES, f"rollout.gpu_memory_utilization={share}")
        found = check_limits(config, shape, layout, starting=False)
        return [text for text in found if "gpu_memory_utilization" in text]

    (warning,) = warnings(0.95)
    assert "free beside the reference and its libraries; set it to " in warning
    fits = float(warning.partition("set it to ")[2].split(";")[0])
    assert 0.7 < fits < 0.9
    assert not warnings(fits)


def test_its_passes_lengthen_the_engines_side() -> None:
    stays = OFFLOAD.format("false")
    plain, scoring, moves = step_of(*TWO_RANKS[2:], stays), step_of(*ENGINES[2:], stays), step_of(*ENGINES[2:])
    assert plain.sides is not None
    assert scoring.sides is not None
    seconds = scoring.phase("scoring").seconds
    assert seconds > 0
    assert scoring.sides.engines - plain.sides.engines == pytest.approx(seconds)
    assert scoring.sides.makespan - plain.sides.makespan == pytest.approx(seconds)
    reference = plain.phase("reference").seconds
    assert plain.sides.trainers - scoring.sides.trainers == pytest.approx(reference)
    assert scoring.phase("reference").seconds == 0
    assert seconds == pytest.approx(reference, rel=0.3), "as many ranks, and passes without gradient"
    copies = moves.phase("scoring").parts["cpu_memory"]
    assert moves.phase("scoring").seconds - seconds == pytest.approx(copies)
    once = step_of(*TWO_RANKS[2:]).phase("offload").seconds - moves.phase("offload").seconds
    assert copies == pytest.approx(128 * once), "for each of the 256 groups of two engines"


def test_virtual_time_of_a_token_includes_its_scoring() -> None:
    """That of a batch on each of two engines, over the tokens that one samples for it."""
    (plain, _), (scored, step) = (
        (predicted_costs(*found[:2], GPUS["h100"], EfficiencySection()), step_of(*where[2:], stays))
        for where in (TWO_RANKS, ENGINES)
        for stays in [OFFLOAD.format("false")]
        for found in [parts(*where, stays)]
    )
    assert scored.step_seconds == plain.step_seconds
    assert scored.sequence_seconds is not None
    assert plain.sequence_seconds is not None
    tokens = step.work.generated / 2 * step.work.response
    more = scored.sequence_seconds - plain.sequence_seconds
    assert more * tokens == pytest.approx(step.phase("scoring").seconds, rel=0.02)
