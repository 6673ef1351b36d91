"""A second model that guesses tokens: draws them as the policy does, and keeps its weights while the engine sleeps.

It draws with the noise of the policy's own tokens, which depends on the request's seed and the position alone: where
both models have the same distribution, a sampled guess is right, as a greedy one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from rlhpc.checkpoint.formats.safetensors_reader import SafetensorsFolder
from rlhpc.core.errors import UserError
from rlhpc.rollout.token_draws import TokenDraws
from rlhpc.rollout.vllm_weights import LiveWeights, Weights


class DraftGuesser:
    """Stands before a DraftModelProposer of vLLM (v1/spec_decode/draft_model.py). In a pause its model computes no
    guess, only the keys and values of the tokens that were generated: guesses can go on after any step."""

    def __init__(self, runner: Any, guesses: Callable[[], bool]) -> None:
        """``guesses``: whether the next step proposes tokens. Raises UserError if this vLLM cannot pause."""
        drafter = runner.drafter
        self._propose: Callable[..., Tensor] = drafter.propose
        self._drafter, self._guesses, self._draws = drafter, guesses, TokenDraws(runner)
        self._lengths: list[int] = []  # of prompt and response before the next guess, by row of the batch
        if "num_speculative_tokens" not in signature(self._propose).parameters:
            raise UserError(
                "this version of vLLM cannot stop a second model's guesses for a while",
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
        self._lengths = [length + 1 for length in known.tolist()]  # with the token that was just sampled
        return self._propose(num_speculative_tokens=num_speculative_tokens if self._guesses() else 0, **given)

    def _sample(self, hidden_states: Float[Tensor, "requests hidden"], sampling: Any) -> tuple[Tensor, None]:
        """The next guess of each request, in place of vLLM's ``_sample_draft_tokens``."""
        owners = range(len(hidden_states))
        logits = self._drafter.model.compute_logits(hidden_states).float()
        logits = self._draws.cut(logits, sampling, owners)
        tokens = self._draws.draw(logits, sampling, owners, self._lengths)
        self._lengths = [length + 1 for length in self._lengths]
        return tokens, None


class DraftWeights:
    """Weights of the second model on this rank: read once, then kept in CPU memory for each wake."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, folder: Path) -> None:
        packed = cast("Weights | None", getattr(model, "packed_weights", None))  # on a CPU
        self._weights = packed or LiveWeights(model, dtype, captured=True)
        self._model, self._folder = model, folder
        self._kept: dict[str, Tensor] = {}
        # vLLM restores the policy's buffers alone (gpu_worker.py, Worker.wake_up): tables of rotary positions.
        self._buffers = {name: own.to("cpu", copy=True) for name, own in model.named_buffers()}

    @torch.no_grad()
    def fill(self) -> None:
        """Writes all weights, while their memory is awake. Raises UserError for a folder without them."""
        parameters = self._weights.open()
        if self._kept:
            for name, own in parameters.items():
                own.copy_(self._kept[name])
        else:
            self._weights.fill(_tensors(self._folder))
            self._kept = {name: own.to("cpu", copy=True) for name, own in parameters.items()}
        for name, own in self._model.named_buffers():
            own.copy_(self._buffers[name])
        self._weights.close()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with SafetensorsFolder(folder) as files:
        yield from files.whole()
