"""Predicts the CPU memory of a node's ranks: processes, offloaded state, checkpoints, responses that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.engine_weights import draft_weights
from rlhpc.plan.estimates.rank_memory import RankModel
from rlhpc.sharding.placement import Placement

CPU_PROCESS = 6 << 30  # a rank's Python, PyTorch, vLLM and the CUDA libraries
_ROUTE_COPIES = 3  # on each rank: as received, by sample, and by microbatch
_INT32 = 4
_TOKEN = 32  # bytes of a finished response's token: id, log-prob, version, mask, and Python's share


@dataclass(frozen=True)
class CpuMemory:
    """Bytes of CPU memory of one rank, by purpose, and of its node's ranks together.

    With placement separate, ``parts`` are those of a rank that trains. ``nodes``: ranks of a node that train, that
    generate and, if there are any, that judge, for each kind of node.
    """

    parts: dict[str, int]
    ranks_per_node: int
    engine_parts: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[tuple[int, ...], ...] = ()
    judge_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def engine_total(self) -> int:
        """Total of a rank that only generates."""
        return sum(self.engine_parts.values())

    @property
    def judge_total(self) -> int:
        """Total of a rank of judges."""
        return sum(self.judge_parts.values())

    @property
    def fullest(self) -> tuple[int, ...]:
        """Ranks that train, that generate and, if there are any, that judge on the node that needs most."""
        return max(self.nodes, key=self._of, default=(self.ranks_per_node, 0))

    @property
    def node(self) -> int:
        return self._of(self.fullest)

    def _of(self, ranks: tuple[int, ...]) -> int:
        totals = (self.total, self.engine_total, self.judge_total)
        return sum(count * total for count, total in zip(ranks, totals, strict=False))


def cpu_memory(
    config: RunConfig,
    ranks_models: tuple[Sequence[RankModel], Sequence[RankModel], Sequence[RankModel]],
    shape: ModelDescription,
    placement: Placement,
    engine_weights: int,
) -> CpuMemory:
    """Returns the memory of the node that needs most. ``ranks_models``: models of a rank that trains, of a judge, and
    of an engine's rank beside the engine. ``engine_weights``: bytes on an engine's rank, of which it keeps a draft
    model's on the CPU too.

    Offloaded state holds its pinned memory. A background save holds the copies of all models until it finishes, a
    blocking one those of one model at a time. After a warm-up, the reference is saved too.
    """
    models, judged, beside_engine = ranks_models
    per_node, layout = config.resources.ranks_per_node, models[0].layout
    routed = _routed_experts(config, shape)
    parts = {**_of_models(config, models), "routed_experts": _ROUTE_COPIES * routed // (layout.dp * layout.pp)}
    parts["kept tokens"] = _kept_tokens(config)
    draft = draft_weights(config.rollout, shape, config.model.dtype)
    if not placement.separate:
        parts["draft model"] = draft
        engine = routed // max(1, placement.num_engines) * max(1, per_node // placement.tp) // per_node
        return CpuMemory(_positive({**parts, "routed_experts": engine + parts["routed_experts"]}), per_node)
    waiting = (config.asynchrony.max_staleness + 1) * (_TOKEN * _step_tokens(config) + routed)
    trainers, engines = placement.trainers.size, placement.engines.size
    if placement.lends:
        parts["routed_experts"] += routed // max(1, placement.num_lenders * placement.tp)
    versions = 1 if config.reshard.delta == "off" else 2  # with deltas, the last sent one too
    parts |= {"staged weights": versions * models[0].weights, "queue": waiting // min(per_node, trainers)}
    staged = 2 * (engine_weights - draft)
    engine_parts = {"processes": CPU_PROCESS, "staged weights": staged, "queue": waiting // engines}
    engine_parts["draft model"] = draft
    engine_parts["offloaded"] = sum(map(_away, beside_engine))
    judge_parts = _positive(_of_models(config, judged)) if judged else {}
    nodes = _kinds_of_node(placement, per_node)
    return CpuMemory(_positive(parts), per_node, _positive(engine_parts), nodes, judge_parts)


def _of_models(config: RunConfig, models: Sequence[RankModel]) -> dict[str, int]:
    """Returns a rank's memory for its models, and its process."""
    saved = [model.saved_on_cpu for model in models if model.trained or (model.name == "reference" and config.sft)]
    return {
        "processes": CPU_PROCESS,
        "offloaded": sum(map(_away, models)),
        "state on the CPU": sum(model.state.cpu + model.state.staging for model in models),
        "activations": sum(model.activations_on_cpu for model in models),
        "checkpoint": sum(saved) if config.checkpoint.asynchronous else max(saved, default=0),
    }


def _kinds_of_node(placement: Placement, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Returns how many ranks of a node train, generate and judge, for each kind of node."""
    roles = [placement.trainers, placement.engines, *([placement.judges] if placement.judges is not None else [])]
    found: dict[tuple[int, ...], None] = {}
    for role in placement.roles:  # a role's first and last node, and one between them
        first, last = role.ranks[0] // per_node, role.ranks[-1] // per_node
        for node in (first, min(first + 1, last), last):
            begin, end = node * per_node, (node + 1) * per_node
            counts = (max(0, min(end, each.ranks.stop) - max(begin, each.ranks.start)) for each in roles)
            found[tuple(counts)] = None
    return tuple(found)


def _positive(parts: Mapping[str, int]) -> dict[str, int]:
    return {what: size for what, size in parts.items() if size}


def _step_tokens(config: RunConfig) -> int:
    """Returns the tokens of a step whose responses all have full length."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return config.train.prompts_per_step * config.rollout.samples_per_prompt * longest


def _routed_experts(config: RunConfig, shape: ModelDescription) -> int:
    """Returns the bytes of a step's routed experts, at full length of all responses. An engine's are on its first rank;
    a rank that trains has those of its samples, of its stage's layers."""
    if not config.actor.moe.router_replay or shape.experts is None or not config.train.steps:
        return 0
    itemsize = 1 if shape.experts.num_experts <= 256 else 2  # as vLLM returns them
    return _step_tokens(config) * len(shape.experts.layers) * shape.experts.top_k * itemsize


def _kept_tokens(config: RunConfig) -> int:
    """Returns the bytes of the tokens that each token of a step was drawn from, where none is cut off by another option
    than top_k. Every rank that trains has those of all samples."""
    most = max((sampling.top_k or 0 for sampling in config.rollout.samplings if sampling.returns_kept), default=0)
    responses = config.train.prompts_per_step * config.rollout.samples_per_prompt if config.train.steps else 0
    return _INT32 * most * responses * config.rollout.max_response_tokens


def _away(model: RankModel) -> int:
    """Returns the offloaded bytes; gradients are released, not copied."""
    state, left = model.state, model.idle_state
    return state.parameters + state.optimizer - left.parameters - left.optimizer
