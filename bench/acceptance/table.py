"""Table of the parts of acceptance, most informative first. Torch-free."""

from __future__ import annotations

from bench.acceptance.part import Part, Tier


def _part(tier: Tier, name: str, title: str, minutes: float, function: str, *, needs_gpu: bool = False) -> Part:
    """A part whose ``function`` is in ``parts/``."""
    return Part(name, title, tier, minutes, f"bench.acceptance.parts.{function}", needs_gpu=needs_gpu)


PARTS: tuple[Part, ...] = (
    _part("first", "install", "Versions, imports and selected kernels", 1.5, "install:run"),
    _part("first", "correctness", "Training, weight sync and engine agree", 5.0, "correctness:run"),
    _part("first", "weight_sync", "Weight sync, sleep and wake", 2.5, "weight_sync:run"),
    _part("first", "mfu_1_5b", "MFU of updates, 1.5B, all layers", 2.0, "mfu:run_1_5b"),
    _part("first", "mfu_8b", "MFU of updates, 8B, layers that fit", 2.0, "mfu:run_8b", needs_gpu=True),
    _part("first", "mfu_moe", "MFU of updates, 30B-A3B, layers that fit", 1.5, "mfu:run_moe"),
    _part("first", "mfu_fsdp", "MFU and memory of FSDP2, 1.5B, all layers", 3.0, "mfu_fsdp:run"),
    _part("first", "mfu_peer", "The same update in transformers", 2.0, "mfu:run_peer"),
    _part("first", "decode", "Decoding vs. stock vLLM", 3.0, "decode:run"),
    _part("first", "demo", "The demo learns", 3.0, "demo:run"),
    _part("rest", "grpo_1_5b", "GRPO steps vs. the plan, 1.5B, all layers", 6.5, "grpo:run_1_5b"),
    _part("rest", "grpo_8b", "GRPO steps vs. the plan, 8B, layers that fit", 6.5, "grpo:run_8b", needs_gpu=True),
    _part("rest", "several_ranks", "Parallel axes on several ranks", 4.0, "several_ranks:run"),
    _part("rest", "recovery", "Killed runs resume", 7.0, "recovery:run"),
)
