"""Weights of a second model or a head that guesses tokens, kept while the engine sleeps.

A head may use the policy's embedding and LM head (vLLM's v1/spec_decode/llm_base_proposer.py): those are not its own,
and follow the weight sync.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhpc.checkpoint.formats.safetensors_reader import SafetensorsFolder
from rlhpc.core.errors import UserError
from rlhpc.rollout.vllm_weights import LiveWeights, Weights

_TABLES = ("embed_tokens", "lm_head", "shared_head.head")  # that may be the policy's
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class DraftWeights:
    """Weights that guess, on this rank: read once, then kept in CPU memory for each wake."""

    def __init__(self, runner: Any) -> None:
        """``runner``: vLLM's V1 model runner, whose drafter has a model."""
        model, policy = runner.drafter.model, runner.get_model()
        packed = cast("Weights | None", getattr(model, "packed_weights", None))  # on a CPU
        self._weights = packed or LiveWeights(model, runner.model_config.dtype, captured=True, but=policy)
        self._model, self._config = model, runner.speculative_config
        self._kept: dict[str, Tensor] = {}
        # vLLM restores the policy's buffers alone (gpu_worker.py, Worker.wake_up): tables of rotary positions.
        others = {id(own) for own in policy.buffers()}
        self._buffers = {n: own.to("cpu", copy=True) for n, own in model.named_buffers() if id(own) not in others}

    @torch.no_grad()
    def fill(self) -> None:
        """Writes all weights, while their memory is awake. Raises UserError for a folder without them."""
        parameters = self._weights.open()
        if self._kept:
            for name, own in parameters.items():
                own.copy_(self._kept[name])
        else:
            self._read(parameters)
            self._kept = {name: own.to("cpu", copy=True) for name, own in parameters.items()}
        for name, own in self._model.named_buffers():
            if name in self._buffers:
                own.copy_(self._buffers[name])
        self._weights.close()

    def _read(self, parameters: dict[str, Tensor]) -> None:
        """Loads the folder through vLLM's own loader, and finds out what it has not loaded: some do not say."""
        for own in parameters.values():
            own.fill_(torch.nan if own.is_floating_point() else -1)
        folder = Path(self._config.draft_model_config.model)
        try:
            self._weights.fill(self._tensors(folder), complete=False)
        except (ValueError, KeyError, AssertionError) as error:
            raise _refused(folder, f"vLLM cannot load it: {' '.join(str(error).split())}") from error
        for name, own in parameters.items():
            if (own.isnan() if own.is_floating_point() else own < 0).any():
                raise _refused(folder, f"no weights for {name}")

    def _tensors(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Those of the folder that are not the policy's."""
        method = self._config.method
        with SafetensorsFolder(folder) as files:
            for name in files.names():
                if method == "mtp" and not self._is_mtp(name):
                    continue
                if method != "draft_model" and any(table in name for table in self._shared()):
                    continue
                yield name, files.whole(name)

    def _is_mtp(self, name: str) -> bool:
        """True if a tensor of the policy's folder is one of the layers that guess, which are stored after its own."""
        layer = _LAYER.search(name)
        last = self._config.target_model_config.get_total_num_hidden_layers()
        return "mtp" in name or (layer is not None and int(layer[1]) >= last)

    def _shared(self) -> list[str]:
        own = {"embed_tokens": "has_own_embed_tokens", "lm_head": "has_own_lm_head"}
        return [table for table in _TABLES if not getattr(self._model, own.get(table, ""), False)]


def mark_own_tables(model: nn.Module, folder: Path) -> None:
    """Shows vLLM which tables of a head are not the policy's: those in its files. vLLM's own loaders do it as they
    read."""
    if not hasattr(model, "has_own_lm_head"):
        return
    with SafetensorsFolder(folder) as files:
        names = list(files.names())
    found = cast(Any, model)
    found.has_own_embed_tokens = any("embed_tokens" in name for name in names)
    found.has_own_lm_head = hasattr(model, "lm_head") and any("lm_head" in name for name in names)


def _refused(folder: Path, what: str) -> UserError:
    remedy = "use files as they were published; rlhpc run --check compares them"
    return UserError(what, where=str(folder), remedy=remedy)
