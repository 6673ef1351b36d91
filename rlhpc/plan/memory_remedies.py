"""What makes a run fit that does not: changes of its keys, the cheapest first, each tried on the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.plan.fit import check_engine, misfits
from rlhpc.plan.layout import ParallelLayout, make_layout
from rlhpc.plan.memory import MemoryPlan, predict_memory, sequence_tokens

Changes = Mapping[str, Any]  # values by key


@dataclass(frozen=True)
class Remedy:
    """Keys to change, and the plan with them."""

    changes: tuple[tuple[str, Any], ...]
    plan: MemoryPlan

    @property
    def text(self) -> str:
        """As ``rlhpc`` takes overrides on its command line."""
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.changes
        )


def find_remedies(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, plan: MemoryPlan, count: int = 3
) -> list[Remedy]:
    """At most ``count`` of which each makes the first phase fit that does not, the cheapest in time first; before them
    several together that make all phases fit, where none does so alone.

    Nothing for a plan that fits, or without a GPU to fit into.
    """
    if plan.first_too_large is None or plan.gpu_bytes is None:
        return []
    gib = plan.gpu_bytes / 2**30
    found: list[Remedy] = []
    seen: set[str] = set()
    together: dict[str, Any] = {}
    both: Remedy | None = None
    for changes in _ladder(config, layout):
        keys = set(changes)
        if not keys & seen and (alone := _try(config, shape, changes, gib)) is not None and _helps(alone, plan):
            found.append(Remedy(tuple(changes.items()), alone))
            seen |= keys
        together |= changes
        if both is None and len(together) > len(changes):
            all_ = _try(config, shape, together, gib)
            both = Remedy(tuple(together.items()), all_) if all_ is not None and all_.first_too_large is None else None
        if len(found) == count:
            break
    if both is not None and not any(remedy.plan.first_too_large is None for remedy in found):
        found = [both, *found]
    return found[:count]


def _helps(tried: MemoryPlan, plan: MemoryPlan) -> bool:
    """What did not fit does, and nothing before it has come to be too large."""
    order = [phase.name for phase in plan.phases]
    first, before = tried.first_too_large, plan.first_too_large
    return before is not None and (first is None or order.index(first.name) > order.index(before.name))


def changed_config(config: RunConfig, changes: Changes) -> RunConfig:
    """The config with other values of some keys."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: Any, names: list[str], value: Any) -> Any:
    assert isinstance(section, BaseModel)
    own = value if len(names) == 1 else _changed(getattr(section, names[0]), names[1:], value)
    return section.model_copy(update={names[0]: own})


def _try(config: RunConfig, shape: ModelShape, changes: Changes, gib: float) -> MemoryPlan | None:
    """The plan, None where the changed config cannot run."""
    with suppress(UserError, ValidationError):
        tried = changed_config(config, changes)
        layout = make_layout(tried.parallel, tried.world_size)
        if any(misfits(shape, layout, tried.parallel)) or tried.world_size % tried.rollout.tp:
            return None
        check_engine(shape, tried.rollout)
        return predict_memory(tried, shape, layout, gib)
    return None


def _ladder(config: RunConfig, layout: ParallelLayout) -> Iterator[Changes]:
    """From what costs nothing to what costs most: copies, smaller steps, recomputation, the host, more cuts."""
    offload, memory, train, rollout = config.memory.offload, config.memory, config.train, config.rollout
    for kind in ("gradients", "optimizer", "parameters", "reference"):
        if not getattr(offload, kind):
            yield {f"memory.offload.{kind}": True}
    if rollout.kv_cache_gib is None:
        for fraction in (0.5, 0.4, 0.3):
            if fraction < rollout.gpu_memory_fraction:
                yield {"rollout.gpu_memory_fraction": fraction}
    least = -(-sequence_tokens(config) // layout.cp)
    tokens = train.tokens_per_microbatch
    while tokens > least:
        tokens = max(tokens // 2, least)
        yield {"train.tokens_per_microbatch": tokens}
    if memory.recompute == "none":
        yield {"memory.recompute": "selective"}
    if memory.recompute != "full":
        yield {"memory.recompute": "full"}
    for share in (0.5, 1.0):
        if train.optimizer.function is None and share > train.optimizer.host_fraction:
            yield {"train.optimizer.host_fraction": share}
    for key in ("rollout.tp", "parallel.tp", "parallel.ep", "parallel.pp", "parallel.cp"):
        section, name = key.split(".")
        size = getattr(getattr(config, section), name)
        for factor in (2, 4):
            yield {key: size * factor}
