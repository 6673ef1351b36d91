"""Parts of acceptance in one rank's process as on a GPU, for ``run_ranks``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.bench.acceptance.part_runs import Results, collect
from tests.fake_cuda.test_kernels import Kernel
from tests.helpers.fake_cuda import GIB, FakeCuda

CONTEXT_GIB = 0.5  # of the CUDA context, as the stand-in counts
EARLIER_GIB = 0.25  # of PyTorch's peak before the first part


def collect_on_gpu(
    folder: Path, *calls: tuple[str, dict[str, Any]], engine: bool = False, flash: bool = True
) -> list[Results]:
    """The results of each module:function with its arguments.

    ``engine``: vLLM as on a GPU. ``flash``: with a stand-in for flash-attn.
    """
    if flash:
        install_flash_attention()
    found = []
    with FakeCuda(context_gib=CONTEXT_GIB), contextlib.ExitStack() as stack:
        if engine:
            from tests.fake_cuda.gpu_worker import as_on_a_gpu

            stack.enter_context(as_on_a_gpu())
        torch.empty(int(EARLIER_GIB * GIB), dtype=torch.uint8, device="cuda")
        for function, arguments in calls:
            found.append(collect(folder, f"bench.acceptance.{function}", arguments, on_gpu=True))
            _leave()
    return found


def install_flash_attention() -> Kernel:
    """A stand-in for flash-attn's kernel, in this process."""
    from rlhpc.backends.kernels import packed_attention

    kernel, module = Kernel(), ModuleType("flash_attn")
    module.flash_attn_varlen_func = kernel.flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = module
    packed_attention._flash_attention.cache_clear()
    return kernel


def _leave() -> None:
    """The groups that a part has joined."""
    from megatron.core import parallel_state

    from rlhpc.parallel import groups

    parallel_state.destroy_model_parallel()
    groups.leave()
