"""Weight sync: a plan of the blocks that each rank sends to others, and its execution in memory.

    megatron_shards (trainer's layout) ─┐
                                        ├─> plan.py: blocks in buckets ─> executor.py: one all-to-all a bucket
    engine_shards (engine's layout) ────┘                                      │
    checksum_plan.py: terms from the layouts alone ─> verify.py <──────────────┘ engine's own parameters

In: the trainer's parameters, sharded. Out: the engine's parameters, written in place; no whole tensor is ever built.
``plan.py`` intersects the boxes of both layouts. Each block is copied from the rank itself if it holds it, else from
its node, else from the rank that has sent the fewest bytes. No rank sends or receives more than ``reshard.bucket_mib``
per bucket. Every rank computes the whole plan, keeps its own part and compares the digest. While one bucket is in
flight, the next one is packed. ``manager.py`` can also sync whole tensors through vLLM's own loader; tests compare
against it. Where no table describes a model, ``discovered.py`` collects both sides from the trainers' and engines'
ranks.
"""
