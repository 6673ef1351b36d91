"""Speculative decoding that changes no token: an engine computes several guessed tokens of a response in one step.

A guess is accepted iff it is the token that would be drawn without it: noise depends on the request's seed and the
token's position alone (``token_seeds``). A guessed token that was sure is thus accepted as often as by rejection
sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192), and the first token that differs from its guess is
the right one at its place. vLLM's own sampler draws other numbers for guesses: its tokens have the same distribution,
but differ with and without guesses, and by what else is in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from rlhpc.config.rollout import SpeculativeSection
from rlhpc.core.errors import UserError
from rlhpc.rollout.draft_model import DraftGuesser
from rlhpc.rollout.draft_weights import DraftWeights
from rlhpc.rollout.kept_tokens import KeptRecorder
from rlhpc.rollout.token_draws import TokenDraws

# Guesses over which the accepted fraction is taken: at the default minimum of 0.25 its standard error is 0.04.
WINDOW = 128
# Tokens generated without guesses when too few were right: a window is less than a hundredth of them.
PAUSE = 16_384
_LONGEST_PAUSE = 16  # times the first
_PLACEHOLDER = -1  # vLLM's, of a rejected guess


@dataclass
class GuessCounts:
    """Tokens in a time. ``steps``: those of requests that had guesses."""

    guessed: int = 0
    accepted: int = 0
    steps: int = 0
    generated: int = 0  # of all requests, with the guesses that were accepted
    paused: int = 0  # of these, while the engine did not guess


@dataclass
class Speculation:
    """True if an engine guesses. Stops for a while where too few guesses are accepted; a function of token counts
    alone, so that all ranks of an engine decide alike."""

    section: SpeculativeSection
    window: int = WINDOW
    pause: int = PAUSE
    counts: GuessCounts = field(default_factory=GuessCounts)  # since they were last taken
    _guessed: int = 0  # in the present window
    _accepted: int = 0
    _pause: int = 0  # tokens that are still generated without guesses
    _length: int = 0  # of the last pause

    @property
    def guesses(self) -> bool:
        """True if the next step proposes tokens."""
        return self._pause <= 0

    def generated(self, tokens: int) -> None:
        """Counts tokens of a step, accepted guesses included."""
        self.counts.generated += tokens
        if self._pause > 0:
            self.counts.paused += tokens
            self._pause -= tokens

    def verified(self, guessed: int, accepted: int, requests: int) -> None:
        """Counts the guesses of a step, of so many requests."""
        self.counts.guessed += guessed
        self.counts.accepted += accepted
        self.counts.steps += requests
        if self._pause > 0:  # guessed before it
            return
        self._guessed += guessed
        self._accepted += accepted
        if self._guessed < self.window:
            return
        pays = self._accepted >= self.section.min_acceptance * self._guessed
        self._guessed = self._accepted = 0
        longest = _LONGEST_PAUSE * self.pause
        self._length = 0 if pays else min(max(self.pause, 2 * self._length), longest)
        self._pause = self._length

    def restart(self) -> None:
        """Guesses again: other weights may accept more. A run that resumes begins like this too."""
        self._guessed = self._accepted = self._pause = self._length = 0

    def take(self) -> GuessCounts:
        """Counts since the last call."""
        taken, self.counts = self.counts, GuessCounts()
        return taken


class Guesser:
    """Stands before the ``propose`` of a V1 runner's drafter, and proposes nothing in a pause."""

    def __init__(self, runner: Any, speculation: Speculation) -> None:
        self._propose: Callable[..., list[list[int]]] = runner.drafter.propose
        self._speculation = speculation
        runner.drafter.propose = self

    def __call__(self, *arguments: Any, **more: Any) -> list[list[int]]:
        """As vLLM's. It has the tokens that were just sampled, one list for each request, among its arguments."""
        if not self._speculation.guesses:
            return [[] for _ in next(given for given in arguments if isinstance(given, list))]
        return self._propose(*arguments, **more)


class Verifier:
    """In place of a V1 runner's rejection sampler (vllm/v1/sample/rejection_sampler.py)."""

    def __init__(self, runner: Any, speculation: Speculation) -> None:
        self._runner, self._speculation = runner, speculation
        self._original = runner.rejection_sampler
        self._sampler = self._original.sampler
        self._draws = TokenDraws(runner)
        runner.rejection_sampler = self

    def __call__(
        self, metadata: Any, draft_probs: Tensor | None, logits: Float[Tensor, "rows vocab"], sampling: Any
    ) -> Any:
        """Tokens of each request and their log-probs, as vLLM's; rows beyond the last guesses are the next tokens'."""
        from vllm.v1.outputs import SamplerOutput

        counts: list[int] = metadata.num_draft_tokens
        if not any(counts):  # every step comes here
            self._speculation.generated(len(counts) - self._discarded(len(counts)))
            return self._sampler(logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling)
        forward = self._sampler.topk_topp_sampler.forward
        recorder = forward if isinstance(forward, KeptRecorder) else None
        if recorder is not None:
            recorder.ahead = counts
        following = self._sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=replace(_after_guesses(sampling, counts), max_num_logprobs=-1),
            predict_bonus_token=True,
            logprobs_mode_override="processed_logits",
        )
        if recorder is not None:
            recorder.ahead = ()
        owners = [row for row, count in enumerate(counts) for _ in range(count)]
        places = [place for count in counts for place in range(count)]
        guessed = logits[metadata.target_logits_indices].float()
        processed = self._original.apply_logits_processors(guessed, sampling, metadata)
        processed = self._draws.cut(processed, sampling, owners)
        drawn = self._draws.draw(processed, sampling, owners, self._lengths(owners, places))
        if recorder is not None:
            rows = [row for row, owner in enumerate(owners) if owner in sampling.generators]
            recorder.record(processed[rows] > -torch.inf, [owners[row] for row in rows], [places[row] for row in rows])
        found = accepted_guesses(drawn, metadata.draft_token_ids, following.sampled_token_ids[:, 0], counts)
        self._count(found, counts)
        log_probs = None
        if sampling.max_num_logprobs is not None:
            log_probs = self._original._get_logprobs_tensors(
                sampling.max_num_logprobs, metadata, logits, processed, following.logprobs_tensors.logprobs, found
            )
        return SamplerOutput(sampled_token_ids=found, logprobs_tensors=log_probs)

    def _lengths(self, owners: Sequence[int], places: Sequence[int]) -> list[int]:
        """Tokens of prompt and response before each guess."""
        known = self._runner.input_batch.num_tokens_no_spec
        return [int(known[owner]) + place for owner, place in zip(owners, places, strict=True)]

    def _discarded(self, requests: int) -> int:
        """Number of a step's first requests that yield no token: their prompt continues in the next step."""
        return int(self._runner.discard_request_mask.np[:requests].sum())

    def _count(self, found: Int64[Tensor, "requests most"], counts: Sequence[int]) -> None:
        tokens = (found != _PLACEHOLDER).sum(1).tolist()
        accepted = sum(number - 1 for number, count in zip(tokens, counts, strict=True) if count)
        self._speculation.verified(sum(counts), accepted, sum(count > 0 for count in counts))
        self._speculation.generated(sum(tokens) - self._discarded(len(counts)))


def _after_guesses(sampling: Any, counts: Sequence[int]) -> Any:
    """Metadata for the tokens after all guesses. vLLM does not count these towards ``min_tokens``, and would forbid to
    end a response that has reached them."""
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

    processors = copy(sampling.logitsprocs)
    processors.non_argmax_invariant = list(processors.non_argmax_invariant)
    for place, processor in enumerate(processors.non_argmax_invariant):
        if isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
            processors.non_argmax_invariant[place] = later = copy(processor)
            later.min_toks = {
                row: (least, range(len(output) + counts[row]), *rest)
                for row, (least, output, *rest) in processor.min_toks.items()
            }
            later.update_state(None)
    return replace(sampling, logitsprocs=processors)


def accepted_guesses(
    drawn: Int64[Tensor, " guesses"], guessed: Tensor, following: Tensor, counts: Sequence[int]
) -> Int64[Tensor, "requests most"]:
    """Tokens of each request: the drawn ones up to the first that is not its guess, and ``following`` if there is
    none; the rest is vLLM's placeholder."""
    most = max(counts)
    inside = torch.arange(most)[None, :] < torch.tensor(counts)[:, None]
    inside = inside.to(drawn.device)
    tokens = torch.full((len(counts), most + 1), _PLACEHOLDER, dtype=torch.int32, device=drawn.device)
    equal: Bool[Tensor, "requests most"] = torch.zeros_like(inside)
    tokens[:, :-1][inside] = drawn.to(torch.int32)
    equal[inside] = drawn == guessed
    leading = equal.long().cumprod(1).sum(1)
    places = torch.arange(most + 1, device=drawn.device)[None, :]
    ends = torch.tensor(counts, device=drawn.device)
    tokens[torch.arange(len(counts), device=drawn.device), ends] = following.to(torch.int32)
    return tokens.masked_fill_(places > leading[:, None], _PLACEHOLDER)


class Speculates:
    """Part of a worker with a V1 model runner."""

    model_runner: Any
    _speculation: Speculation | None = None
    _draft: DraftWeights | None = None  # of a second model or a head
    _config: Any = None  # vLLM's

    def load_model(self, **options: Any) -> None:
        """Raises UserError for a policy whose hidden states vLLM does not give to a head."""
        try:
            super().load_model(**options)  # type: ignore[misc]
        except RuntimeError as error:
            if "EAGLE3 interface" not in str(error):  # gpu_model_runner.py, _setup_eagle3_aux_hidden_state_outputs
                raise
            raise UserError(
                "vLLM returns no hidden states of this model to a head of eagle3",
                where="rollout.speculative.method",
                remedy="use a head of eagle, or another method",
            ) from error

    def speculate(self, section: SpeculativeSection) -> None:
        """Begins to guess so that no token changes. Raises UserError if the runner cannot."""
        runner = self.model_runner
        if not hasattr(runner, "rejection_sampler") or not hasattr(runner, "input_batch"):
            raise UserError(
                "this version of vLLM has no V1 model runner, with which guesses change no token",
                where="rollout.speculative",
                remedy="leave it out",
            )
        self._speculation, self._config = Speculation(section), runner.speculative_config
        if section.by_network:
            DraftGuesser(runner, lambda: self._speculation is None or self._speculation.guesses)
            self._draft = DraftWeights(runner)
        else:
            Guesser(runner, self._speculation)
        Verifier(runner, self._speculation)

    def rest_in_pause(self, scheduler_output: Any) -> None:
        """Before a step: in a pause the runner works as one that never guesses, which saves some percent of a small
        model's step. Not with a second model or a head, whose KV cache takes every token, nor with layers of recurrent
        state, which keep theirs as for guesses."""
        if self._speculation is None or self._draft is not None or self.model_runner.model_config.is_hybrid:
            return
        rests = not self._speculation.guesses and not scheduler_output.scheduled_spec_decode_tokens
        self.model_runner.speculative_config = None if rests else self._config
        if rests:
            self._speculation.generated(len(scheduler_output.num_scheduled_tokens))

    def restart_speculation(self) -> None:
        """See ``Speculation.restart``."""
        if self._speculation is not None:
            self._speculation.restart()

    def take_guess_counts(self) -> Mapping[str, int]:
        """Counts since the last call."""
        assert self._speculation is not None, "speculate() comes first"
        return vars(self._speculation.take())

    def wake_draft(self, tags: Sequence[str] | None) -> None:
        """After a wake of what ``tags`` name, None for all: the weights that guess are as in their folder."""
        if self._draft is not None and (tags is None or "weights" in tags):
            self._draft.fill()
