"""Generation on ranks of its own, and, while the trainers would wait, on theirs too (``placement: lend``)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlhpc.api import RolloutEngine, RunState
from rlhpc.core.heartbeat import touch
from rlhpc.observe.metrics import Stopwatch
from rlhpc.parallel.channel import ObjectChannel
from rlhpc.parallel.transfer import gather_objects
from rlhpc.reshard.manager import ReshardManager
from rlhpc.rollout.generator.lending import continued, sampled_tokens
from rlhpc.rollout.generator.messages import Lent
from rlhpc.rollout.generator.parts import EnginePlace
from rlhpc.rollout.requests import Sampling
from rlhpc.trainer.choosing import Chooser, Sampled
from rlhpc.trainer.separate import Separate

_LOOK_SECONDS = 5.0  # after which the other ranks of a lender show a sign of life


@dataclass(frozen=True)
class Lender:
    """This rank's engine. ``channel``: to the engine whose requests it continues, on its first rank."""

    engine: RolloutEngine
    place: EnginePlace
    channel: ObjectChannel | None

    def receive(self, version: int) -> Lent:
        """The requests that are to be continued with a version; waits for them."""
        while True:
            found = self.place.shared(self._look() if self.channel is not None else None)
            if found is not None:
                assert found.version == version, f"requests of version {found.version}, not {version}"
                return found

    def _look(self) -> Lent | None:
        assert self.channel is not None
        self.channel.inbox.wait(_LOOK_SECONDS, "waiting for engines")
        arrived = self.channel.inbox.take()
        assert len(arrived) <= 1, "an engine lends once with a version"
        return arrived[0][1] if arrived else None


@dataclass
class Lending:
    """Continues requests of the engines with each version of the weights, before it takes the step's groups."""

    separate: Separate
    weights: ReshardManager
    lender: Lender
    sampling: Sampling

    @property
    def chooser(self) -> Chooser:
        return self.separate.chooser

    def generate(self, state: RunState, clock: Stopwatch) -> Sampled:
        self.separate.engines.check_taken(state.step)
        touch("weight sync", state.step + 1)
        with clock("weight_sync"):
            self.weights.sync()
        touch("rollout", state.step + 1)
        with clock("rollout"):
            metrics = self._lend(state)
            self.weights.sleep()
        sampled = self.separate.generate(state, clock)
        for name, value in metrics.items():
            sampled.metrics[name] = sampled.metrics.get(name, 0.0) + value
        return sampled

    def statistics(self) -> dict[str, float]:
        return self.separate.statistics()

    def _lend(self, state: RunState) -> dict[str, float]:
        """Metrics, equal on all ranks but for the idle time: what is not generation, in the mean of the lenders."""
        began = time.perf_counter()
        mine = self._continue(self.lender.receive(state.step), state)
        found = [counts for counts in gather_objects(mine) if counts is not None]
        totals = {name: sum(counts[name] for counts in found) for name in found[0]}
        seconds = totals["trainers/lent_seconds"] = totals["trainers/lent_seconds"] / len(found)
        return {**totals, "trainers/idle_seconds": max(0.0, time.perf_counter() - began - seconds)}

    def _continue(self, lent: Lent, state: RunState) -> dict[str, float] | None:
        """Activity of this rank's engine; None except on its first rank."""
        assert lent.policy_version == state.policy_version, "trainers and engine count policy versions alike"
        began = time.perf_counter()
        ended, tokens = 0, 0
        if lent.tasks:
            returned = continued(self.lender.engine, self.sampling, lent, self.separate.engines.terms)
            ended, tokens = len(returned.ended), sampled_tokens(lent, returned)
            if self.lender.channel is not None:
                self.lender.channel.send(returned)
        if self.lender.channel is None:
            return None
        return {
            "trainers/lent_seconds": time.perf_counter() - began,
            "trainers/lent_requests": float(len(lent.tasks)),
            "trainers/lent_ended": float(ended),
            "trainers/lent_tokens": float(tokens),
        }
