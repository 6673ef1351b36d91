"""Training back end on PyTorch's FSDP2: one transformers model sharded over ranks, with its optimizer if trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from rlhpc.api import LossFunction, PackedBatch, TokenStats, TokenValues, TrainBackend, TrainStats
from rlhpc.backends.fsdp.attention_interface import register
from rlhpc.backends.fsdp.checkpoint import ShardedCheckpoint, ThreadedWrite
from rlhpc.backends.fsdp.documents import DocumentPack, attending_to
from rlhpc.backends.fsdp.optimizers import build_optimizer, set_rate, state_tensors
from rlhpc.backends.fsdp.policy_head import as_token_stats, fuse_policy_head, whole_stats
from rlhpc.backends.fsdp.recompute import Recomputation
from rlhpc.backends.fsdp.sharded_model import BuildOptions, ShardedModel, local_part
from rlhpc.backends.fsdp.source import ModelSource
from rlhpc.backends.fsdp.weight_shards import WeightShards
from rlhpc.checkpoint.formats.weight_table import backend_of_checkpoint
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import OptimizerSection
from rlhpc.core import spans
from rlhpc.core.heartbeat import enter, touch
from rlhpc.models import ModelDescription
from rlhpc.parallel.compat import device
from rlhpc.parallel.offload import KINDS, Kind, Offloader, configured_kinds
from rlhpc.parallel.shared_backend import SharedBackend, all_finite, reduce_metrics
from rlhpc.sharding.mesh_sizes import mesh_layout
from rlhpc.sharding.shards import TensorSpec

_EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_ and Megatron (clip_grads.py)


@dataclass(frozen=True)
class _Inputs:
    """A batch on the device, its documents, and the places of this rank's tokens that are trained on."""

    batch: PackedBatch
    pack: DocumentPack
    trained: Int64[Tensor, " N"]


class FsdpBackend(SharedBackend):
    """Implements ``rlhpc.api.TrainBackend``. Without optimizer settings the model is frozen.

    A trained model has float32 shards, which are the master weights, and computes in ``source.dtype``; a frozen one has
    shards of that dtype.
    """

    def __init__(self, source: ModelSource, settings: ModelSettings) -> None:
        trained, memory = settings.optimizer is not None, settings.memory
        self._section, self._source = settings.optimizer, source
        self._device, self._dtype = device(), source.dtype
        self.layout = mesh_layout(source.meshes.sizes)
        self.meets_in_microbatches = self.layout.dp > 1
        method = settings.parallel.cp_method
        self._cp_method = None if method == "auto" else method
        self._is_critic = source.head == "value"
        options = BuildOptions(
            head=source.head,
            attention=register(),
            shard_dtype=torch.float32 if trained else source.dtype,
            compute_dtype=source.dtype,
            reshard_after_forward=memory.reshard_after_forward,
            accumulation=source.accumulation,
            recomputation=Recomputation.of(memory) if trained else Recomputation(),
            compile_layers=source.compile_layers,
            cpu_offload=memory.cpu_offload,
        )
        self._model = ShardedModel(source.config, source.meshes, options, self._device)
        if not trained:  # else transformers decides: biases of some routers are constants
            self._model.module.requires_grad_(requires_grad=False)
        if not self._is_critic:
            fuse_policy_head(self._model.head, source.config)
        self.weights = WeightShards(self._model)
        self._checkpoint = ShardedCheckpoint(self._model, self.weights)
        self.optimizer: torch.optim.Optimizer | None = None
        self._offload = Offloader(
            configured_kinds(memory.offload, trained=trained), memory.offload.fraction, self._device_tensors
        )

    @property
    def shape(self) -> ModelDescription:
        """See ``TrainBackend``."""
        return self._source.shape

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """See ``TrainBackend``."""
        return [weight.tensor for weight in self.weights.weights]

    def load_pretrained(self, folder: Path) -> None:
        """See ``TrainBackend``; a critic may start from a checkpoint of a model without value head."""
        enter("loading the model")
        self._offload.restore("parameters")
        with self._timed():
            if backend_of_checkpoint(folder) is not None:
                self._checkpoint.load(folder, without_head=self._is_critic)
            else:
                self.weights.load(folder)
        self.reset_optimizer()

    @torch.no_grad()
    def copy_weights(self, source: TrainBackend) -> None:
        """See ``TrainBackend``."""
        assert isinstance(source, FsdpBackend)
        self._offload.restore("parameters")
        source._offload.restore("parameters")
        theirs = source._model.local_tensors()
        for name, tensor in self._model.local_tensors().items():
            if name in theirs:
                tensor.copy_(theirs[name])

    def reset_optimizer(self, section: OptimizerSection | None = None) -> None:
        """See ``TrainBackend``."""
        if self._section is None:
            return
        self._section = section or self._section
        self.optimizer = None  # first: memory does not suffice for two
        self._offload.drop("optimizer")
        self._offload.restore(*KINDS)
        self.optimizer = build_optimizer(self._section, self._model, self.weights)

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """See ``TrainBackend``."""
        return self._evaluate(batches, temperature)

    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """See ``TrainBackend``."""
        assert self._is_critic, "the model has no value head"
        return self._evaluate(batches, temperature=1.0)

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[PackedBatch], temperature: float) -> list[Any]:
        self._offload.restore("parameters")
        found = [self._stats(inputs, temperature) for inputs in self._inputs(batches, "forward")]
        self._model.reshard()
        self._model.forget_passes()
        return found

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
        stats = self._differentiate(batches, loss, denominator, temperature)
        assert self._section is not None
        assert self.optimizer is not None
        if math.isfinite(stats.grad_norm) and stats.grad_norm <= skip_above:
            clip_gradients(self._model, stats.grad_norm, self._section.max_grad_norm)
            set_rate(self.optimizer, rate, self._section.weight_decay)
            self.optimizer.step()
            stats = replace(stats, applied=True)
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """See ``TrainBackend``."""
        stats = self._differentiate(batches, loss, denominator, temperature)
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def _differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """Leaves the reduced gradients at the parameters; returns the stats of an update that is not applied yet."""
        self._offload.restore(*KINDS)
        metrics = []
        for number, inputs in enumerate(self._inputs(batches, "backward and forward"), start=1):
            self._model.prepare_backward(last=number == len(batches))
            with attending_to(inputs.pack):  # recomputation calls attention in the backward pass
                sums = loss(self._stats(inputs, temperature), inputs.batch)
                (sums.total / denominator).backward()
            metrics.append(sums.metrics)
        self._model.reshard()
        norm = grad_norm(self._model)
        # Ranks that share sequences have the same sums.
        reduced = reduce_metrics(metrics, self._device, repeats=self._model.meshes.cp.get_local_rank() > 0)
        return TrainStats(norm, reduced, {}, applied=False)

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        """See ``TrainBackend``."""
        self._offload.restore("parameters")
        return all_finite(self._model.local_tensors().values(), self._device)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See ``TrainBackend``. In the model's dtype."""
        self._offload.restore("parameters")
        return self.weights.full_tensors(self._dtype)

    def settle(self) -> None:
        """See ``TrainBackend``. An update leaves nothing in flight."""

    def save(self, folder: Path, step: int = 0, *, asynchronous: bool = False) -> ThreadedWrite | None:
        """See ``TrainBackend``. In the format of torch.distributed.checkpoint, which any number of ranks can load."""
        self._offload.restore("optimizer", "parameters")
        return self._checkpoint.save(folder, self.optimizer, asynchronous=asynchronous)

    def load(self, folder: Path) -> None:
        """See ``TrainBackend``."""
        self._offload.restore("optimizer", "parameters")
        with self._timed():
            self._checkpoint.load(folder, self.optimizer)

    def _inputs(self, batches: Sequence[PackedBatch], activity: str) -> Iterator[_Inputs]:
        """The batches on the device. Sizes come from those in CPU memory: reading them back would wait for the GPU."""
        spans.worked(sum(len(batch.tokens) for batch in batches))
        for batch in batches:
            touch(activity)
            pack = self._pack(batch.cu_seqlens.diff().tolist())
            yield _Inputs(batch.to(self._device), pack, pack.places(batch.loss_weight != 0))

    def _pack(self, lengths: Sequence[int]) -> DocumentPack:
        group, options = self._model.meshes.cp.get_group(), self._model.options
        recompute = options.recomputation.attention
        keeps = options.compile_layers and torch.is_grad_enabled() and not options.recomputation.any
        return DocumentPack(lengths, self._device, group, self._cp_method, recompute=recompute, keeps=keeps)

    def _stats(self, inputs: _Inputs, temperature: float) -> Any:
        """Head's output for the whole batch: values of all tokens, or stats of those trained on and 0 elsewhere."""
        batch, pack, index = inputs.batch, inputs.pack, inputs.trained
        tokens, positions = pack.select(batch.tokens)[None], pack.positions[None]
        with attending_to(pack):
            if self._is_critic:
                return TokenValues(pack.gather(self._model(tokens, positions)[0, :, 0]))
            head = {"targets": pack.select(batch.targets)[index], "temperature": temperature}
            kept = None if batch.kept is None else pack.select(batch.kept)[index]
            found = self._model(tokens, positions, index=index, kept=kept, **head)
        return as_token_stats(pack.gather(whole_stats(found, index, pack.local_tokens)))

    def _device_tensors(self, kind: Kind) -> list[Tensor]:
        """Tensors of a kind on the training device."""
        if kind == "parameters":
            return list(self._model.local_tensors().values())
        if kind == "gradients":
            return sharded_gradients(self._model)
        found = state_tensors(self.optimizer) if self.optimizer is not None else []
        return [tensor for tensor in found if tensor.device == self._device and tensor.dim()]


def sharded_gradients(model: ShardedModel) -> list[Tensor]:
    """This rank's parts of all gradients, without empty ones."""
    found = [local_part(p.grad) for p in model.module.parameters() if p.grad is not None]
    return [gradient for gradient in found if gradient.numel()]


@torch.no_grad()
def grad_norm(model: ShardedModel) -> float:
    """Euclidean norm of the whole gradient, equal on every rank. Collective over the ranks of a copy."""
    gradients = sharded_gradients(model)
    squares = torch.zeros((), device=model.device)
    if gradients:
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        squares = torch.stack(norms).square().sum().to(model.device)
    dist.all_reduce(squares, group=model.meshes.copy_group)
    return float(squares.sqrt())


@torch.no_grad()
def clip_gradients(model: ShardedModel, norm: float, largest: float) -> None:
    """Scales the gradients down to a norm of at most ``largest``; ``norm``: the present one."""
    factor = largest / (norm + _EPSILON)
    gradients = sharded_gradients(model)
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
