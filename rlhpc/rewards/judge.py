"""Scores responses beside the engine, in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhpc.api import Completion, Prompt, Verdict
from rlhpc.config.schema import RewardSection


class RewardJudge:
    """A ``Judge`` of the configured functions. Make one on the first rank of each engine, and ``close`` it."""

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begin to score a response; returns at once."""
        raise NotImplementedError

    def verdicts(self) -> dict[int, Verdict]:
        """Wait for every response submitted since the last call; by key.

        A UserError if a function failed and ``reward.on_failure`` is ``fail``.
        """
        raise NotImplementedError

    def failures(self) -> dict[str, int]:
        """Failed calls by kind since the last call of this: raised, result, timeout, died."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes."""
        raise NotImplementedError


def load_judge(section: RewardSection, decode: Callable[[Sequence[int]], str], max_response_tokens: int) -> RewardJudge:
    """Start scoring with the configured functions; what is wrong with them is a UserError now.

    ``decode`` makes a response's text of its tokens.
    """
    raise NotImplementedError
