"""Both sides of a weight sync as plain tensors, without Megatron and vLLM."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhpc.sharding.shards import Shard, TensorSpec


def whole(tensor: TensorSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """The full tensor with random values seeded by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
    return torch.randn(tensor.shape, generator=generator).to(torch.float32 if tensor.float32 else dtype)


class Parameters:
    """Parameters of one rank that contain its shards. ``filled``: with the tensors' values."""

    def __init__(self, shards: Sequence[Shard], filled: bool, dtype: torch.dtype = torch.float32) -> None:
        self.shards, self.tensors = shards, {}
        stops: dict[tuple[int, str], list[int]] = {}
        for shard in shards:
            stop = shard.local_box.stop
            before = stops.get((shard.chunk, shard.local_name), [0] * len(stop))
            stops[shard.chunk, shard.local_name] = [max(pair) for pair in zip(before, stop, strict=True)]
        float32 = {shard.local_name for shard in shards if shard.tensor.float32}
        for (chunk, name), shape in stops.items():
            self.tensors[chunk, name] = torch.zeros(shape, dtype=torch.float32 if name in float32 else dtype)
        for shard in shards if filled else ():
            self.view(shard).copy_(whole(shard.tensor, dtype)[shard.box.slices])

    def view(self, shard: Shard) -> Tensor:
        return self.tensors[shard.chunk, shard.local_name][shard.local_box.slices].view(shard.box.shape)

    def wrong(self, dtype: torch.dtype = torch.float32) -> list[str]:
        """Names of tensors whose block here differs from the tensor."""
        return [
            s.tensor.name for s in self.shards if not torch.equal(self.view(s), whole(s.tensor, dtype)[s.box.slices])
        ]


def shape_of_kind(kind: str, **changes: Any) -> Any:
    """Shape of one of the tiny models."""
    import transformers

    from rlhpc.models.registry import shape_of
    from tests.helpers.tiny_models import _COMMON, KINDS

    family, own = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **own, **changes})
    return shape_of({**config.to_diff_dict(), "architectures": [f"{family}ForCausalLM"]})
