"""Scores responses beside the engine, in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhpc.api import Completion, Prompt, RewardResult
from rlhpc.config.reward import RewardFunctionSection, RewardWorkersSection
from rlhpc.rewards.calls import Entry, Failure, Outcome
from rlhpc.rewards.failures import Failures
from rlhpc.rewards.pool import Call, CallId, Pool

_REMEDY = "make it return a finite number for every response, or set reward_workers.on_failure"

_SECONDS = 30.0
_RULE_SECONDS = 5.0  # functions that a response can make slow, but that take milliseconds otherwise
_RULES = ("rlhpc.rewards.rules:", "rlhpc.rewards.formats:")
_BUILT_IN = "rlhpc.rewards."
_BUILT_IN_MIB = 2048

Decode = Callable[[Sequence[int]], str]
Functions = Mapping[str, RewardFunctionSection]  # by their keys, such as rewards.0


@dataclass(frozen=True)
class _Response:
    prompt: Prompt
    text: str


class FunctionRewards:
    """``RewardWorkers`` of the configured functions. Make one on the first rank of each engine, and ``close`` it.

    ``rlhpc.rewards.failures`` handles failed calls. Parts of a result are the numbers of the functions that have
    names, as ``name``, and the further numbers that functions return, as ``name/key``. Where a model is the only reward
    there is no function, and every result is 0.
    """

    def __init__(
        self, functions: Functions, section: RewardWorkersSection, decode: Decode, max_response_tokens: int
    ) -> None:
        self._functions = list(functions.values())
        self._failures = Failures(section, _REMEDY)
        self._decode, self._max_tokens = decode, max_response_tokens
        self._entries = entries_of(functions, section, max_response_tokens)
        self._pool = Pool(self._entries, section.per_engine, _SECONDS) if self._entries else None
        self._responses: dict[int, _Response] = {}

    def wait_until_started(self) -> None:
        """Until a worker has imported the functions; a UserError if it cannot."""
        if self._pool is not None:
            self._pool.wait_until_started()

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begin to score a response; returns at once."""
        assert key not in self._responses, f"response {key} is being scored already"
        response = _Response(prompt, self._decode(completion.tokens.tolist()))
        self._responses[key] = response
        if self._pool is None:
            return
        keywords = {
            "data_source": prompt.data_source,
            "solution_str": response.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "response_tokens": len(completion.tokens),
            "max_response_tokens": self._max_tokens,
        }
        self._pool.submit([Call((key, index), keywords) for index in range(len(self._functions))])

    def results(self) -> dict[int, RewardResult]:
        """Results of every response submitted since the last call, by key; waits for them.

        A UserError if a failed call ends the run.
        """
        outcomes = self._pool.outcomes() if self._pool is not None else {}
        responses, self._responses = self._responses, {}
        return {key: self._result(key, response, outcomes) for key, response in sorted(responses.items())}

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()

    def _result(self, key: int, response: _Response, outcomes: Mapping[CallId, Outcome]) -> RewardResult:
        reward, parts, dropped, answer, failures = 0.0, {}, False, None, []
        for index, function in enumerate(self._functions):
            outcome = outcomes[key, index]
            if isinstance(outcome, Failure):
                failures.append(outcome.kind)
                dropped = self._handle(index, outcome, response) or dropped
                value, further = 0.0, {}
            else:
                value, further = outcome.value, outcome.parts
                answer = outcome.answer if answer is None else answer
            reward += function.weight * value
            if function.name:
                parts[function.name] = value
            parts |= {f"{function.name}/{part}" if function.name else part: number for part, number in further.items()}
        if dropped:
            return RewardResult(0.0, dropped=True, failures=tuple(failures))
        return RewardResult(reward, parts, answer=answer, failures=tuple(failures))

    def _handle(self, index: int, failure: Failure, response: _Response) -> bool:
        """Whether the response is dropped."""
        entry, prompt = self._entries[index], response.prompt
        where, source = f"{entry.where} {entry.path}", prompt.data_source
        return self._failures.handle(where, failure, prompt.prompt_id, source, response.text, built_in=entry.built_in)


def start_reward_workers(
    functions: Functions, section: RewardWorkersSection, decode: Decode, max_response_tokens: int
) -> FunctionRewards:
    """Start scoring with the configured functions; what is wrong with them is a UserError now.

    ``decode`` makes a response's text of its tokens.
    """
    reward_workers = FunctionRewards(functions, section, decode, max_response_tokens)
    try:
        reward_workers.wait_until_started()
    except BaseException:
        reward_workers.close()
        raise
    return reward_workers


def entries_of(functions: Functions, section: RewardWorkersSection, max_response_tokens: int) -> list[Entry]:
    """What a worker is told of each of the configured functions."""
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
    """Seconds per call: the function's own key, else the section's, else what suits the function."""
    for given in (item.time_limit_seconds, section.time_limit_seconds):
        if given is not None:
            return given
    return _RULE_SECONDS if item.function.startswith(_RULES) else _SECONDS


def _memory_limit(item: RewardFunctionSection, section: RewardWorkersSection) -> int | None:
    """MiB per call; a user's function may load a model of any size, so that it has none by default."""
    if section.memory_limit_mib is not None:
        return section.memory_limit_mib
    return _BUILT_IN_MIB if item.function.startswith(_BUILT_IN) else None
