"""Requests as vLLM has them: parameters, tokens so far, order, preemption, cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhpc.api import Completion, Request

_LARGEST_TOP_K = 1 << 30  # vLLM takes the whole vocabulary


class InFlight:
    """Requests that vLLM's scheduler runs or queues, by the keys with which they were submitted."""

    def __init__(self, engine: Any) -> None:
        """``engine``: vLLM's, in this process."""
        self._engine, self._core = engine, engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._syncs = 0  # weight syncs beside requests that kept their KV cache

    @property
    def salt(self) -> str | None:
        """Distinguishes cached prefixes of the present weights from those of older ones."""
        return str(self._syncs) if self._syncs else None

    def states(self) -> dict[int, Any]:
        """vLLM's state of each request's tokens, by key."""
        return {int(state.external_req_id): state for state in self._engine.output_processor.request_states.values()}

    def order(self) -> list[int]:
        """Keys of running requests, then of waiting ones, each in the scheduler's order."""
        self.check_settled()
        keys = {name: int(s.external_req_id) for name, s in self._engine.output_processor.request_states.items()}
        found = [keys[request.request_id] for request in (*self._scheduler.running, *self._scheduler.waiting)]
        assert len(found) == len(keys), f"{len(keys)} requests, of which vLLM's scheduler has {len(found)}"
        return found

    def is_computed(self, state: Any, tokens: int) -> bool:
        """True if the KV cache holds a request's first ``tokens`` tokens; not while it is preempted or recomputed."""
        return int(self._scheduler.requests[state.request_id].num_computed_tokens) >= tokens

    def drain(self) -> list[Any]:
        """Waits for the step in flight on the device, if any, and schedules no other; returns requests that end."""
        from vllm.v1.core.sched.interface import PauseState

        ended: list[Any] = []
        if self._core.batch_queue:
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while self._core.batch_queue:
                ended += self._engine.step()
            self._scheduler.set_pause_state(PauseState.UNPAUSED)
        return ended

    def check_settled(self) -> None:
        assert not self._core.batch_queue, "a step is in flight on the device: settle() comes first"

    def preempt(self) -> list[int]:
        """Returns running requests to the head of the queue, in order, and empties the prefix cache; their keys."""
        running = self.order()[: len(self._scheduler.running)]
        assert self._engine.reset_prefix_cache(reset_running_requests=True), "blocks of the KV cache are still in use"
        self._salt_requests()
        return running

    def forget_prefixes(self) -> None:
        """After a weight sync: drops cached prefixes, or keeps them from all requests if some still use theirs."""
        if self._scheduler.running:
            self._syncs += 1
            self._salt_requests()
        else:
            assert self._engine.reset_prefix_cache(), "requests still use cached prefixes of the old weights"

    def _salt_requests(self) -> None:
        """Gives waiting requests the present salt. A running one, whose cache contains older weights' blocks, gets its
        own: no other request uses its later blocks, and it does not use its older ones if it is preempted."""
        for key, request in zip(self.order(), (*self._scheduler.running, *self._scheduler.waiting), strict=True):
            running = request.num_computed_tokens > 0
            salt = f"{self.salt}.{key}" if running else self.salt
            if request.cache_salt != salt:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()


def sampling_parameters(request: Request, end_tokens: Sequence[int], *, bounded: bool = False) -> Any:
    """vLLM's parameters of a request. ``bounded``: the engine returns kept tokens itself, and therefore refuses greedy
    requests and those without top_k (v1/engine/input_processor.py)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options, form = request.options, request.options.structured_output
    top_k, temperature = options.top_k or 0, request.temperature
    if bounded and temperature == 0:
        top_k, temperature = 1, 1.0  # the same token
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=temperature,
        top_p=request.top_p,
        top_k=_LARGEST_TOP_K if bounded and top_k == 0 else top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias) or None,
        bad_words=list(options.bad_words) or None,
        structured_outputs=None if form is None else _structured(*form),
        min_tokens=options.min_tokens,
        seed=request.seed,
        ignore_eos=True,  # of the model folder; only our end tokens count
        stop_token_ids=[*end_tokens, *options.stop_token_ids],
        stop=list(options.stop) or None,
        include_stop_str_in_output=True,  # a response is its tokens, of which it never loses any
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(options.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # this object is not shared
    )


def refusals() -> tuple[type[Exception], ...]:
    """Errors that vLLM raises for a request with parameters that it does not take; in 0.32 no ValueError."""
    import vllm.exceptions

    return ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError)


def _structured(kind: str, form: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: form})


def generated(state: Any, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of a request's state, from the token ``first`` on."""
    tokens = np.asarray(state.detokenizer.output_token_ids[first:], dtype=np.int32)
    log_probs = np.asarray(state.logprobs_processor.logprobs.logprobs[first:], dtype=np.float32)
    assert tokens.shape == log_probs.shape
    return tokens, log_probs


def completion_of(output: Any, **details: Any) -> Completion:
    """Completion of a finished request, from vLLM's output; ``details``: its further fields."""
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    completion = Completion(
        tokens=np.asarray(output.token_ids, dtype=np.int32),
        log_probs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        truncated=output.finish_reason == "length",
        **details,
    )
    assert completion.tokens.shape == completion.log_probs.shape
    return completion
