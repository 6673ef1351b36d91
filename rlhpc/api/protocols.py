"""The interfaces between the trainer, a training back end, a rollout engine and reward workers. Every call is
collective over the ranks that share the object's model unless stated otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from rlhpc.api.types import (
    Completion,
    LossSums,
    PackedBatch,
    Prompt,
    Request,
    RewardResult,
    TokenStats,
    TokenValues,
    TrainStats,
    UnusableTruth,
)
from rlhpc.config.training import OptimizerSection
from rlhpc.models import ModelDescription
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard, TensorSpec

# From the output of the model's head for each token, and the batch.
LossFunction = Callable[[TokenStats, PackedBatch], LossSums] | Callable[[TokenValues, PackedBatch], LossSums]
# On an engine's parameters, by their names, after a load.
CheckWeights = Callable[[Mapping[str, Tensor]], None]


class BackgroundWrite(Protocol):
    """A part of a checkpoint that is being written."""

    def done(self) -> bool:
        """Whether this rank's share is written or has failed. Not collective."""

    def finish(self) -> None:
        """Waits for the end; raises OSError on every rank if a share could not be written."""


class TrainBackend(Protocol):
    """A model sharded over ranks, with its optimizer if it is trained. A frozen model (a reference, a reward model) has
    no optimizer, and is never passed to ``train`` or ``differentiate``."""

    @property
    def shape(self) -> ModelDescription:
        """The model's architecture."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Every weight, by HuggingFace's name, in the order of ``full_tensors``."""

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout that the model is sharded by."""

    @property
    def meets_in_microbatches(self) -> bool:
        """Whether ranks with other data wait for each other in every microbatch, as those of experts or FSDP do."""

    @property
    def read_seconds(self) -> float:
        """Seconds that this rank has spent in reading weights and checkpoints from files."""

    def shards(self) -> Sequence[Shard]:
        """The shards of the weights that this rank holds. Not collective."""

    def layers(self) -> Iterator[tuple[int, Module]]:
        """The transformer layers that this rank holds, by their numbers from 0 in the model."""

    def load_pretrained(self, folder: Path) -> None:
        """Loads weights from a HuggingFace folder or a checkpoint of ``save``, and resets the optimizer."""

    def take_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads whole tensors by HuggingFace's names, from a model in any layout, and resets the optimizer."""

    def copy_weights(self, source: TrainBackend) -> None:
        """Copies the weights of another model of the same back end, shape and layout."""

    def reset_optimizer(self, section: OptimizerSection | None = None) -> None:
        """Starts a new optimizer from the present weights: no moments, step count 0; by ``section`` if given."""

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """Log-probs and entropy of each batch's targets at logits / temperature, without gradient."""

    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """The value head's output for each token, without gradient."""

    def train(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        denominator: float,
        temperature: float,
        rate: float,
        skip_above: float = math.inf,
    ) -> TrainStats:
        """One optimizer update on the sum of ``loss(...).total`` over all ranks' batches, divided by ``denominator``.

        Every data-parallel rank passes the same number of batches. If the gradient norm is not finite or exceeds
        ``skip_above``, the update is skipped on all ranks: weights and optimizer state stay bit-equal.
        """

    def differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """Forward and backward of ``train`` without the update, for a replay."""

    def has_finite_weights(self) -> bool:
        """Whether every weight of every rank is finite. Collective over all ranks."""

    def view(self, shard: Shard) -> Tensor:
        """This rank's live weights of a shard, with the tensor's own number of dimensions."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by HuggingFace's name, on every rank: the plain path, one tensor at a time."""

    def settle(self) -> None:
        """Waits for what an update has left in flight, such as gathers of its weights."""

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Releases device memory as configured. Later calls restore what they need."""

    def save(self, folder: Path, step: int = 0, *, asynchronous: bool = False) -> BackgroundWrite | None:
        """Writes weights and optimizer state after ``step`` into an existing empty folder, each rank its own shards.

        ``asynchronous``: returns before they are written, with a handle to wait on. Training may continue meanwhile
        without changing what is written.
        """

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit."""


class RewardWorkers(Protocol):
    """Scores responses beside the engine: on the first rank of each engine, in processes of its own."""

    def unusable_truths(self, truths: Sequence[tuple[str, Any]]) -> list[UnusableTruth]:
        """Ground truths, each after its data source, that a function's check refuses, among them the first of each
        function; and all whose check did not finish."""

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begins to score a response; returns at once."""

    def results(self) -> dict[int, RewardResult]:
        """Results of every submitted response that were not returned before, by key; waits for them."""

    def ready(self) -> dict[int, RewardResult]:
        """Results that arrived and were not returned before, by key; does not wait."""

    def close(self) -> None:
        """Ends the processes, at the end of the run."""


class RolloutEngine(Protocol):
    """An inference engine in this process; the ranks of one engine make the same calls."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; equal on all ranks of the engine."""

    def submit(self, key: int, request: Request) -> None:
        """Adds a request; ``step`` reports its completion by ``key``."""

    def step(self) -> list[tuple[int, Completion]]:
        """Samples the next token of each request in flight; returns the requests that finish with it."""

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        """Withdraws requests; returns what each has generated so far. If others remain, no step may be in flight on the
        device (``settle``)."""

    def settle(self) -> list[tuple[int, Completion]]:
        """Waits for the step in flight on the device, if there is one, and begins no other; returns the requests that
        finish with it. To be called before ``order``, ``preempt`` and ``open_weights`` beside requests."""

    def order(self) -> list[int]:
        """Keys of the requests in flight: running ones, then waiting ones. Another engine that gets the rest of each in
        this order continues as this one does after ``preempt``, bit for bit."""

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        """What requests, by their keys, have generated so far, from a place in each response on; routed experts from
        the prompt on. The requests remain in flight."""

    def preempt(self) -> None:
        """Returns running requests to the head of the queue, in order, and drops cached prefixes. The next steps
        recompute their KV cache."""

    @property
    def unfinished(self) -> int:
        """Number of requests in flight."""

    def statistics(self) -> dict[str, float]:
        """Metrics ``engine/NAME_REDUCTION`` of what was generated since the last call, with the reduction over engines:
        mean, max or sum. Equal on all ranks of the engine."""

    def check_memory(self) -> None:
        """Raises UserError on every rank if any lacks the free memory to wake the engine. Collective over all ranks."""

    def wake_weights(self) -> None:
        """Allocates the memory of the weights; their values are undefined until they are written."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Each parameter of this rank as it is before the engine repacks it. Also while the weights sleep."""

    def open_weights(self, *, in_flight: bool = False) -> Mapping[str, Tensor]:
        """Those parameters, to be written in place; undefined until every one is written.

        ``in_flight``: requests may be in flight, between two steps. They keep their KV cache of the old weights, unless
        ``preempt`` was called before.
        """

    def close_weights(self) -> None:
        """Ends the writing: renews what is derived from the weights, frees temporary memory, drops cached prefixes.
        Those that requests in flight still use are used by no other request."""

    def shareable(self) -> frozenset[str]:
        """Parameters that the engine uses as they are, so that ``share`` may put other memory in their place."""

    def share(self, name: str, tensor: Tensor) -> None:
        """Uses ``tensor``, of the same shape and dtype, as that parameter from now on, and frees its own memory."""

    def discover_shards(self, tensors: Sequence[TensorSpec]) -> Sequence[Shard]:
        """The blocks of the model's ``tensors`` that the parameters of this rank consist of, as the engine's own loader
        fills them. For a model of any architecture, once, before the first weight sync; leaves the engine asleep.

        Raises UserError if a parameter is not made up of blocks of tensors.
        """

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], check: CheckWeights | None = None) -> None:
        """Loads whole tensors by HuggingFace's names through the engine's own loader; drops cached prefixes.

        ``check`` is called with the parameters of ``open_weights`` once they are filled.
        """

    def wake_cache(self) -> None:
        """Allocates the KV cache."""

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache, as far as the device can."""

    def shutdown(self) -> None:
        """Frees everything at the end of the run; the ranks' default process group stays."""
