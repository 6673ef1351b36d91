"""What a token of a response is drawn from, beside temperature and top_p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingOptions:
    """Options of one request; see ``rlhpc.config.sampling.SamplingSection``."""

    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # of the rest of the response
    stop: tuple[str, ...] = ()
    train_on_stop: bool = True
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_output: tuple[str, Any] | None = None  # kind, and what of it

    @property
    def depends_on_turn(self) -> bool:
        """Whether a token depends on which earlier ones are of its turn: a turn that is interrupted begins again."""
        counted = self.presence_penalty or self.frequency_penalty
        return bool(counted or self.stop or self.bad_words or self.structured_output)
