"""Installation: versions, import times, and which kernels were selected."""

from __future__ import annotations

import importlib
import time

import rlhpc
from bench import rig
from bench.acceptance.results import IS_TRUE, Context, Figure, Goal, Skipped

# In the order of a rank's startup: each time excludes modules that earlier imports have loaded.
_IMPORTS = ("torch", "transformers", "megatron.core", "vllm")


def run(context: Context) -> None:
    """Import, compute a grouped product and build an engine."""
    context.report(Figure("rlhpc", rlhpc.__version__))
    for name in _IMPORTS:
        began = time.perf_counter()
        module = importlib.import_module(name)
        seconds = time.perf_counter() - began
        version = getattr(module, "__version__", "unknown")
        context.report(Figure(f"import {name}", seconds, "s", note=f"version {version}"))
    from rlhpc.backends.kernels.packed_attention import kernel_name

    _versions(context)
    context.report(Figure("attention in training", kernel_name(on_gpu=context.on_gpu)))
    _grouped_product(context)
    _engine(context)


def _versions(context: Context) -> None:
    """Report the CUDA and NCCL releases that torch was built for."""
    import torch

    if not context.on_gpu:
        context.report(Skipped("CUDA", "needs a GPU"))
        return
    context.report(Figure("torch sees a GPU", torch.cuda.is_available(), "", IS_TRUE))
    context.report(Figure("CUDA of torch", str(torch.version.cuda)))
    context.report(Figure("NCCL of torch", ".".join(map(str, torch.cuda.nccl.version()))))
    context.report(Figure("compute capability", ".".join(map(str, torch.cuda.get_device_capability()))))


def _grouped_product(context: Context) -> None:
    """Check PyTorch's grouped product of experts, forward and backward, with one expert that has no tokens."""
    import torch
    import torch.nn.functional as F

    function = getattr(F, "grouped_mm", None)
    context.report(Figure("experts in training", "torch grouped_mm" if function else "unavailable: torch is too old"))
    if function is None:
        return
    options = {"device": "cuda" if context.on_gpu else "cpu", "dtype": torch.bfloat16, "requires_grad": True}
    sizes = (16, 0, 48)
    rows, weight = torch.randn(sum(sizes), 64, **options), torch.randn(len(sizes), 32, 64, **options)
    ends = torch.tensor(sizes, device=rows.device).cumsum(0).to(torch.int32)
    function(rows, weight.transpose(1, 2), offs=ends).float().square().sum().backward()
    found = rows.grad.clone(), weight.grad.clone()
    rows.grad = weight.grad = None
    parts = [F.linear(part, one) for part, one in zip(rows.split(sizes), weight, strict=True)]
    torch.cat(parts).float().square().sum().backward()
    pairs = zip(found, (rows.grad, weight.grad), strict=True)
    error = max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)
    note = "maximum difference of gradients, relative to the maximum; one expert has no tokens"
    context.report(Figure("grouped product vs. single products", error, "", Goal("<=", 0.02), note))


def _engine(context: Context) -> None:
    """Start a small engine without CUDA graphs."""
    folder, shape = rig.model_folder(context.folder / "model", "tiny", None, context.dtype)
    began = time.perf_counter()
    engine = rig.make_engine(folder, shape, context.dtype, 128, kv_cache_gib=0.0625, max_num_seqs=8)
    context.report(Figure("startup of a small engine", time.perf_counter() - began, "s", note="no CUDA graphs"))
    for name, choice in engine.choices().items():
        context.report(Figure(f"vLLM's {name}", choice))
    engine.shutdown()
