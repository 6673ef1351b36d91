"""What the trainer asks of a training back end and of a rollout engine. All calls are collective over the ranks that
share the object's model, unless said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlhpc.api.types import Completion, LossSums, PackedBatch, Request, TokenStats, TrainStats

LossFunction = Callable[[TokenStats, PackedBatch], LossSums]


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

    def train(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float, rate: float
    ) -> TrainStats:
        """One optimizer update on the sum of ``loss(...).total`` over all ranks' batches, divided by ``denominator``.

        Every data-parallel rank passes the same number of batches.
        """

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by HuggingFace's name, on every rank: the plain path, one tensor at a time."""

    def offload(self, keep_parameters: bool = False) -> None:
        """Let go of the device's memory as the configuration says. Later calls bring back what they need."""

    def save(self, folder: Path, asynchronous: bool = False) -> BackgroundWrite | None:
        """Write weights and optimizer state into an existing empty folder, each rank its own shards.

        ``asynchronous``: return before they are written, with what the end of the writing is asked of. Training may go
        on meanwhile, and changes nothing of what is written.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit for bit."""


class RolloutEngine(Protocol):
    """An inference engine in this process; the ranks of one engine call it alike."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; equal on all ranks of the engine."""

    def wake_weights(self) -> None:
        """Take back the memory of the weights; their values are undefined until ``load_weights``."""

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take whole tensors by HuggingFace's names through the engine's own loader; drops cached prefixes."""

    def wake_cache(self) -> None:
        """Take back the KV cache."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the device, as far as the device can."""

    def shutdown(self) -> None:
        """Free everything at the end of the run; the ranks' default process group stays."""
