"""The parts of acceptance, in the order of what tells most. Torch-free."""

from __future__ import annotations

from rlhpc.acceptance.part import Part

# Time on machines with GPUs is scarce, and each start is bare: the pieces are brought there first
# (docs/offline_gpu.md). A tier fits into one start with them.
PIECES_MINUTES = 4.0
TIER_MINUTES = {"first": 24.0, "rest": 26.0}
LONGEST_MINUTES = 8.0  # of a part

_HERE = "rlhpc.acceptance."
PARTS: tuple[Part, ...] = (
    Part("install", "Versions, imports and what was chosen", "first", 1.5, f"{_HERE}install:run", needs_gpu=False),
    Part(
        "correctness", "Training, weight sync and engine agree", "first", 4.0, f"{_HERE}correctness:run", needs_gpu=False
    ),
    Part(
        "weight_sync", "Weights to the engine, sleep and wake", "first", 2.5, f"{_HERE}weight_sync:run", needs_gpu=False
    ),
    Part("mfu_1_5b", "MFU of updates, 1.5B whole", "first", 2.0, f"{_HERE}mfu:run_1_5b", needs_gpu=False),
    Part("mfu_8b", "MFU of updates, 8B's width", "first", 2.0, f"{_HERE}mfu:run_8b"),
    Part("mfu_moe", "MFU of updates, 30B-A3B's layer", "first", 1.5, f"{_HERE}mfu:run_moe", needs_gpu=False),
    Part("mfu_peer", "The same step by transformers", "first", 1.5, f"{_HERE}mfu:run_peer", needs_gpu=False),
    Part("decode", "Decoding against stock vLLM", "first", 2.5, f"{_HERE}decode:run", needs_gpu=False),
    Part("demo", "The demo learns", "first", 2.5, f"{_HERE}demo:run", needs_gpu=False),
    Part("grpo_1_5b", "GRPO steps, 1.5B whole, against the plan", "rest", 6.5, f"{_HERE}grpo:run_1_5b", needs_gpu=False),
    Part("grpo_8b", "GRPO steps, 8B's width, against the plan", "rest", 6.5, f"{_HERE}grpo:run_8b"),
    Part("several_ranks", "Axes of several ranks", "rest", 4.0, f"{_HERE}several_ranks:run", needs_gpu=False),
    Part("recovery", "Killed runs resume", "rest", 5.0, f"{_HERE}recovery:run", needs_gpu=False),
)
