"""KV cache of the engines: whether it holds a whole sequence, and changes with which it does, each tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.estimates.memory import GIB, EngineMemory, engine_bytes, sequence_tokens
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import divisors
from rlhpc.sharding.placement import engine_ranks, generating_ranks

HIGHEST_UTILIZATION = 0.95  # of a GPU: its CUDA context and the sleeping trainer need the rest
_MORE_GPUS = (2, 4, 8, 16, 32, 64)
_LEAST_RESPONSE = 0.25  # a shorter response than this part of the configured one is another task


def cache_key(section: RolloutSection) -> str:
    """The key in ``rollout`` that sets the size of the cache."""
    return "gpu_memory_utilization" if section.kv_cache_gib is None else "kv_cache_gib"


def cache_size(section: RolloutSection) -> float:
    """The value of that key."""
    return float(getattr(section, cache_key(section)))


def holds_sequence(config: RunConfig, shape: ModelDescription, gpu_gib: float | None) -> bool:
    """Whether the cache holds the longest prompt with the longest response; true where its size is not known."""
    if (config.rollout.kv_cache_gib is None and gpu_gib is None) or not generates(config):
        return True
    return _Cache(config, shape, gpu_gib).engine(config.rollout).tokens >= sequence_tokens(config)


def generates(config: RunConfig) -> bool:
    """Whether the run samples responses at all."""
    return bool(config.train.steps or config.data.validation)


def larger_engines(config: RunConfig, shape: ModelDescription) -> Iterator[int]:
    """Larger tensor-parallel sizes that suit model, ranks and nodes, the smallest first."""
    for size in divisors(generating_ranks(config, config.world_size)):
        if size > config.rollout.tp and fits_nodes(size, config.resources.ranks_per_node):
            with suppress(UserError):
                check_engine(shape, config.rollout.model_copy(update={"tp": size}))
                yield size


def cache_remedy(config: RunConfig, shape: ModelDescription, gpu_gib: float | None) -> str:
    """Changes with which the cache holds a whole sequence, joined by "or"; more or larger GPUs if there are none."""
    cache, section = _Cache(config, shape, gpu_gib), config.rollout
    shorter = cache.response_tokens
    options = []
    if (raised := cache.enlarged(section)) is not None:
        options.append(f"set it to {cache_size(raised):g}")
    if (larger := engine_remedy(config, shape, gpu_gib, alone=raised is not None)) is not None:
        options.append(larger)
    if shorter >= _LEAST_RESPONSE * section.max_response_tokens:
        options.append(f"lower rollout.max_response_tokens to {shorter}")
    if not options:
        options.append(cache.more_gpus())
    return " or ".join([", ".join(options[:-1]), options[-1]] if options[1:] else options)


def engine_remedy(
    config: RunConfig, shape: ModelDescription, gpu_gib: float | None, *, alone: bool = False
) -> str | None:
    """The smallest larger engine whose cache holds a whole sequence, if need be and not ``alone`` with another size of
    the cache."""
    cache = _Cache(config, shape, gpu_gib)
    for size in larger_engines(config, shape):
        found = cache.working(config.rollout.model_copy(update={"tp": size}))
        if found is not None and not (alone and cache_size(found) != cache_size(config.rollout)):
            return f"set {cache.changed(found)}"
    return None


@dataclass(frozen=True)
class _Cache:
    """Engines of a run on a GPU of ``gpu_gib`` GiB, None where it is not known."""

    config: RunConfig
    shape: ModelDescription
    gpu_gib: float | None

    @property
    def _gpu_bytes(self) -> int | None:
        return None if self.gpu_gib is None else int(self.gpu_gib * GIB)

    def engine(self, section: RolloutSection) -> EngineMemory:
        return engine_bytes(section, self.shape, self.config.model.dtype, self._gpu_bytes)

    def _starts(self, section: RolloutSection) -> bool:
        """Whether the claim of the engine leaves the rest of the GPU its share."""
        return self._gpu_bytes is None or self.engine(section).claimed <= HIGHEST_UTILIZATION * self._gpu_bytes

    def _holds(self, section: RolloutSection) -> bool:
        return self._starts(section) and self.engine(section).tokens >= sequence_tokens(self.config)

    def enlarged(self, section: RolloutSection) -> RolloutSection | None:
        """The section with the smallest cache that holds a sequence; None if no GPU has room for it."""
        engine, tokens = self.engine(section), sequence_tokens(self.config)
        if section.kv_cache_gib is not None:
            value = (tokens * engine.token + 1) / GIB
        else:
            value = (engine.smallest(tokens) + 1) / (self._gpu_bytes or 1)
        found = section.model_copy(update={cache_key(section): ceil(100 * value) / 100})
        return found if self._holds(found) else None

    def working(self, section: RolloutSection) -> RolloutSection | None:
        """The section itself if its cache holds a sequence, or with another size of the cache; None if none does."""
        if section.kv_cache_gib is None and section.gpu_memory_utilization > HIGHEST_UTILIZATION:
            section = section.model_copy(update={"gpu_memory_utilization": HIGHEST_UTILIZATION})
        return section if self._holds(section) else self.enlarged(section)

    def changed(self, section: RolloutSection) -> str:
        """Engine size and, if it differs, size of the cache, as keys with values."""
        size = cache_size(section)
        also = f" and rollout.{cache_key(section)} to {size:g}" if size != cache_size(self.config.rollout) else ""
        return f"rollout.tp to {section.tp}{also}"

    @property
    def response_tokens(self) -> int:
        """Longest response, after the longest prompt, that the configured cache holds; 0 without room for any."""
        section = self.config.rollout
        room = self.engine(section).tokens - self.config.data.max_prompt_tokens
        return max(0, room) if self._starts(section) else 0

    def more_gpus(self) -> str:
        """Remedy where no engine on the job's ranks is large enough."""
        for size in _MORE_GPUS:
            section = self.config.rollout.model_copy(update={"tp": size})
            if size <= max(generating_ranks(self.config, self.config.world_size), self.config.rollout.tp):
                continue
            with suppress(UserError):
                check_engine(self.shape, section)
                if (found := self.working(section)) is not None:
                    keys = "resources.ranks_per_node x slurm.nodes"
                    if engine_ranks(self.config) is not None:
                        keys = "rollout.ranks or rollout.nodes"
                    gpus = f"take at least {size} GPUs ({keys})"
                    return f"{gpus} and set {self.changed(found)}"
        if self.response_tokens:
            return f"lower rollout.max_response_tokens to {self.response_tokens}"
        return "use larger GPUs"
