"""Weight sync: which block of which tensor goes from which rank to which, and its execution in memory.

    megatron_shards (trainer's layout) ─┐
                                        ├─> plan.py: blocks in buckets ─> executor.py: one all-to-all a bucket
    engine_shards (engine's layout) ────┘                                      │
    checksum_plan.py: terms from the layouts alone ─> verify.py <──────────────┘ engine's own parameters

In: the trainer's parameters, sharded. Out: the engine's parameters, written in place; no whole tensor is ever made.
``plan.py`` intersects the boxes of both layouts: each block comes from the rank itself if it has it, else from its
node, else from the rank that has sent the least, and no rank sends or receives more than ``reshard.bucket_mib`` in a
bucket. Every rank makes the whole plan, keeps its part and compares the digest. While a bucket travels the next one is
packed. ``gather.py`` is the plain way through whole tensors and vLLM's own loader: the oracle of the tests.
"""
