"""Weight sync through whole tensors: each is gathered, then cut by the engine's own loader.

Simple and slow; the faster method is tested against it.
"""

from __future__ import annotations

from rlhpc.api import RolloutEngine, TrainBackend


def sync(actor: TrainBackend, engine: RolloutEngine) -> None:
    """Wakes the engine with the actor's weights. Collective over all ranks.

    Order of device memory: training-only state is offloaded, the engine's weights are filled, the actor's weights are
    offloaded, and only then is the KV cache allocated. Gathered tensors and cache never need memory at the same time.
    """
    actor.offload(keep_parameters=True)
    engine.wake_weights()
    engine.load_weights(actor.full_tensors())
    actor.offload()
    engine.wake_cache()
