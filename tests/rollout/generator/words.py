"""An engine of words: what it samples depends on its weights' version, and log-probs on the requests beside. Rewards
and tools that are late at random."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhpc.api import Completion, Prompt, Request, RewardResult
from rlhpc.rollout.collect import Reply
from rlhpc.rollout.requests import Task, last_turn, mixed_bits, turns

END = 1


@dataclass
class WordRequest:
    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class WordEngine:
    """Samples a token of each of its first ``slots`` requests in a step, by seed, position and version; a token's
    log-prob is a number of the composition of the step."""

    def __init__(self, slots: int, *, delayed: bool = False, mean: int = 12) -> None:
        """``delayed``: what ends with a step is known with the next one, as on a device; ``mean``: tokens of a
        response that is not cut."""
        self._slots, self._delayed, self._mean, self.version = slots, delayed, mean, -1
        self._late: list[tuple[int, Completion]] = []
        self.open: dict[int, WordRequest] = {}
        self.awake: list[str] = []

    def wake_weights(self) -> None:
        self.awake.append("weights")

    def wake_cache(self) -> None:
        assert self.version >= 0
        self.awake.append("cache")

    def submit(self, key: int, request: Request) -> None:
        assert self.awake == ["weights", "cache"]
        self.open[key] = WordRequest(request)

    def step(self) -> list[tuple[int, Completion]]:
        running = list(self.open.items())[: self._slots]
        beside = mixed_bits(*(found.request.seed for _, found in running)) % 9973 if running else 0
        done = []
        for key, found in running:
            bits = mixed_bits(found.request.seed, len(found.request.prompt) + len(found.tokens), self.version)
            ends = bits % self._mean == 0
            found.tokens.append(END if ends else 30 + (bits >> 8) % 7)
            found.log_probs.append(-(beside + 1) / 8192)
            if ends or len(found.tokens) == found.request.max_tokens:
                done.append((key, self._completion(self.open.pop(key), truncated=not ends)))
        if self._delayed:
            done, self._late = self._late, done
        return done

    def settle(self) -> list[tuple[int, Completion]]:
        late, self._late = self._late, []
        return late

    def order(self) -> list[int]:
        return list(self.open)

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        return {key: self._completion(self.open[key], first) for key, first in since.items()}

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        return {key: self._completion(self.open.pop(key)) for key in keys}

    def preempt(self) -> None: ...

    def statistics(self) -> dict[str, float]:
        return {"engine/running_requests_max": float(len(self.open))}

    @staticmethod
    def _completion(found: WordRequest, first: int = 0, *, truncated: bool = False) -> Completion:
        tokens, log_probs = np.array(found.tokens, np.int32), np.array(found.log_probs, np.float32)
        return Completion(tokens[first:], log_probs[first:], truncated)


class VersionWeights:
    """Weights that arrive as soon as they are published."""

    def ready(self, version: int) -> bool:
        return True

    def wait(self, version: int) -> None: ...

    def write(self, engine: Any, version: int) -> None:
        assert version > engine.version
        engine.version = version


class SlowRewards:
    """Rewards 0 or 1 by the response's tokens, some of them late in real time."""

    def __init__(self, seed: int) -> None:
        self._random, self._waiting = random.Random(seed), dict[int, tuple[float, RewardResult]]()

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        reward = float(int(completion.tokens.sum()) % 5 == 0)
        due = time.monotonic() + self._random.choice([0.0, 0.0, 0.004])
        self._waiting[key] = due, RewardResult(reward, failures=("raised",) if not reward else ())

    def ready(self) -> dict[int, RewardResult]:
        now = time.monotonic()
        return {key: self._waiting.pop(key)[1] for key, (due, _) in list(self._waiting.items()) if due <= now}

    def results(self) -> dict[int, RewardResult]:
        time.sleep(max([0.0, *(due - time.monotonic() for due, _ in self._waiting.values())]))
        return self.ready()


class SlowTools:
    """Answers turns that end with an even token before the end, some late in real time; at most three turns."""

    def __init__(self, seed: int) -> None:
        self._random, self._due = random.Random(seed), dict[int, tuple[float, Reply]]()

    def begin(self, key: int, task: Task) -> bool:
        turn = last_turn(task.draft)
        if turns(task.draft) == 3 or len(turn) < 2 or turn[-2] % 2:
            return False
        tokens = (END, 50 + len(turn) % 5, 51)
        self._due[key] = time.monotonic() + self._random.choice([0.0, 0.0, 0.003]), Reply(tokens, 2, 1)
        return True

    def unanswered(self, task: Task) -> bool:
        return False

    def arrived(self) -> list[int]:
        now = time.monotonic()
        return [key for key, (due, _) in self._due.items() if due <= now]

    def ready(self) -> dict[int, Reply]:
        now = time.monotonic()
        return {key: self._due.pop(key)[1] for key, (due, _) in list(self._due.items()) if due <= now}

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        found: dict[int, Reply] = {}
        while self._due and (all_of_them or not found):
            time.sleep(0.001)
            found |= self.ready()
        return found

    def end(self, task: Task) -> None: ...
