"""A second model or a head that guesses tokens: draws them as the policy does.

It draws with the noise of the policy's own tokens, which depends on the request's seed and the position alone: where
both models have the same distribution, a sampled guess is right, as a greedy one is.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from jaxtyping import Float, Int, Int64
from torch import Tensor

from rlhpc.core.errors import UserError
from rlhpc.rollout.token_draws import TokenDraws


class DraftGuesser:
    """Stands before a proposer of vLLM with a model (v1/spec_decode/llm_base_proposer.py). In a pause it computes no
    guess, only the keys and values of the tokens that were generated: guesses can go on after any step."""

    def __init__(self, runner: Any, guesses: Callable[[], bool]) -> None:
        """``guesses``: whether the next step proposes tokens. Raises UserError if this vLLM cannot pause."""
        drafter = runner.drafter
        self._propose: Callable[..., Tensor] = drafter.propose
        self._runner, self._drafter = runner, drafter
        self._guesses, self._draws = guesses, TokenDraws(runner)
        self._lengths: list[int] = []  # of prompt and response before the next guess, by row of the batch
        if "num_speculative_tokens" not in signature(self._propose).parameters:
            raise UserError(
                "this version of vLLM cannot stop a model's guesses for a while",
                where="rollout.speculative.method",
                remedy="choose ngram, or install vLLM 0.32",
            )
        drafter.propose = self
        drafter._sample_draft_tokens = self._sample
        # Guesses beyond the longest sequence are computed and not used. vLLM would leave the step's tokens out of the
        # second model's cache, those of all requests (gpu_model_runner.py, _input_fits_in_drafter).
        runner.effective_drafter_max_model_len += runner.num_spec_tokens

    def __call__(self, num_speculative_tokens: int, **given: Any) -> Int64[Tensor, "requests guesses"]:
        """As vLLM's."""
        ends, rejected = given["common_attn_metadata"].seq_lens, given["num_rejected_tokens_gpu"]
        known = ends if rejected is None else ends - rejected
        self._follow_chunks(given["next_token_ids"], known)
        self._lengths = [length + 1 for length in known.tolist()]  # with the token that was just sampled
        return self._propose(num_speculative_tokens=num_speculative_tokens if self._guesses() else 0, **given)

    def _follow_chunks(self, following: Int[Tensor, " requests"], known: Int[Tensor, " requests"]) -> None:
        """Corrects what follows a chunk of a prompt, for which vLLM takes the prompt's last token: a head would keep
        keys and values of it."""
        for row in self._runner.discard_request_mask.np[: len(following)].nonzero()[0]:
            request = self._runner.requests[self._runner.input_batch.req_ids[row]]
            following[row] = request.get_token_id(int(known[row]))

    def _sample(self, hidden_states: Float[Tensor, "requests hidden"], sampling: Any) -> tuple[Tensor, None]:
        """The next guess of each request, in place of vLLM's ``_sample_draft_tokens``."""
        owners = range(len(hidden_states))
        logits = self._drafter.model.compute_logits(hidden_states).float()
        logits = self._draws.cut(logits, sampling, owners)
        tokens = self._draws.draw(logits, sampling, owners, self._lengths)
        self._lengths = [length + 1 for length in self._lengths]
        return tokens, None
