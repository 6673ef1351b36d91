"""Candidates that each token of a response was sampled from, where vLLM's V1 runner samples.

vLLM's V2 runner (CUDA only) returns them itself (``return_sampling_mask``). Here they are those whose log-prob, as the
sampler returns it after all its cuts, is above -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhpc.api import KeptTokens
from rlhpc.config.rollout import MAX_KEPT
from rlhpc.core.errors import UserError

_MOST = 2 * MAX_KEPT  # more is no set that top_k bounds; equal logits can make it larger than top_k


class KeptRecorder:
    """Stands before the sampler of a V1 model runner, and records what it drew from, by request and position."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample: Callable[..., tuple[Tensor, Tensor | None]] = runner.sampler.topk_topp_sampler.forward
        self.__name__ = getattr(self._sample, "__name__", "")  # by which ``batched_noise`` knows how vLLM samples
        self._kept: dict[str, dict[int, np.ndarray]] = {}  # by request, and length of prompt and response before
        self.ahead: Sequence[int] = ()  # guessed tokens of each row before the one that is drawn next
        runner.sampler.topk_topp_sampler.forward = self

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], generators: Mapping[int, Any], *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As vLLM's TopKTopPSampler."""
        tokens, log_probs = self._sample(logits, generators, *rest)
        if log_probs is not None:
            rows = [row for row in range(len(log_probs)) if row in generators]
            self.record(log_probs[rows] > -torch.inf, rows, [self.ahead[row] for row in rows] if self.ahead else ())
        return tokens, log_probs

    def of(self, request_id: str, first: int, count: int) -> KeptTokens:
        """Candidates of ``count`` tokens of a request, the first one after ``first`` tokens of prompt and
        response."""
        known = self._kept.get(request_id, {})
        nothing = np.zeros(0, np.int32)
        sets = [known.get(place, nothing) for place in range(first, first + count)]
        return KeptTokens(np.concatenate([nothing, *sets]), np.array([len(one) for one in sets], np.int32))

    def forget(self, request_ids: list[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)

    def record(self, kept: Bool[Tensor, "rows vocab"], owners: Sequence[int], ahead: Sequence[int] = ()) -> None:
        """Records sets of tokens of sampled requests. ``owners``: each one's row in the batch; ``ahead``: guessed
        tokens before its token. A wrong guess leaves sets at later positions, which the next tokens replace."""
        batch = self._runner.input_batch
        counts = kept.sum(1).tolist()
        most = min(_MOST, kept.size(1) - 1)
        rows = [row for row in range(len(counts)) if counts[row] <= most]
        places = kept[rows].nonzero()[:, 1].to(torch.int32).cpu().numpy()
        ends = np.cumsum([counts[row] for row in rows], dtype=np.int64)
        for row, tokens in zip(rows, np.split(places, ends)[: len(rows)], strict=True):
            # vLLM appends random digits to a request's id.
            request_id = batch.req_ids[owners[row]].partition("-")[0]
            place = int(batch.num_tokens_no_spec[owners[row]]) + (ahead[row] if ahead else 0)
            self._kept.setdefault(request_id, {})[place] = tokens


class RecordsKeptTokens:
    """Part of a worker with a V1 model runner."""

    model_runner: Any
    _kept: KeptRecorder | None = None

    def record_kept_tokens(self) -> None:
        """Begins to record."""
        if not hasattr(getattr(self.model_runner, "sampler", None), "topk_topp_sampler"):
            raise UserError(
                "this version of vLLM does not return the tokens that one was drawn from, with its V2 model runner",
                where="rollout.sampling.top_k",
                remedy=f"use vLLM 0.28 or later, or a top_k above {MAX_KEPT}, to train the whole distribution",
            )
        self._kept = KeptRecorder(self.model_runner)

    def kept_tokens_of(self, request_id: str, first: int, count: int) -> KeptTokens:
        """See ``KeptRecorder.of``."""
        assert self._kept is not None, "record_kept_tokens() comes first"
        return self._kept.of(request_id, first, count)

    def forget_kept_tokens(self, request_ids: list[str]) -> None:
        """See ``KeptRecorder.forget``."""
        assert self._kept is not None, "record_kept_tokens() comes first"
        self._kept.forget(request_ids)
