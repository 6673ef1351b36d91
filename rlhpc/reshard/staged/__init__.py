"""Weight sync from trainers to engines on ranks of their own, while the engines generate.

    trainer: parameters ─> staging memory ─ thread, pair by pair ─> staging memory ─> engine's parameters :engine
                                                                         └─> ranks of the node that need the block too

``plan.py`` decides which block crosses the network to which rank of a node, and to whom that rank forwards it.
``source.py`` and ``target.py`` are the two ends. Each has a thread that sends or receives all bytes, or with
``reshard.delta`` only the changes since the previous version (``delta.py``). Only two ranks wait for a sync: a trainer
whose previous version is still being sent, and an engine that needs a version which has not arrived.
"""
