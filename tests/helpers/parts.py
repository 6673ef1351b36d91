"""Parts of back ends that tests measure or change and that training does not offer, and storages of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def chunks_of(backend: Any) -> list[Any]:
    """Models of a Megatron back end as they are wrapped for data parallelism."""
    return backend._chunks


def gathers_of(backend: Any) -> Any:
    """Gathers of weights after a Megatron back end's update."""
    return backend._gathers


def gradient_buffers(backend: Any) -> list[Any]:
    """Buffers of a Megatron back end's gradients, those of experts last in each chunk."""
    return [buffer for chunk in chunks_of(backend) for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def sharded_model_of(backend: Any) -> Any:
    """Model of an FSDP2 back end with its meshes."""
    return backend._model


def writer_of(share: Any) -> int:
    """Process id of a checkpoint's writer in the background."""
    return share._caller.process.pid


def parameters_of(manager: Any) -> Any:
    """An engine's parameters by name, as a manager of weight syncs writes them."""
    return manager._parameters


def key_of(storage: Any) -> int:
    """Identity of a storage as long as it lives."""
    return storage._cdata


def bytes_by_storage(tensors: Iterable[Any]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {key_of(storage): storage.nbytes() for storage in storages}
