"""Training back end on megatron-core: one model sharded over ranks, with its optimizer if it is trained.

Shapes of the tensors that a pipeline stage receives are known from the batches: stages do not exchange them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.api import LossFunction, LossSums, PackedBatch, TokenStats, TokenValues, TrainBackend, TrainStats
from rlhpc.backends.megatron.checkpoint import ForkedWrite, ModelCheckpoint
from rlhpc.backends.megatron.experts import biases_of, restore_biases, routers_of, routing_metrics
from rlhpc.backends.megatron.head import policy_stats
from rlhpc.backends.megatron.model import DTYPES, build_chunks, transformer_config
from rlhpc.backends.megatron.optimizer import (
    WeightGathers,
    build_optimizer,
    device_tensors,
    distribute,
    freeze,
    offload_inputs,
    ready_gradients,
    set_rate,
    take_step,
    wrap_chunks,
)
from rlhpc.backends.megatron.packed import LocalBatch, RotaryTable, local_batch
from rlhpc.backends.megatron.weights import ShardedWeights
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import OptimizerSection
from rlhpc.core import spans
from rlhpc.core.heartbeat import enter, touch
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape
from rlhpc.parallel.compat import device, megatron_device, replace_shape_exchange
from rlhpc.parallel.groups import Groups
from rlhpc.parallel.offload import KINDS, Offloader, configured_kinds
from rlhpc.parallel.shared_backend import SharedBackend, all_finite, reduce_metrics
from rlhpc.sharding.context_split import ContextSplit, split_context
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import TensorSpec, model_tensors


def _in_its_groups(method: Callable[..., Any]) -> Callable[..., Any]:
    """Method that runs with the model's own process groups active."""

    @functools.wraps(method)
    def run(self: MegatronBackend, *args: Any, **kwargs: Any) -> Any:
        with self._groups:
            return method(self, *args, **kwargs)

    return run


class MegatronBackend(SharedBackend):
    """Implements ``rlhpc.api.TrainBackend``. Without optimizer settings the model is frozen.

    ``groups``: process groups of a model whose layout differs from that of the active groups.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        info: RankInfo,
        dtype: str,
        settings: ModelSettings,
        groups: Groups | None = None,
    ) -> None:
        trained, offload = settings.optimizer is not None, settings.memory.offload
        self._section, self._groups = settings.optimizer, groups or contextlib.nullcontext()
        self._device = device()
        self.layout, self._coord = layout, layout.coord(info.rank)
        self.meets_in_microbatches = layout.ep * layout.etp > layout.tp * layout.cp
        self._has_experts = shape.experts is not None
        self._kind = TokenValues if shape.head == "value" else TokenStats
        self._rope = RotaryTable(shape, self._device)
        with self._groups, megatron_device():
            self._config = transformer_config(shape, layout, DTYPES[dtype], settings)
            models = build_chunks(shape, layout, self._config)
            self.weights = ShardedWeights(shape, layout, info, models)
            self.models, self._routers = models, routers_of(models)
            self._activations = offload_inputs(models, settings, self._device)
            wrapped = wrap_chunks(self._config, models)
            self._chunks = distribute(self._config, wrapped) if trained else freeze(wrapped)
            self._gathers = WeightGathers(self._chunks, models)
        self.optimizer: Any = None
        self._offload = Offloader(
            configured_kinds(offload, trained=trained),
            offload.fraction,
            lambda kind: device_tensors(self.models, self.optimizer, kind),
            self._gathers.finish,
        )

    @property
    def shape(self) -> ModelShape:
        """See ``TrainBackend``."""
        return self.weights.shape

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """See ``TrainBackend``."""
        return model_tensors(self.weights.shape)

    @_in_its_groups
    def load_pretrained(self, folder: Path) -> None:
        """See ``TrainBackend``; a critic may start from a checkpoint of a model without value head."""
        enter("loading the model")
        self._offload.restore("parameters")
        with self._timed():
            self.weights.load(folder)
        self.reset_optimizer()

    @_in_its_groups
    def copy_weights(self, source: TrainBackend) -> None:
        """See ``TrainBackend``."""
        assert isinstance(source, MegatronBackend)
        self._offload.restore("parameters")
        source._offload.restore("parameters")
        for mine, theirs in zip(self.models, source.models, strict=True):
            mine.load_state_dict(theirs.state_dict(), strict=False)

    @_in_its_groups
    def reset_optimizer(self, section: OptimizerSection | None = None) -> None:
        """See ``TrainBackend``."""
        if self._section is None:
            return
        self._section = section or self._section
        self._drop_optimizer()  # first: memory does not suffice for two
        self._offload.restore(*KINDS)
        with megatron_device():
            self.optimizer = build_optimizer(self._section, self._config, self._chunks)

    def _drop_optimizer(self) -> None:
        self.optimizer = self._config.grad_scale_func = None
        self._offload.drop("optimizer")
        gc.collect()  # Megatron's optimizers contain reference cycles

    @_in_its_groups
    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """See ``TrainBackend``."""
        return self._evaluate(batches, temperature)

    @_in_its_groups
    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """See ``TrainBackend``."""
        assert self._kind is TokenValues, "the model has no value head"
        return self._evaluate(batches, temperature=1.0)

    def _evaluate(self, batches: Sequence[PackedBatch], temperature: float) -> list[Any]:
        def collect(batch: PackedBatch, local: LocalBatch, output: Tensor, **_: Any) -> Any:
            return self._stats(output, batch, local, temperature)

        with torch.no_grad():
            stats = self._run(batches, collect, forward_only=True, collect_non_loss_data=True)
        return self._from_last_stage(stats, batches)

    @_in_its_groups
    def train(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        denominator: float,
        temperature: float,
        rate: float,
        skip_above: float = math.inf,
    ) -> TrainStats:
        """See ``TrainBackend``."""
        biases = biases_of(self._routers)
        stats = self._differentiate(batches, loss, denominator, temperature)
        if not math.isfinite(stats.grad_norm) or stats.grad_norm > skip_above:
            restore_biases(self._routers, biases)
            return stats
        set_rate(self.optimizer, rate, self._section.weight_decay)
        with megatron_device():
            take_step(self.optimizer, stats.grad_norm, self._gathers)
        return replace(stats, applied=True)

    @_in_its_groups
    def differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """See ``TrainBackend``."""
        biases = biases_of(self._routers)
        stats = self._differentiate(batches, loss, denominator, temperature)
        restore_biases(self._routers, biases)
        return stats

    def _differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """Prepares the gradients for the optimizer; returns the stats of an update that is not applied yet."""

        def differentiate(
            batch: PackedBatch, local: LocalBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            sums: LossSums = loss(self._stats(output, batch, local, temperature), batch)
            no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
            return sums.total / denominator, no_tokens, sums.metrics

        self._offload.restore(*KINDS, settled=False)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._weigh_aux_losses(batches)
        metrics = self._run(batches, differentiate, forward_only=False)
        with megatron_device():
            norm = ready_gradients(self.optimizer)
        gauges = routing_metrics(self._routers, self._config.moe_router_topk) if self._has_experts else {}
        for router in self._routers:
            router.counts.zero_()
        return TrainStats(norm, self._reduce_metrics(metrics), gauges, applied=False)

    @_in_its_groups
    def has_finite_weights(self) -> bool:
        """See ``TrainBackend``."""
        self._offload.restore("parameters")
        return all_finite(self.weights.parameters(), self._device)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See ``TrainBackend``."""
        self._offload.restore("parameters")
        return self.weights.full_tensors()

    def settle(self) -> None:
        """See ``TrainBackend``."""
        self._gathers.finish()

    @_in_its_groups
    def save(self, folder: Path, step: int = 0, *, asynchronous: bool = False) -> ForkedWrite | None:
        """See ``TrainBackend``. In Megatron's torch_dist format, which any layout can load."""
        self._offload.restore("optimizer", "parameters")
        return self._checkpoint.save(folder, step, asynchronous=asynchronous)

    @_in_its_groups
    def load(self, folder: Path) -> None:
        """See ``TrainBackend``."""
        self._offload.restore("optimizer", "parameters")
        with self._timed():
            self._checkpoint.load(folder)

    @property
    def _checkpoint(self) -> ModelCheckpoint:
        return ModelCheckpoint(self.shape, self.layout, self.models, self.optimizer)

    def _stats(
        self, output: Float[Tensor, "1 L H"], batch: PackedBatch, local: LocalBatch, temperature: float
    ) -> TokenStats | TokenValues:
        """Head's output for the whole batch: values of all tokens, or stats of those trained on and 0 elsewhere."""
        if self._kind is TokenValues:
            return TokenValues(local.gather(output[0, :, 0], parallel_state.get_context_parallel_group()))
        return policy_stats(self.models[-1], output[0], batch, local, self.weights.shape.vocab_size, temperature)

    def _run(
        self, batches: Sequence[PackedBatch], finish: Callable[..., Any], *, forward_only: bool, **options: Any
    ) -> list[Any]:
        """Runs the pipeline schedule over the microbatches; results of ``finish`` for each, on the last stage."""
        self._offload.restore("parameters", settled=False)
        padded = self._whole_rounds(batches)
        spans.worked(sum(len(batch.tokens) for batch in padded))

        def forward_step(
            batches: Iterator[tuple[PackedBatch, ContextSplit]], chunk: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            touch("backward and forward" if not forward_only else "forward")
            batch, split = next(batches)
            batch = batch.to(self._device)
            local = local_batch(batch, split, self._coord["cp"], self._rope, router_part)
            output = chunk(local.tokens[None], local.positions[None], None, packed_seq_params=local.params, **wrapper)
            return output, functools.partial(finish, batch, local)

        # Under sequence parallelism this rank's routers see one part of the local tokens.
        router_part = (self._coord["tp"], self.layout.tp) if self._config.sequence_parallel else (0, 1)
        # Half-precision hidden states stay half-precision: the wrapper would copy them to float32.
        wrapper = {"fp32_output": False} if self._config.bf16 else {}
        splits = self._splits(padded)
        iterators = [iter(list(zip(padded, splits, strict=True))) for _ in self._chunks]
        several, tokens = len(self._chunks) > 1, [split.local_tokens for split in splits]
        with megatron_device(), known_shapes(self._config, self.layout, tokens, forward_only=forward_only):
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if several else iterators[0],
                model=self._chunks if several else self._chunks[0],
                num_microbatches=len(padded),
                seq_length=self.layout.cp * max(tokens),
                micro_batch_size=1,
                forward_only=forward_only,
                **options,
            )
        return results[: len(batches)]

    def _weigh_aux_losses(self, batches: Sequence[PackedBatch]) -> None:
        """Sets the routers' weight of auxiliary losses: 1 / tokens of all ranks' batches without blank ones."""
        if not self._config.moe_aux_loss_coeff:
            return
        own = sum(len(batch.tokens) for batch in batches if not batch.is_blank)
        tokens = torch.tensor(float(own), device=self._device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        for router in self._routers:
            router.aux_weight = 1.0 / max(1.0, float(tokens))

    def _whole_rounds(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches, and for interleaved stages blank ones that fill the last round of pp microbatches."""
        missing = -len(batches) % self.layout.pp if self.layout.vpp else 0
        return [*batches, *[batches[0].blank(1) for _ in range(missing)]]

    def _splits(self, batches: Sequence[PackedBatch]) -> list[ContextSplit]:
        """Split of each batch over cp. Expert dispatch by all-gather needs equal lengths on all ranks."""
        lengths = [batch.cu_seqlens.diff().tolist() for batch in batches]
        cp, align = self.layout.cp, self.layout.tp if self._config.sequence_parallel else 1
        splits = [split_context(batch_lengths, cp, align) for batch_lengths in lengths]
        if self._config.moe_token_dispatcher_type != "allgather" or self._config.num_moe_experts is None:
            return splits
        least = torch.tensor(max(split.local_tokens for split in splits), device=self._device)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(least, op=dist.ReduceOp.MAX, group=group)
        return [split_context(batch_lengths, cp, align, int(least)) for batch_lengths in lengths]

    def _from_last_stage(self, stats: list[Any], batches: Sequence[PackedBatch]) -> list[Any]:
        """Broadcasts the last pipeline stage's results to every stage."""
        if self.layout.pp == 1:
            return stats
        lengths = [len(batch.tokens) for batch in batches]
        names = [field.name for field in fields(self._kind)]
        if stats:
            flat = torch.stack([torch.cat([getattr(s, name) for s in stats]) for name in names])
        else:
            flat = torch.empty(len(names), sum(lengths), device=self._device)
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return [self._kind(*part) for part in flat.split(lengths, dim=1)]

    def _reduce_metrics(self, metrics: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums, or maxima of metrics named so, over microbatches and data-parallel ranks; on every rank."""
        reduced = reduce_metrics(metrics, self._device, parallel_state.get_data_parallel_group())
        if self.layout.pp > 1:
            shared = [reduced]
            group = parallel_state.get_pipeline_model_parallel_group()
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(shared, src=last, group=group, device=self._device)
            (reduced,) = shared
        return reduced


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
