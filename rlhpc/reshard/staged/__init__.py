"""Weight sync from trainers to engines on ranks of their own, while the engines generate.

    trainer: parameters ─> staging memory ─ thread, pair by pair ─> staging memory ─> engine's parameters :engine
                                                                         └─> ranks of the node that need the block too

``plan.py`` decides which block crosses the network to which rank of a node, and whom that rank forwards it to.
``source.py`` and ``target.py`` are the two ends; each has a thread that sends or receives: by ``senders.py`` and
``receivers.py`` all bytes, or with ``reshard.delta`` what has changed since the version before (``delta.py``). Nobody
waits for a sync but a trainer whose previous version is still being sent, and an engine that needs a version which has
not arrived.
"""
