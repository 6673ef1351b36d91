"""Each model's settings, and where they come from when its section leaves them out."""

from __future__ import annotations

from typing import Any

from rlhpc.config.model_settings import actor_settings, critic_settings, reference_settings, reward_model_settings
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, MoeSection, OffloadSection, ParallelSection

OFFLOADED = MemorySection(offload=OffloadSection(parameters=True))
ACTOR = {
    "parallel": {"tp": 2},
    "memory": {"recompute": "full"},
    "moe": {"router_dtype": "float32", "aux_loss": 0.1, "router_replay": True},
}


def config(**sections: Any) -> RunConfig:
    known = {"name": "r", "model": {"path": "m"}, "train": {"steps": 1}, "actor": ACTOR, "rewards": [{"model": "m"}]}
    return RunConfig.model_validate({**known, **sections})


def test_what_a_section_leaves_out_is_the_actor_s() -> None:
    given = config()
    assert actor_settings(given).moe.router_replay
    assert actor_settings(given).optimizer == given.actor.optimizer
    replayed_nowhere = MoeSection(router_dtype="float32", aux_loss=0.1)
    for settings in (critic_settings(given), reward_model_settings(given)):
        assert (settings.parallel, settings.moe) == (ParallelSection(tp=2), replayed_nowhere)
    assert critic_settings(given).memory == MemorySection(recompute="full")
    assert critic_settings(given).optimizer == given.critic.optimizer
    assert reference_settings(given).parallel == ParallelSection(tp=2)
    assert reference_settings(given).optimizer is reward_model_settings(given).optimizer is None


def test_a_section_of_its_own_takes_precedence() -> None:
    own = {"parallel": {"pp": 2}, "memory": {"recompute": "none"}, "moe": {"aux_loss": 0.5}}
    critic = critic_settings(config(critic=own))
    assert (critic.parallel, critic.memory) == (ParallelSection(pp=2), MemorySection())
    assert critic.moe == MoeSection(aux_loss=0.5)
    assert reward_model_settings(config(rewards=[{"model": "m", "parallel": {}}])).parallel == ParallelSection()


def test_frozen_models_are_offloaded_on_their_own_terms() -> None:
    """A reward model follows the reference unless it has its own section."""
    reference = {"memory": {"offload": True}}
    stays = [{"model": "m", "memory": {"offload": False}}]
    assert reference_settings(config()).memory == reward_model_settings(config()).memory == MemorySection()
    given = config(reference=reference)
    assert reference_settings(given).memory == reward_model_settings(given).memory == OFFLOADED
    assert reward_model_settings(config(reference=reference, rewards=stays)).memory == MemorySection()
