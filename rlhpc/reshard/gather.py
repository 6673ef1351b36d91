"""The plain way from trainer to engine: every tensor gathered whole, then cut by the engine's own loader.

Simple and slow: the oracle that any faster way is tested against.
"""

from __future__ import annotations

from rlhpc.api import RolloutEngine, TrainBackend


def sync(actor: TrainBackend, engine: RolloutEngine) -> None:
    """Wake the engine with the actor's weights. Collective over all ranks.

    The weights come first and the KV cache after, so that gathered tensors and cache never need memory together; what
    only training needs leaves before, and the actor's weights between the two.
    """
    actor.offload(keep_parameters=True)
    engine.wake_weights()
    engine.load_weights(actor.full_tensors())
    actor.offload()
    engine.wake_cache()
