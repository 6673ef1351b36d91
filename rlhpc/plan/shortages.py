"""What a planned run lacks: GPU memory by phase, room for a sequence in the KV cache, CPU memory of a node."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.cache import cache_key, cache_remedy, holds_sequence
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, engine_memory, sequence_tokens


@dataclass(frozen=True)
class Shortage:
    """``what``: a phase, "KV cache" or "CPU memory". ``needed`` and ``limit`` in bytes; of a cache in tokens."""

    what: str
    needed: float
    limit: float
    where: str = ""  # the key that sets the limit
    remedy: str = ""

    @property
    def text(self) -> str:
        """In a few words, for a table."""
        if self.what == "KV cache":
            return f"KV cache: {self.limit:,.0f} of {self.needed:,.0f} tokens"
        return f"{self.what}: {self.needed / GIB:,.1f} of {self.limit / GIB:,.1f} GiB"


def shortages(config: RunConfig, shape: ModelDescription, memory: MemoryPlan, gpu: Gpu | None) -> list[Shortage]:
    """Returns what the run lacks on this GPU; without one, only what the config itself limits."""
    found = []
    if gpu is not None:
        size = gpu.memory_bytes
        found += [Shortage(phase.name, phase.total, size) for phase in memory.phases if phase.total > size]
    gib = gpu.memory_gib if gpu is not None else None
    if not holds_sequence(config, shape, gib):
        engine = engine_memory(config, shape, None if gib is None else int(gib * GIB))
        where, remedy = f"rollout.{cache_key(config.rollout)}", cache_remedy(config, shape, gib)
        found.append(Shortage("KV cache", sequence_tokens(config), max(0, engine.tokens), where, remedy))
    limit = cpu_memory_limit(config, gpu)
    if limit is not None and memory.cpu.node > limit[1]:
        found.append(Shortage("CPU memory", memory.cpu.node, limit[1], limit[0]))
    return found
