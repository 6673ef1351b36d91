"""The parts of acceptance, in the order of what tells most. Torch-free."""

from __future__ import annotations

from rlhpc.site.acceptance.part import Part, Tier


def _part(tier: Tier, name: str, title: str, minutes: float, function: str, *, needs_gpu: bool = False) -> Part:
    """``function`` is one of this package."""
    return Part(name, title, tier, minutes, f"rlhpc.site.acceptance.parts.{function}", needs_gpu=needs_gpu)


PARTS: tuple[Part, ...] = (
    _part("first", "install", "Versions, imports and what was chosen", 1.5, "install:run"),
    _part("first", "correctness", "Training, weight sync and engine agree", 4.0, "correctness:run"),
    _part("first", "weight_sync", "Weights to the engine, sleep and wake", 2.0, "weight_sync:run"),
    _part("first", "mfu_1_5b", "MFU of updates, 1.5B whole", 2.0, "mfu:run_1_5b"),
    _part("first", "mfu_8b", "MFU of updates, 8B's width", 2.0, "mfu:run_8b", needs_gpu=True),
    _part("first", "mfu_moe", "MFU of updates, 30B-A3B's layer", 1.5, "mfu:run_moe"),
    _part("first", "mfu_peer", "The same step by transformers", 2.0, "mfu:run_peer"),
    _part("first", "decode", "Decoding against stock vLLM", 3.0, "decode:run"),
    _part("first", "demo", "The demo learns", 2.0, "demo:run"),
    _part("rest", "grpo_1_5b", "GRPO steps, 1.5B whole, against the plan", 6.5, "grpo:run_1_5b"),
    _part("rest", "grpo_8b", "GRPO steps, 8B's width, against the plan", 6.5, "grpo:run_8b", needs_gpu=True),
    _part("rest", "several_ranks", "Axes of several ranks", 4.0, "several_ranks:run"),
    _part("rest", "recovery", "Killed runs resume", 5.0, "recovery:run"),
)
