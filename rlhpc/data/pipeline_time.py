"""How long a pipeline takes for microbatches of unequal cost, and how many of them are best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlhpc.sharding.microbatches import best_microbatches

_BACKWARD = 2.0  # of a forward pass
_FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)  # of the best number of equal microbatches, which are tried


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and what a microbatch costs beside its samples, in the samples' unit."""

    stages: int
    overhead: float
    virtual_stages: int = 1  # of each stage, interleaved

    def time(self, costs: Sequence[Sequence[float]]) -> float:
        """Time until the slowest rank ends with microbatches of these costs [ranks, microbatches], in their order: of
        one that passes the whole pipeline forward and back it is thrice its cost. The schedule is 1F1B (Narayanan et
        al. 2021); interleaving shortens what is not work by the number of virtual stages (their section 2.2).
        """
        forward = np.asarray(costs, dtype=float) + self.overhead
        work = (1 + _BACKWARD) * (forward.sum(1) + self.overhead * self._blank(forward.shape[1]))
        whole = _one_forward_one_backward(forward, self.stages)
        return float(((whole * self.stages - work).clip(0) / self.virtual_stages + work).max())

    def counts(self, total: float, least: int, most: int) -> list[int]:
        """Numbers of microbatches of a rank with ``total`` cost worth trying, from ``least`` to ``most``."""
        best = best_microbatches(self.stages, self.virtual_stages, total, max(self.overhead, 1e-9 * total, 1e-30))
        found = {min(most, max(least, round(best * factor))) for factor in _FACTORS}
        if self.virtual_stages > 1:  # whole rounds, which blank ones would fill
            found |= {min(most, -(-count // self.stages) * self.stages) for count in found}
        return sorted({least, *found})

    def _blank(self, count: int) -> int:
        return -count % self.stages if self.virtual_stages > 1 else 0


def arranged(costs: Sequence[float]) -> Iterator[list[int]]:
    """Orders in which to run microbatches: the dearest first; small ones at both ends, while stages fill and drain."""
    rising = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    yield rising[::-1]
    yield [*rising[::2], *rising[1::2][::-1]]


def _one_forward_one_backward(forward: np.ndarray, stages: int) -> np.ndarray:
    """[ranks] times of a schedule of passes of ``forward`` [ranks, count], a stage of which takes its ``stages``-th."""
    passes, (ranks, count) = forward / stages, forward.shape
    fore = np.zeros((stages, count, ranks))  # ends
    back = np.zeros((stages, count, ranks))
    free = [np.zeros(ranks) for _ in range(stages)]
    waiting = [iter(_order(stage, stages, count)) for stage in range(stages)]
    following = [next(passes_of, None) for passes_of in waiting]
    done: set[tuple[int, bool, int]] = set()
    while any(following):
        for stage, step in enumerate(following):
            while step is not None:
                is_forward, i = step
                other = stage - 1 if is_forward else stage + 1
                if 0 <= other < stages and (other, is_forward, i) not in done:
                    break
                ends = fore if is_forward else back
                ready = ends[other, i] if 0 <= other < stages else 0.0
                seconds = passes[:, i] * (1.0 if is_forward else _BACKWARD)
                free[stage] = ends[stage, i] = np.maximum(free[stage], ready) + seconds
                done.add((stage, is_forward, i))
                step = following[stage] = next(waiting[stage], None)
    return np.max(free, axis=0)


def _order(stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """(whether forward, microbatch) of a stage, in its order."""
    ahead = min(stages - 1 - stage, count)
    yield from ((True, i) for i in range(ahead))
    for i in range(count - ahead):
        yield True, ahead + i
        yield False, i
    yield from ((False, i) for i in range(count - ahead, count))
