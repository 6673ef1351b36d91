"""Statistics of vLLM's scheduler: use of the KV cache, preemptions, prefix cache, requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.core.process import observing
from rlhpc.core.shown import ShownOnly


class EngineStatistics:
    """Statistics since the last ``take``, read in each engine step.

    vLLM's own loggers (``disable_log_stats=False``) also keep statistics of every request and token, in the time that
    generation waits. These are a few numbers of the scheduler. A failure is reported once and never ends the run.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._guard = scheduler, ShownOnly("statistics of the engine")
        self._requests: dict[int, Any] = {}  # of vLLM's scheduler, in flight
        self._deliberate: Counter[int] = Counter()  # preemptions that do not count
        self._later_turns: set[int] = set()
        self._clear()
        with self._guard:
            from vllm.v1.metrics.stats import PrefixCacheStats

            cache = scheduler.kv_cache_manager
            cache.log_stats, cache.prefix_cache_stats = True, PrefixCacheStats()  # counts lookups, as vLLM's loggers do

    def _clear(self) -> None:
        self._steps = self._preemptions = 0
        self._usage = self._most_used = 0.0
        self._running = self._most_running = self._most_waiting = 0
        self._turn_tokens = self._turn_hits = 0

    def begin(self, key: int, request_id: str, *, later_turn: bool = False) -> None:
        """Records a new request by vLLM's own id."""
        with self._guard:
            self._requests[key] = self._scheduler.requests[request_id]
            if later_turn:
                self._later_turns.add(key)

    def stepped(self) -> None:
        """Records an engine step."""
        with self._guard, observing():
            used = self._scheduler.kv_cache_manager.usage
            running, waiting = self._scheduler.get_request_counts()
            self._steps += 1
            self._usage += used
            self._most_used = max(self._most_used, used)
            self._running += running
            self._most_running = max(self._most_running, running)
            self._most_waiting = max(self._most_waiting, waiting)

    def preempted(self, keys: Sequence[int]) -> None:
        """Records preemptions that do not count: for a weight sync or a checkpoint, not for lack of memory."""
        with self._guard:
            self._deliberate.update(keys)

    def end(self, key: int, prompt_tokens: int = 0, cached: int = 0) -> None:
        """Records the end of a request; ``cached``: tokens of its prompt that the prefix cache had when it began."""
        with self._guard:
            self._preemptions += self._requests.pop(key).num_preemptions - self._deliberate.pop(key, 0)
            if key in self._later_turns:
                self._later_turns.discard(key)
                self._turn_tokens += prompt_tokens
                self._turn_hits += cached

    def take(self) -> dict[str, float]:
        """Metrics since the last call, named by how they are reduced over engines; empty if nothing was generated."""
        found: dict[str, float] = {}
        with self._guard:
            lookups = self._scheduler.kv_cache_manager.make_prefix_cache_stats()
            if self._steps:
                found = {
                    "kv_cache_usage_mean": self._usage / self._steps,
                    "kv_cache_usage_max": self._most_used,
                    "preemptions_sum": self._preemptions,
                    "running_requests_mean": self._running / self._steps,
                    "running_requests_max": self._most_running,
                    "waiting_requests_max": self._most_waiting,
                }
            if lookups.queries:
                found["prefix_cache_hit_rate_mean"] = lookups.hits / lookups.queries
                if self._turn_tokens:
                    found["turn_cache_hit_rate_mean"] = self._turn_hits / self._turn_tokens
        self._clear()
        return {} if self._guard.failed else {f"engine/{name}": float(value) for name, value in found.items()}


def guess_metrics(counts: Mapping[str, int] | None) -> dict[str, float]:
    """Metrics of speculative decoding, from ``GuessCounts``."""
    if not counts or not counts["generated"]:
        return {}
    found = {"engine/guesses_paused_mean": counts["paused"] / counts["generated"]}
    if counts["guessed"]:
        found["engine/guess_acceptance_mean"] = counts["accepted"] / counts["guessed"]
        found["engine/accepted_length_mean"] = 1 + counts["accepted"] / counts["steps"]
    return found
