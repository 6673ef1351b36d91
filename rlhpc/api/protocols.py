"""What the trainer asks of a training back end and of a rollout engine. All calls are collective over the ranks that
share the object's model, unless said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

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
)
from rlhpc.sharding.shards import Shard

# Of what the model's head says of each token, and the batch.
LossFunction = Callable[[TokenStats, PackedBatch], LossSums] | Callable[[TokenValues, PackedBatch], LossSums]


class BackgroundWrite(Protocol):
    """A part of a checkpoint that is being written."""

    def done(self) -> bool:
        """This rank's share is written, or never will be. Not collective."""

    def finish(self) -> None:
        """Wait for the end; an OSError on every rank if a share could not be written."""


class TrainBackend(Protocol):
    """A model cut over ranks, with its optimizer when it is trained."""

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """Log-probs and entropy of each batch's targets at logits / temperature, without gradient."""

    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """Of a model with a value head: its number for each token, without gradient."""

    def train(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float, rate: float
    ) -> TrainStats:
        """One optimizer update on the sum of ``loss(...).total`` over all ranks' batches, divided by ``denominator``.

        Every data-parallel rank passes the same number of batches. Where the norm of the gradients is not finite the
        update is skipped, on all ranks alike: weights and optimizer stay as they are, bit for bit.
        """

    def differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """As ``train``, without the update: for a replay."""

    def has_finite_weights(self) -> bool:
        """Whether every weight of every rank is a finite number. Collective over all ranks."""

    def view(self, shard: Shard) -> Tensor:
        """This rank's live weights of a shard, in the tensor's own number of dimensions."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by HuggingFace's name, on every rank: the plain path, one tensor at a time."""

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Let go of the device's memory as the configuration says. Later calls bring back what they need."""

    def save(self, folder: Path, *, asynchronous: bool = False) -> BackgroundWrite | None:
        """Write weights and optimizer state into an existing empty folder, each rank its own shards.

        ``asynchronous``: return before they are written, with what the end of the writing is asked of. Training may go
        on meanwhile, and changes nothing of what is written.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit for bit."""


class RewardWorkers(Protocol):
    """Scores responses beside the engine: on the first rank of each engine, in processes of its own."""

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begin to score a response; returns at once."""

    def results(self) -> dict[int, RewardResult]:
        """Wait for every response submitted since the last call; by key."""

    def failures(self) -> dict[str, int]:
        """Calls that failed since this was asked last, by kind."""

    def close(self) -> None:
        """End the processes, at the end of the run."""


class RolloutEngine(Protocol):
    """An inference engine in this process; the ranks of one engine call it alike."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; equal on all ranks of the engine."""

    def submit(self, key: int, request: Request) -> None:
        """Put a request under way; ``step`` tells of its end by ``key``."""

    def step(self) -> list[tuple[int, Completion]]:
        """Draw the next token of what is under way; the requests that are finished by it."""

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        """Take requests back; what each one has come to, unfinished."""

    @property
    def unfinished(self) -> int:
        """Requests under way, which weights must not change beneath."""

    def wake_weights(self) -> None:
        """Take back the memory of the weights; their values are undefined until they are written."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Each parameter of this rank as it is before the engine repacks it. Also while the weights sleep."""

    def open_weights(self) -> Mapping[str, Tensor]:
        """Those parameters, to be written in place; undefined until every one is written."""

    def close_weights(self) -> None:
        """All are written: renew what is derived from them, free what is needed no more, drop cached prefixes."""

    def shareable(self) -> frozenset[str]:
        """Parameters that the engine uses as they are, so that ``share`` may put other memory in their place."""

    def share(self, name: str, tensor: Tensor) -> None:
        """Use ``tensor``, of the same shape and dtype, as that parameter from now on, and free its own memory."""

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take whole tensors by HuggingFace's names through the engine's own loader; drops cached prefixes."""

    def wake_cache(self) -> None:
        """Take back the KV cache."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the device, as far as the device can."""

    def shutdown(self) -> None:
        """Free everything at the end of the run; the ranks' default process group stays."""
