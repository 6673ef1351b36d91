"""All-gathers of updated weights over data-parallel ranks, which go on during the next forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel


class WeightGathers:
    """Starts the gathers of all buckets after an update. A layer waits for those of its own weights.

    Megatron's own hooks (distributed_data_parallel.py:383) wait in each module for its own parameters, and miss a
    weight that another module's kernel reads. Others that read weights call ``finish`` before.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], models: Sequence[GPTModel]) -> None:
        self._groups: list[Any] = []  # in the order of the forward pass
        for chunk, model in zip(chunks, models, strict=True):
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                self._adopt(chunk, model)

    def _adopt(self, chunk: DistributedDataParallel, model: GPTModel) -> None:
        chunk.disable_forward_pre_hook(param_sync=False)
        own = [*reversed(chunk.bucket_groups), *reversed(chunk.expert_parallel_bucket_groups)]
        self._groups += own

        def groups_of(params: Iterable[torch.nn.Parameter]) -> list[Any]:
            needed = {id(chunk.param_to_bucket_group[param]) for param in params}
            return [group for group in own if id(group) in needed]

        *layers, last = model.decoder.layers
        embedding = model.embedding.parameters() if model.pre_process else ()
        model.register_forward_pre_hook(functools.partial(_wait, groups_of(embedding)))
        for layer in layers:
            layer.register_forward_pre_hook(functools.partial(_wait, groups_of(layer.parameters())))
        last.register_forward_pre_hook(functools.partial(_wait, own))  # also for norm and head after it

    @property
    def pending(self) -> int:
        """Number of gathers that nothing has waited for."""
        return sum(group.param_gather_handle is not None for group in self._groups)

    def start(self) -> None:
        """After an update. Collective; returns before the weights have arrived."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Waits for all weights."""
        _wait(self._groups)


def _wait(groups: Sequence[Any], *_: Any) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
