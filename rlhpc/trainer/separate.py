"""Generation on ranks of its own, beside training: takes a step's groups from the engines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlhpc.api import RunState
from rlhpc.core.heartbeat import touch
from rlhpc.data.groups import training_samples
from rlhpc.observe.metrics import Stopwatch
from rlhpc.rollout.response_lengths import sampled_lengths
from rlhpc.trainer.choosing import Chooser, Counts, Sampled
from rlhpc.trainer.engine_side import EngineSide
from rlhpc.trainer.intake import Batch
from rlhpc.trainer.length_bias import count_dropped
from rlhpc.trainer.sampling_plan import Outcome, check_shortage


@dataclass
class Separate:
    """Takes from the engines what a step trains on. A group is trained on in its step, dropped by the filter, or left
    out because the step has too few samples; staleness discards none."""

    chooser: Chooser
    engines: EngineSide

    def generate(self, state: RunState, clock: Stopwatch) -> Sampled:
        touch("rollout", state.step + 1)
        began = time.perf_counter()
        with clock("rollout"):
            batch = self.engines.batch(state.step + 1)
        waited = time.perf_counter() - began
        ended = [one.group for one in (*batch.kept, *batch.dropped)]
        self.chooser.carryover.lengths.record(sampled_lengths(ended))
        self._check_bound(state, batch)
        chooser, terms = self.chooser, self.engines.terms
        section = chooser.config.train
        state.prompt_cursor, state.arrival = batch.end, batch.arrival
        outcome = _outcome(batch, terms.groups_per_step)
        if section.dynamic_sampling is not None:
            check_shortage(section.dynamic_sampling, outcome, terms.groups_per_step)
            count_dropped(state, [one.group for one in batch.dropped])
        replayed = chooser.replayed(state)
        new = [one.group for one in batch.kept]
        groups = [*replayed, *new] if new else []
        samples = training_samples(groups, mask_truncated=section.mask_truncated)
        greedy = [one.greedy for one in batch.kept] if chooser.needs_greedy and groups else []
        metrics = {"trainers/idle_seconds": waited, "rollout/queued_groups": float(batch.queued)}
        metrics |= self.engines.metrics()
        return Sampled(groups, len(replayed), [*samples], greedy, outcome, _counts(batch), metrics)

    def expected_lengths(self, state: RunState) -> dict[str, Any]:
        """Expected lengths of the groups that engines may have with the present version: fields of ``Published``."""
        chooser, terms = self.chooser, self.engines.terms
        if chooser.config.rollout.dealing == "equal":
            return {}
        lengths, first = chooser.carryover.lengths, state.prompt_cursor
        count = (terms.max_staleness + 1) * (terms.batch_limit or terms.groups_per_step)
        prompts, _ = chooser.prompts.take(first, count, chooser.config.seed)
        ratios = lengths.of_groups(first, [prompt.prompt_id for prompt in prompts])
        return {"mean_tokens": lengths.mean, "length_ratios": ratios}

    def statistics(self) -> dict[str, float]:
        return self.engines.traffic()

    def _check_bound(self, state: RunState, batch: Batch) -> None:
        """Asserts that no token is older than asynchrony.max_staleness."""
        oldest = self.engines.oldest_policy_version(state.step, state.policy_version)
        for one in batch.kept:
            version = one.group.policy_version
            assert version >= oldest, f"step {state.step + 1}: group {one.number} has tokens of version {version}"


def _outcome(batch: Batch, groups: int) -> Outcome:
    taken, dropped = (tuple(one.number for one in part) for part in (batch.kept, batch.dropped))
    batches = ceil((len(taken) + len(dropped)) / groups)
    return Outcome(taken, (), (), dropped, batches, short=groups - len(taken))


def _counts(batch: Batch) -> Counts:
    """Metrics of the groups that the step takes or drops, at any time of generation."""
    counts = Counts(generated_groups=len(batch.kept) + len(batch.dropped))
    for one in (*batch.kept, *batch.dropped):
        counts.tool_calls += one.counts.tool_calls
        counts.failed_tool_calls += one.counts.failed_tool_calls
        counts.reward_failures.update(one.counts.reward_failures)
    return counts
