"""Shapes of the tensors that a pipeline stage receives, known from the batches: stages do not exchange them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhpc.parallel.compat import replace_shape_exchange
from rlhpc.sharding.layout import ParallelLayout


@contextlib.contextmanager
def known_shapes(
    config: TransformerConfig, layout: ParallelLayout, tokens: Sequence[int], *, forward_only: bool
) -> Iterator[None]:
    """Runs a schedule within it whose microbatches have ``tokens`` on each context-parallel rank."""
    if layout.pp == 1 or not config.variable_seq_lengths:
        yield
        return
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    inputs = iter(received(tokens, layout, wraps=first))
    gradients = iter([] if forward_only else received(tokens, layout, wraps=last))
    cut = layout.tp if config.sequence_parallel else 1

    def shapes(*arguments: Any) -> tuple[list[int], ...]:
        recv_prev, recv_next = arguments[-2:]
        lengths = next(inputs) if recv_prev else 0, next(gradients) if recv_next else 0
        return tuple([length // cut, 1, config.hidden_size] for length in lengths)

    with replace_shape_exchange(shapes):
        yield
    left = len(list(inputs)), len(list(gradients))
    assert left == (0, 0), f"the schedule received {left} inputs and gradients fewer than its table lists"


def received(tokens: Sequence[int], layout: ParallelLayout, *, wraps: bool) -> list[int]:
    """Tokens of each input, or of each gradient of an output, that a stage receives, in their order.

    A stage sends the results of its chunks in the order of the schedule's table (schedules.py:798), for gradients with
    the chunks reversed. ``wraps``: they come from the other end of the pipeline, which sends none of its last chunk.
    """
    chunks = layout.vpp or 1
    table = get_schedule_table(len(tokens), chunks, layout.pp)
    return [tokens[microbatch] for microbatch, chunk in table if not (wraps and chunk == chunks - 1)]
