"""Weight sync through whole tensors: each is gathered, then cut by the engine's own loader.

Simple and slow; the faster method is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rlhpc.api import CheckWeights, RolloutEngine, TrainBackend
from rlhpc.core.heartbeat import touch


@dataclass
class Streamed:
    """Tensors and bytes that this rank's engine has loaded in one weight sync."""

    tensors: int = 0
    bytes: int = 0


def sync(actor: TrainBackend, engine: RolloutEngine, check: CheckWeights | None = None) -> Streamed:
    """Wakes the engine with the actor's weights, which ``check`` sees once they are loaded. Collective over all ranks.

    Order of device memory: training-only state is offloaded, the engine's weights are filled, the actor's weights are
    offloaded, and only then is the KV cache allocated. Gathered tensors and cache never need memory at the same time.
    """
    streamed = Streamed()
    actor.offload(keep_parameters=True)
    engine.wake_weights()
    engine.load_weights(_counted(actor.full_tensors(), streamed), check)
    actor.offload()
    engine.wake_cache()
    return streamed


def _counted(tensors: Iterable[tuple[str, Tensor]], streamed: Streamed) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each of which may come once; emptied when the loader asks for the next one, because vLLM's loops
    still refer to it while that one is gathered."""
    seen = set()
    for name, tensor in tensors:
        touch("weight sync")
        assert name not in seen, f"{name} is loaded twice"
        seen.add(name)
        streamed.tensors += 1
        streamed.bytes += tensor.nbytes
        passed = tensor.detach()
        del tensor
        yield name, passed
        passed.data = passed.new_empty(0)
