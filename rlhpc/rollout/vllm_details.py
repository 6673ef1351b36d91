"""Details of a response beside tokens and log-probs: routed experts, kept tokens, the text that ended it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhpc.api import KeptTokens, Request
from rlhpc.config.rollout import MAX_KEPT


class ResponseDetails:
    """Reads them from vLLM's outputs where vLLM has them, else from this package's recorders in its worker."""

    def __init__(self, engine: Any, *, expert_layers: Sequence[int], kept: bool, on_gpu: bool) -> None:
        """``expert_layers``: of which routed experts are wanted; ``kept``: kept tokens are."""
        self._engine, self._expert_layers, self._on_gpu = engine, list(expert_layers), on_gpu
        self._masked = kept and bool(getattr(engine.model_config, "return_sampling_mask", False))
        self._records_kept = kept and not self._masked
        self._cut: set[int] = set()  # requests whose kept tokens are trained on: an engine also has others'
        self._untrained_stops: set[int] = set()  # requests whose stop texts are not trained on
        if self._expert_layers and not on_gpu:
            engine.collective_rpc("record_routed_experts")
        if self._records_kept:
            engine.collective_rpc("record_kept_tokens")

    def begin(self, key: int, request: Request) -> None:
        """Notes a new request."""
        if request.temperature > 0 and 0 < (request.options.top_k or 0) <= MAX_KEPT:
            self._cut.add(key)
        if request.options.stop and not request.options.train_on_stop:
            self._untrained_stops.add(key)

    def of_finished(self, output: Any) -> dict[str, Any]:
        """Further fields of a finished request's completion."""
        (response,), prompt = output.outputs, len(output.prompt_token_ids)
        found: dict[str, Any] = {"routed_experts": self._routed_experts(output)}
        if self._masked and int(output.request_id) in self._cut:
            found["kept"] = _joined(response.sampling_mask)
        elif self._records_kept and int(output.request_id) in self._cut:
            found["kept"] = self._recorded_kept(output.request_id, prompt, len(response.token_ids))
        if int(output.request_id) in self._untrained_stops and isinstance(response.stop_reason, str):
            decode = self._engine.tokenizer.decode
            found["stop_tokens"] = tokens_of_end(decode, response.token_ids, response.stop_reason)
        return found

    def so_far(self, state: Any, first: int, count: int, *, computed: Callable[[Any, int], bool]) -> dict[str, Any]:
        """Those of ``count`` tokens from ``first`` on, of a request in flight; routed experts from the prompt on, and
        without them on a GPU. ``computed``: whether the KV cache holds a request's first tokens."""
        prompt, cut = len(state.prompt_token_ids), int(state.external_req_id) in self._cut
        found: dict[str, Any] = {}
        if self._masked and cut:
            chunks = [one for chunk in state.sampling_mask_chunks for one in chunk.to_nested_list()]
            found["kept"] = _joined(chunks[first : first + count])
        elif self._records_kept and cut:
            found["kept"] = self._recorded_kept(state.external_req_id, prompt + first, count)
        inputs = prompt + first + count - 1  # the last sampled token has not been one yet
        if count and self._expert_layers and not self._on_gpu and computed(state, inputs):
            found["routed_experts"] = self._recorded_experts(state.external_req_id, inputs)
        return found

    def end(self, keys: Sequence[int]) -> None:
        """Forgets requests."""
        self._untrained_stops.difference_update(keys)
        self._cut.difference_update(keys)
        if self._records_kept and keys:
            self._engine.collective_rpc("forget_kept_tokens", args=([str(key) for key in keys],))

    def _routed_experts(self, output: Any) -> np.ndarray | None:
        if not self._expert_layers:
            return None
        if self._on_gpu:
            return _routed_on_gpu(output, self._expert_layers)
        return self._recorded_experts(
            output.request_id, len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        )

    def _recorded_experts(self, request_id: str, tokens: int) -> np.ndarray:
        found: np.ndarray = self._engine.collective_rpc("routed_experts_of", args=(request_id, tokens))[0]
        return found

    def _recorded_kept(self, request_id: str, first: int, count: int) -> KeptTokens:
        found: KeptTokens = self._engine.collective_rpc("kept_tokens_of", args=(request_id, first, count))[0]
        return found


def tokens_of_end(decode: Callable[[list[int]], str], tokens: Sequence[int], end: str) -> int:
    """Number of the last tokens that a text at the end of ``tokens`` is of."""
    counts = range(1, len(tokens) + 1)
    return next((count for count in counts if end in decode(list(tokens[-count:]))), len(tokens))


def _joined(sets: Sequence[Sequence[int]] | None) -> KeptTokens:
    """From vLLM's SamplingMask."""
    parts = [np.asarray(one, np.int32) for one in sets or ()]
    counts = np.array([len(part) for part in parts], np.int32)
    return KeptTokens(np.concatenate([np.zeros(0, np.int32), *parts]), counts)


def _routed_on_gpu(output: Any, layers: Sequence[int]) -> np.ndarray:
    """Routed experts of vLLM's own recorder, which counts all layers."""
    routed_experts: np.ndarray = output.outputs[0].routed_experts[:, list(layers)]
    return routed_experts if routed_experts.dtype == np.uint8 else routed_experts.astype(np.int16)
