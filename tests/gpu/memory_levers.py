"""Memory levers of either back end on a GPU: what they free, and the numbers of updates with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.training import negative_log_likelihood, packed_batch, train

EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}
WIDE = {"hidden_size": 512, "intermediate_size": 2048}
LAYERS = 12
MANY = (64,) * 512  # tokens of a microbatch: of long sequences attention kernels sum gradients in any order
# cuBLAS on Hopper keeps a workspace for the thread of the forward pass and one for that of the backward pass
# (aten/src/ATen/cuda/CublasHandlePool.cpp); on other GPUs they are smaller.
CUBLAS_WORKSPACES = 2 * (32 << 20)


def offload_meanwhile(actor: Any, saved: Path) -> dict[str, Any]:
    """Updates with an offload between phases, while a checkpoint is written, and those after it is loaded."""
    found: dict[str, Any] = {"offloaded": train(actor, 2)}
    saved.mkdir()
    share = actor.save(saved, asynchronous=True)
    torch.cuda.synchronize()
    found["held"], before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    actor.offload()
    found["left"], after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found["free for others"] = after - before
    found["offloaded"] += train(actor, 2)
    share.finish()
    actor.load(saved)
    found["resumed"] = train(actor, 2)
    return found


def check_offload(found: dict[str, Any]) -> None:
    assert found["offloaded"] == found["plain"]
    assert found["resumed"] == found["plain"][2:]
    assert found["left"] - CUBLAS_WORKSPACES < 0.1 * found["held"], "what stays are buffers"
    assert found["free for others"] >= 0.9 * (found["held"] - found["left"])


def numbers_and_memory(actor: Any, before: int) -> dict[str, Any]:
    """Two updates of ``MANY`` tokens: numbers, and peak memory above ``before``."""
    torch.cuda.reset_peak_memory_stats()
    updates = [actor.train([packed_batch(MANY)] * 2, negative_log_likelihood, sum(MANY), 1.0, 1e-3) for _ in range(2)]
    numbers = [(update.sums["loss"], update.grad_norm) for update in updates]
    return {"numbers": numbers, "peak": torch.cuda.max_memory_allocated() - before}


def check_activations(kept: dict[str, Any], offloaded: dict[str, Any]) -> None:
    """Two of ``LAYERS`` layers' inputs are on the GPU at once, and a gradient of their size where the peak moves."""
    assert offloaded["numbers"] == kept["numbers"]
    layer = 2 * sum(MANY) * WIDE["hidden_size"]
    assert offloaded["most"] == LAYERS * layer
    assert kept["peak"] - offloaded["peak"] > 9 * layer
