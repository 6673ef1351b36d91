"""Peer of the MFU parts: an update in plain transformers with PyTorch's AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from bench.acceptance.part import Context, Figure, Skipped
from bench.acceptance.parts import rig, timing
from bench.acceptance.parts.mfu import PeerSize, peer_sizes
from bench.acceptance.parts.models import model_shape
from rlhpc.models.flops import training_flops
from rlhpc.plan.estimates.hardware import peak_tflops

# All in bfloat16, the fastest; and with float32 weights, as in rlhpc's optimizer.
_PRECISIONS = ("bfloat16", "float32 weights")


def measure(context: Context) -> dict[str, float]:
    """Measure every size in both precisions in this process; tokens per second of those that fit."""
    import torch

    rates: dict[str, float] = {}
    folder, _ = rig.model_folder(
        context.folder / "models" / "peer", "tiny" if context.tiny else "1.5b", None, "float32"
    )
    for precision in _PRECISIONS:
        for size in peer_sizes(tiny=context.tiny):
            label = f"transformers, {precision}, {size.label}"
            context.log(label)
            if context.on_gpu:
                timing.free_bytes()  # empties PyTorch's cache
                torch.cuda.reset_peak_memory_stats()
            try:
                rates[label] = _measure(context, label, _step(folder, size, precision, on_gpu=context.on_gpu), size)
            except torch.OutOfMemoryError:
                context.report(Skipped(label, "out of memory"))
    return rates


def _measure(context: Context, label: str, step: Callable[[], Any], size: PeerSize) -> float:
    import torch

    seconds = timing.median_seconds(step, rounds=3, warm_up=2)
    tokens = size.rows * size.length * size.microbatches
    shape = model_shape("tiny" if context.tiny else "1.5b")
    operations = training_flops(shape, [size.length] * size.rows) * size.microbatches
    context.report(Figure(f"{label}: update", seconds, "s", note=f"{tokens:,} tokens, {_attention()} attention"))
    context.report(Figure(f"{label}: tokens per second", tokens / seconds, "1/s"))
    peak = peak_tflops(torch.cuda.get_device_name()) if context.on_gpu else None
    if peak is not None:
        context.report(Figure(f"{label}: MFU with optimizer", operations / seconds / peak / 1e12))
    if context.on_gpu:
        context.report(Figure(f"{label}: peak memory", torch.cuda.max_memory_allocated() / timing.GIB, "GiB"))
    return tokens / seconds


def _step(folder: Any, size: PeerSize, precision: str, *, on_gpu: bool) -> Callable[[], None]:
    """One update: forward and backward of every microbatch, clipping, and AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if on_gpu else "cpu")
    plain = precision == "bfloat16"
    torch.manual_seed(0)
    with device:
        config = AutoConfig.from_pretrained(folder)
        dtype = torch.bfloat16 if plain else torch.float32
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(config, dtype=dtype, attn_implementation=_attention())
        tokens = torch.randint(0, config.vocab_size, (size.rows, size.length))
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    autocast = contextlib.nullcontext() if plain else torch.autocast(device.type, torch.bfloat16)

    def step() -> None:
        for _ in range(size.microbatches):
            with autocast:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / size.microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step


def _attention() -> str:
    return "flash_attention_2" if find_spec("flash_attn") else "sdpa"
