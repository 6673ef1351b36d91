"""What is predicted of a rank's memory, against what real ranks allocate and keep. ``tests.helpers.state_memory`` and
``tests.helpers.activation_memory`` try more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import activation_memory, state_memory
from tests.helpers.activation_memory import ActivationCase
from tests.helpers.distributed import run_ranks
from tests.helpers.state_memory import StateCase
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

STATES = [
    StateCase("qwen2_tied", (("pp", 2),), optimizer_offload_fraction=0.4, bucket=20000),
    StateCase("qwen3", (("tp", 2), ("cp", 2)), dtype="float32", optimizer_offload_fraction=1.0),
    StateCase("llama", (("tp", 2), ("pp", 2), ("vpp", 2)), critic=True, bucket=1),
    StateCase("mixtral", (("tp", 2), ("ep", 2), ("etp", 2)), optimizer_offload_fraction=0.4),
    StateCase("dsv3", (("ep", 2), ("pp", 2)), bucket=20000),
    StateCase("qwen3moe", (("tp", 2),), trained=False),
]
ACTIVATIONS = [
    ActivationCase("qwen3", (("tp", 2), ("pp", 2)), microbatches=3),
    ActivationCase("qwen2", (("pp", 2), ("vpp", 2)), microbatches=4),
    ActivationCase("qwen2", (("tp", 2), ("cp", 2)), dtype="float32"),
    ActivationCase("qwen3", (("tp", 4), ("sequence_parallel", False)), (("recompute", "full"),)),
    ActivationCase("dsv3", (("tp", 2), ("ep", 4)), (("recompute", "selective"), ("recompute_modules", ["core_attn"]))),
    ActivationCase("qwen3moe", (("cp", 2), ("cp_method", "ulysses"), ("ep", 2), ("expert_dispatch", "allgather"))),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All cases, from four ranks."""
    folder = tmp_path_factory.mktemp("memory")

    def models(cases: Any, sizes: dict[str, Any], name: str) -> dict[str, Path]:
        kinds = {case.kind for case in cases}
        return {kind: make_model(folder / name / kind, kind, **sizes) for kind in kinds}

    states = models(STATES, state_memory.SIZES, "states")
    activations = models(ACTIVATIONS, activation_memory.SIZES, "activations")
    return run_ranks(_both, 4, states, activations)


@pytest.mark.parametrize("case", STATES, ids=str)
def test_state_is_predicted_to_the_byte(found: list[Any], case: StateCase) -> None:
    for states, _ in found:
        measured, predicted = states[STATES.index(case)]
        assert predicted == measured
    assert found[0][0][STATES.index(case)][0]["parameters"] > 0


@pytest.mark.parametrize("case", ACTIVATIONS, ids=str)
def test_activations_are_predicted_within_a_twentieth(found: list[Any], case: ActivationCase) -> None:
    """Of all ranks together: those with experts get unequal shares of the tokens."""
    pairs = [activations[ACTIVATIONS.index(case)] for _, activations in found]
    measured, predicted = (sum(pair[i] for pair in pairs) for i in (0, 1))
    assert predicted == pytest.approx(measured, rel=0.05)


def _both(states: dict[str, Path], activations: dict[str, Path]) -> Any:
    return state_memory.compare(states, STATES), activation_memory.compare(activations, ACTIVATIONS)
