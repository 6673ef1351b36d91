"""Scores responses beside the engine, in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhpc.api import Completion, Prompt, RewardResult, UnusableTruth
from rlhpc.config.reward import RewardFunctionSection, RewardWorkersSection
from rlhpc.core.heartbeat import touch
from rlhpc.rewards.calls import LOADER, UNFINISHED, Entry, Failure, Outcome, Score, Truth
from rlhpc.rewards.failures import Failures
from rlhpc.rewards.pool import CallId, Pool, PoolCall

_REMEDY = "make it return a finite number for every response, or set reward_workers.on_failure"

_SECONDS = 30.0
_RULE_SECONDS = 5.0  # for functions that take milliseconds unless a response makes them slow
_RULES = ("rlhpc.rewards.rules:", "rlhpc.rewards.formats:")
_BUILT_IN = "rlhpc.rewards."
_BUILT_IN_MIB = 2048
_CHUNK = 32  # ground truths per call

Decode = Callable[[Sequence[int]], str]
Functions = Mapping[str, RewardFunctionSection]  # by their keys, such as rewards.0


@dataclass(frozen=True)
class _Response:
    prompt: Prompt
    text: str


class FunctionRewards:
    """``RewardWorkers`` that call the configured functions; one on the first rank of each engine.

    ``rlhpc.rewards.failures`` handles failed calls. A result's parts are the scores of named functions, as ``name``,
    and the other numbers that functions return, as ``name/key``. Without functions (a model is the only reward) every
    result is 0.
    """

    def __init__(
        self, functions: Functions, section: RewardWorkersSection, decode: Decode, max_response_tokens: int
    ) -> None:
        self._functions = list(functions.values())
        self._failures = Failures(section, _REMEDY)
        self.decode, self._max_tokens = decode, max_response_tokens
        self._entries = entries_of(functions, section, max_response_tokens)
        checks = [replace(entry, loader=LOADER) for entry in self._entries]
        self._pool = Pool[Score]([*self._entries, *checks], section.per_engine, _SECONDS) if self._entries else None
        self._responses: dict[int, _Response] = {}
        self._outcomes: dict[CallId, Outcome] = {}  # of responses without a result

    def wait_until_started(self) -> None:
        """Waits until a worker has imported the functions; a UserError if it cannot."""
        if self._pool is not None:
            self._pool.wait_until_started()

    def unusable_truths(self, truths: Sequence[Truth]) -> list[UnusableTruth]:
        """Ground truths that a function's check refuses, among them the first of each; and all whose check did not
        finish."""
        if self._pool is None:
            return []
        count = len(self._entries)
        found = []
        for check, index, failure in _find_unusable(self._pool, range(count, 2 * count), truths):
            entry = self._entries[check - count]
            action = self._failures.action(failure, built_in=entry.built_in)
            found.append(UnusableTruth(index, entry.path, failure.what, action))
        return found

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begins to score a response; returns immediately."""
        assert key not in self._responses, f"response {key} is already being scored"
        response = _Response(prompt, self.decode(completion.tokens.tolist()))
        self._responses[key] = response
        if self._pool is None:
            return
        keywords = {
            "data_source": prompt.data_source,
            "solution_str": response.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "response_tokens": len(completion.tokens) - completion.tool_tokens,
            "max_response_tokens": self._max_tokens,
        }
        self._pool.submit([PoolCall((key, index), keywords) for index in range(len(self._functions))])

    def results(self) -> dict[int, RewardResult]:
        """Results of every submitted response that were not returned before, by key; waits for them.

        Raises a UserError if a failed call ends the run.
        """
        return self._results(self._pool.outcomes() if self._pool is not None else {})

    def ready(self) -> dict[int, RewardResult]:
        """Results that arrived and were not returned before, by key; does not wait. Raises as ``results`` does.

        A rank that has nothing else to do calls this until they are there: a slow call within its limit is progress.
        """
        if self._pool is None:
            return self._results({})
        if self._pool.advances():
            touch("score")
        return self._results(self._pool.ready())

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()

    def _results(self, arrived: Mapping[CallId, Outcome]) -> dict[int, RewardResult]:
        """Results of the responses of which all outcomes have arrived."""
        self._outcomes |= arrived
        places = range(len(self._functions))
        done = sorted(key for key in self._responses if all((key, place) in self._outcomes for place in places))
        responses = {key: self._responses.pop(key) for key in done}
        outcomes = {(key, place): self._outcomes.pop((key, place)) for key in done for place in places}
        return {key: self._result(key, response, outcomes) for key, response in responses.items()}

    def _result(self, key: int, response: _Response, outcomes: Mapping[CallId, Outcome]) -> RewardResult:
        reward, dropped = 0.0, False
        answer: str | None = None
        parts: dict[str, float] = {}
        failures: list[str] = []
        for index, function in enumerate(self._functions):
            outcome = outcomes[key, index]
            if isinstance(outcome, Failure):
                failures.append(outcome.kind)
                dropped = self._handle(index, outcome, response) or dropped
                outcome = Score(0.0)
            reward += function.weight * outcome.value
            answer = outcome.answer if answer is None else answer
            if function.name:
                parts[function.name] = outcome.value
            prefix = f"{function.name}/" if function.name else ""
            parts |= {f"{prefix}{part}": number for part, number in outcome.parts.items()}
        if dropped:
            return RewardResult(0.0, dropped=True, failures=tuple(failures))
        return RewardResult(reward, parts, answer=answer, failures=tuple(failures))

    def _handle(self, index: int, failure: Failure, response: _Response) -> bool:
        """True if the response is dropped."""
        entry = self._entries[index]
        where = f"{entry.where} {entry.path}"
        return self._failures.handle(where, failure, response.prompt, response.text, built_in=entry.built_in)


def _find_unusable(pool: Pool[Score], checks: range, truths: Sequence[Truth]) -> list[tuple[int, int, Failure]]:
    """(index of the check, index of the ground truth, failure) of ground truths that a check refuses, among them the
    first of each; and of all whose check did not finish. ``checks``: those of the pool's entries that are checks."""
    pool.submit([PoolCall((0, check), ()) for check in checks])
    probed = pool.outcomes()
    present = [check for check in checks if probed[0, check] == Score(1.0)]
    starts = range(0, len(truths), _CHUNK)
    pool.submit([PoolCall((start, check), truths[start : start + _CHUNK]) for start in starts for check in present])
    outcomes = pool.outcomes()
    again = []
    for check in present:
        kinds = {start: found.kind for start in starts if isinstance(found := outcomes[start, check], Failure)}
        raised = [start for start, kind in kinds.items() if kind not in UNFINISHED][:1]
        unfinished = [start for start, kind in kinds.items() if kind in UNFINISHED]
        for start in (*raised, *unfinished):
            again += [(place, check) for place in range(start, min(start + _CHUNK, len(truths)))]
    pool.submit([PoolCall(call, [truths[call[0]]]) for call in again])
    outcomes = pool.outcomes()
    return [(check, place, outcome) for place, check in again if isinstance(outcome := outcomes[place, check], Failure)]


def start_reward_workers(
    functions: Functions, section: RewardWorkersSection, decode: Decode, max_response_tokens: int
) -> FunctionRewards:
    """Starts the workers; raises a UserError if a function cannot be used. ``decode`` turns tokens into text."""
    reward_workers = FunctionRewards(functions, section, decode, max_response_tokens)
    try:
        reward_workers.wait_until_started()
    except BaseException:
        reward_workers.close()
        raise
    return reward_workers


def entries_of(functions: Functions, section: RewardWorkersSection, max_response_tokens: int) -> list[Entry]:
    """The configured functions, as workers receive them."""
    return [
        Entry(
            item.function,
            item.arguments,
            f"{key}.function",
            max_response_tokens=max_response_tokens,
            time_limit_seconds=_time_limit(item, section),
            memory_limit_mib=_memory_limit(item, section),
            built_in=item.function.startswith(_BUILT_IN),
        )
        for key, item in functions.items()
    ]


def _time_limit(item: RewardFunctionSection, section: RewardWorkersSection) -> float:
    """Seconds per call: the function's own key, else the section's, else a default by kind of function."""
    for configured in (item.time_limit_seconds, section.time_limit_seconds):
        if configured is not None:
            return configured
    return _RULE_SECONDS if item.function.startswith(_RULES) else _SECONDS


def _memory_limit(item: RewardFunctionSection, section: RewardWorkersSection) -> int | None:
    """MiB per call; no limit by default for a user's function, which may load a model of any size."""
    if section.memory_limit_mib is not None:
        return section.memory_limit_mib
    return _BUILT_IN_MIB if item.function.startswith(_BUILT_IN) else None
