"""Seconds of forward passes and updates under a training layout.

A stage's time is the sum over its layers: matrix products at compute speed, elementwise work at memory speed, and
collectives. The slowest stage sets the pace (Narayanan et al. 2021, section 2.2); filling and draining the pipeline
takes the other stages' time, divided by the virtual stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, sqrt
from statistics import NormalDist

from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection
from rlhpc.models import ModelDescription
from rlhpc.models.flops import attention_weights, feed_forward_weights, forward_terms, head_rows
from rlhpc.plan.estimates.roofline import RLHPC, MachineSpeed, Parts, PhaseTime, times, total
from rlhpc.plan.estimates.workload import StepWorkload, microbatches
from rlhpc.sharding.layout import MICROBATCH_TOKENS, ParallelLayout, best_microbatches

# Standard deviation of experts' loads over their mean, in a layer and microbatch: an assumption. Balancing the ranks of
# ep = 8 sped whole passes up by 1.17 to 1.34 (github.com/ROCm/ATOM/pull/1210); 1 predicts somewhat less.
EXPERT_SPREAD = 1.0
_CPU_COPY_BYTES = 6  # per parameter updated on the CPU: gradient to it, weight back


@dataclass(frozen=True)
class Training:
    """A model under a layout on machines."""

    shape: ModelDescription
    layout: ParallelLayout
    parallel: ParallelSection
    machine: MachineSpeed
    itemsize: int = 2

    @cached_property
    def terms(self) -> tuple[float, float]:
        """Forward operations per token and per pair of tokens."""
        return forward_terms(self.shape)

    @property
    def cp_method(self) -> str:
        """Exchange of context-parallel ranks."""
        return self.parallel.cp_method

    @property
    def shards(self) -> int:
        """Ranks over which all weights are sharded alike, with FSDP2; else 1."""
        return 1

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of a rank of the largest stage."""
        return self._largest.count * self.itemsize

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the weights of such a rank of a model that is not trained."""
        return self.weight_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of master weights and moments of a rank of the largest stage."""
        layout, mine = self.layout, self._largest
        return 12 * (mine.dense / (layout.dp * layout.cp) + mine.experts / layout.edp)

    @cached_property
    def _largest(self) -> StageParameters:
        return max(stage_parameters(self.shape, self.layout), key=lambda part: part.count)

    def update_time(
        self, work: StepWorkload, tokens: int, optimizer: OptimizerSection, memory: MemorySection, name: str
    ) -> PhaseTime:
        """See the function of this name."""
        return update_time(self, work, tokens, optimizer, memory, name)

    def pass_time(self, work: StepWorkload, tokens: int, name: str) -> PhaseTime:
        """See the function of this name."""
        return pass_time(self, work, tokens, name)

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """(layers without experts, layers with experts) of every stage."""
        experts = self.shape.experts.layers if self.shape.experts else ()
        return _stage_kinds(self.layout, self.shape.num_layers, experts)


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a stage's rank, outside of experts and in them."""

    dense: float
    experts: float

    @property
    def count(self) -> float:
        return self.dense + self.experts


def update_time(
    training: Training, work: StepWorkload, tokens: int, optimizer: OptimizerSection, memory: MemorySection, name: str
) -> PhaseTime:
    """Returns the time of all of a step's updates; a microbatch has at most ``tokens`` tokens on each rank."""
    layout = training.layout
    count, size = rank_microbatches(training, work, work.samples * work.epochs / work.updates, tokens)
    forward = stage_times(training, size, work.pairs)
    again = stage_times(training, size, work.pairs, recompute=memory)
    backward = [
        total(backward_times(stage), more)
        for stage, more in zip(forward, only_backward(training, size, work.pairs), strict=True)
    ]
    stages = [total(*three) for three in zip(forward, backward, again, strict=True)]
    one = total(_pipeline(stages, count, layout), _optimizer(training, optimizer, backward))
    parts = training.machine.calibrated(name, times(one, work.updates))
    flops = 3 * model_flops(training, work) * work.epochs
    return PhaseTime(name, parts, flops, work.updates * _sent(training, count * size * 3), {"microbatches": count})


def pass_time(training: Training, work: StepWorkload, tokens: int, name: str) -> PhaseTime:
    """Returns the time of one forward pass without gradients over a step's samples."""
    count, size = rank_microbatches(training, work, work.samples, tokens)
    parts = training.machine.calibrated(
        name, _pipeline(stage_times(training, size, work.pairs), count, training.layout)
    )
    flops = model_flops(training, work)
    return PhaseTime(name, parts, flops, _sent(training, count * size), {"microbatches": count})


def stage_parameters(shape: ModelDescription, layout: ParallelLayout) -> tuple[StageParameters, ...]:
    """Returns the parameters of a rank of each pipeline stage, without norms and biases."""
    embedding, found = shape.vocab_size * shape.hidden_size / layout.tp, []
    of_experts = shape.experts.layers if shape.experts else ()
    plain, sparse = _dense_layer(shape), of_experts[0] if of_experts else 0
    for stage, (dense, experts) in enumerate(_stage_kinds(layout, shape.num_layers, of_experts)):
        has_head = shape.head != "value" and (layout.pp > 1 or not shape.tied_embeddings)
        ends = (stage == 0) + (stage == layout.pp - 1 and has_head)
        cut = dense * _dense_weights(shape, plain) + (experts and experts * _dense_weights(shape, sparse))
        whole = (dense + experts) * _latent_weights(shape) + experts * _router_weights(shape)
        inside = experts and experts * _expert_weights(shape, sparse) / (layout.etp * layout.ep)
        found.append(StageParameters((cut - whole) / layout.tp + whole + ends * embedding, float(inside)))
    return tuple(found)


def _latent_weights(shape: ModelDescription) -> int:
    """Returns the weights of the down projections, whole on every tensor-parallel rank."""
    latent = shape.latent
    return shape.hidden_size * (latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)) if latent else 0


def _router_weights(shape: ModelDescription) -> int:
    return shape.hidden_size * shape.experts.num_experts if shape.experts else 0


def _dense_weights(shape: ModelDescription, layer: int) -> float:
    experts, weights = shape.experts, float(attention_weights(shape))
    if experts is None or layer not in experts.layers:
        return weights + feed_forward_weights(shape, layer)
    return weights + shape.hidden_size * (3 * experts.shared_ffn_size + experts.num_experts)


def _expert_weights(shape: ModelDescription, layer: int) -> float:
    experts = shape.experts
    if experts is None or layer not in experts.layers:
        return 0.0
    return 3.0 * shape.hidden_size * experts.ffn_size * experts.num_experts


@lru_cache(maxsize=8192)
def _stage_kinds(layout: ParallelLayout, num_layers: int, experts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    counts, sparse = [[0, 0] for _ in range(layout.pp)], set(experts)
    for layer, (stage, _, _) in enumerate(layout.layer_places(num_layers)):
        counts[stage][layer in sparse] += 1
    return tuple((dense, found) for dense, found in counts)


def rank_microbatches(training: Training, work: StepWorkload, samples: float, most: int) -> tuple[int, float]:
    """Returns the number of microbatches of a data-parallel rank and the mean tokens of each."""
    layout = training.layout
    mine = samples / layout.dp
    count = microbatches(work, ceil(mine), most * layout.cp)
    if layout.pp > 1 and training.machine.kernels is RLHPC:  # other programs make as few as possible
        overhead = MICROBATCH_TOKENS * layout.tp * layout.cp
        best = best_microbatches(layout.pp, layout.vpp or 1, mine * work.length, overhead)
        count = max(count, min(ceil(mine), round(best)))
    return count, mine * work.length / count


def stage_times(
    training: Training, tokens: float, pairs: float, recompute: MemorySection | None = None
) -> list[dict[str, float]]:
    """Returns the forward seconds of a microbatch on each stage; with ``recompute``, of the recomputed part."""
    if recompute is not None and recompute.recompute == "none":
        return [{}] * training.layout.pp
    kinds = [_layer(training, tokens, pairs, recompute, experts=kind) for kind in (False, True)]
    found = []
    for stage, (dense, experts) in enumerate(training.stages):
        parts = total(times(kinds[0], dense), times(kinds[1], experts))
        if recompute is None:
            if stage == training.layout.pp - 1:
                parts = total(parts, _head(training, tokens))
            parts = total(parts, _message(training, tokens))
        found.append(parts)
    return found


def _layer(
    training: Training, tokens: float, pairs: float, recompute: MemorySection | None, *, experts: bool
) -> dict[str, float]:
    """Returns the forward seconds of a dense or expert layer."""
    shape, layout = training.shape, training.layout
    if experts and shape.experts is None:
        return {}
    attention, products, feed_forward = 1.0, 1.0, 1.0
    if recompute is not None:
        modules = recompute.recompute_modules if recompute.recompute == "selective" else []
        whole = float(recompute.recompute == "full")
        attention, products = whole, max(whole, float("core_attn" in modules))
        feed_forward = max(whole, float(("moe" if experts else "mlp") in modules))
    local = tokens / (layout.tp * layout.cp)
    number = shape.experts.layers[0] if experts and shape.experts else _dense_layer(shape)
    core = training.terms[1] / shape.num_layers * pairs
    ffn = feed_forward_weights(shape, number)
    flops = 2 * attention_weights(shape) * attention + core * products + 2 * ffn * feed_forward
    hidden, width = shape.hidden_size, ffn / (3 * shape.hidden_size)
    counts = training.machine.kernels
    passes = counts.hidden_passes * hidden * (attention + feed_forward) / 2
    passes += counts.feed_forward_passes * width * feed_forward
    weights = attention * attention_weights(shape) / layout.tp
    if shape.experts and experts:
        more = _uneven(training)
        passes += counts.expert_passes * shape.experts.top_k * hidden * feed_forward * more
        flops += 6 * hidden * shape.experts.top_k * shape.experts.ffn_size * feed_forward * (more - 1)
        weights += feed_forward * _expert_weights(shape, number) / (layout.etp * layout.ep)
    else:
        weights += feed_forward * ffn / layout.tp
    machine, size = training.machine, training.itemsize
    parts = total(
        {"compute": machine.compute(local * flops), "memory": machine.memory(size * (local * passes + weights))},
        times(_attention_messages(training, tokens), attention),
        times(_feed_forward_messages(training, tokens, experts=experts), feed_forward),
    )
    started = counts.in_layer(latent=shape.latent is not None, experts=experts) * (attention + feed_forward) / 2
    starting = 1e-6 * machine.efficiency.launch_us * started
    busy = parts["compute"] + parts["memory"]  # the GPU computes while the next kernels are launched
    return total(parts, {"kernels": max(0.0, starting - busy)})


def _dense_layer(shape: ModelDescription) -> int:
    experts = shape.experts.layers if shape.experts else ()
    return next((layer for layer in range(shape.num_layers) if layer not in experts), 0)


def _attention_messages(training: Training, tokens: float) -> dict[str, float]:
    """Gathers and scatters sequence parts around the products; with cp, exchanges keys and values."""
    shape, layout, machine = training.shape, training.layout, training.machine
    parts = _tensor_messages(training, tokens)
    if layout.cp > 1:
        share = (layout.cp - 1) / layout.cp
        if training.cp_method == "ulysses":
            size = 4 * share * tokens / layout.cp * shape.num_heads * shape.head_dim / layout.tp * training.itemsize
            return total(parts, machine.exchange(size, layout.cp, layout.tp, messages=4))
        heads = max(1.0, (shape.num_heads if shape.latent else shape.num_kv_heads) / layout.tp)
        size = 2 * share * tokens * heads * shape.head_dim * training.itemsize
        return total(parts, machine.ring(size, layout.cp, layout.tp))
    return parts


def _feed_forward_messages(training: Training, tokens: float, *, experts: bool) -> dict[str, float]:
    shape, layout, machine = training.shape, training.layout, training.machine
    if not experts or shape.experts is None:
        return _tensor_messages(training, tokens)
    local = tokens / (layout.tp * layout.cp) * shape.hidden_size * training.itemsize
    copies = shape.experts.top_k if training.parallel.expert_dispatch == "alltoall" else layout.ep
    share = (layout.ep - 1) / layout.ep
    parts = machine.exchange(2 * local * copies * share * _uneven(training), layout.ep, layout.etp, messages=2)
    if layout.etp > 1:
        gathered = 2 * local * copies * (layout.etp - 1)
        parts = total(parts, machine.ring(gathered, layout.etp, 1, messages=2))
    if shape.experts.shared_ffn_size:  # cut like a dense layer
        parts = total(parts, _tensor_messages(training, tokens))
    return parts


def _uneven(training: Training) -> float:
    """Returns the load of the expert-parallel rank with most tokens, for which the others wait in every layer, over the
    mean: the largest of so many normal variables (Blom 1958), each a mean of the rank's experts."""
    ranks, experts = training.layout.ep, training.shape.experts
    if experts is None or ranks == 1:
        return 1.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + EXPERT_SPREAD * largest * sqrt(ranks / experts.num_experts)


def _tensor_messages(training: Training, tokens: float) -> dict[str, float]:
    """One all-gather and one reduce-scatter of the sequence, or an all-reduce of the same bytes."""
    layout = training.layout
    size = 2 * (layout.tp - 1) / layout.tp * tokens / layout.cp * training.shape.hidden_size * training.itemsize
    return training.machine.ring(size, layout.tp, 1, messages=2)


def _head(training: Training, tokens: float) -> dict[str, float]:
    """Logits and log-probs, on the last stage."""
    shape, layout, machine = training.shape, training.layout, training.machine
    cut = 1 if shape.head == "value" else layout.tp
    logits = tokens / layout.cp * head_rows(shape) / cut
    return {
        "compute": machine.compute(2 * logits * shape.hidden_size),
        "memory": machine.memory(machine.kernels.logit_bytes * logits),
    }


def _message(training: Training, tokens: float) -> dict[str, float]:
    """Sends a stage's output to the next; overlapped with computation only with virtual stages."""
    layout = training.layout
    size = tokens / (layout.tp * layout.cp) * training.shape.hidden_size * training.itemsize
    parts = training.machine.exchange(size, min(layout.pp, 2), layout.world_size // layout.pp)
    return {} if layout.vpp else parts


def backward_times(forward: Parts) -> dict[str, float]:
    """Two products for each forward one; mirrored collectives, and one more all-gather of the sequence."""
    more = {"compute": 2.0, "memory": 2.0, "node": 1.5, "kernels": 1.0}
    return {name: seconds * more.get(name, 1.0) for name, seconds in forward.items()}


def only_backward(training: Training, tokens: float, pairs: float) -> list[dict[str, float]]:
    """Returns a microbatch's backward seconds without a counterpart in the forward pass, on each stage: attention
    kernels multiply queries and keys again (Dao et al. 2022, algorithm 4), weight gradients are added up, and the head
    may make logits again."""
    shape, layout, machine = training.shape, training.layout, training.machine
    scores = machine.compute(2 * shape.num_heads * shape.head_dim * pairs * tokens / (layout.tp * layout.cp))
    adding = machine.kernels.gradient_bytes - training.itemsize  # backward_times has counted one write of each
    found = [
        {"compute": scores * sum(layers), "memory": machine.memory(adding * stage.count)}
        for layers, stage in zip(training.stages, stage_parameters(shape, layout), strict=True)
    ]
    if shape.head != "value":
        found[-1]["compute"] += machine.kernels.head_again * _head(training, tokens)["compute"]
    return found


def _pipeline(stages: Sequence[Parts], count: int, layout: ParallelLayout) -> dict[str, float]:
    seconds = [sum(stage.values()) for stage in stages]
    slowest = max(range(len(stages)), key=seconds.__getitem__)
    waiting = (sum(seconds) - seconds[slowest]) / (layout.vpp or 1)
    return total(times(stages[slowest], count), {"pipeline": waiting} if layout.pp > 1 else {})


def _optimizer(training: Training, section: OptimizerSection, backward: Sequence[Parts]) -> dict[str, float]:
    """Gradient reduction not hidden by the last backward pass, AdamW, and the all-gather of new weights."""
    layout, machine = training.layout, training.machine
    mine = max(stage_parameters(training.shape, layout), key=lambda part: part.count)
    groups = (
        (mine.dense, layout.dp * layout.cp, layout.tp),
        (mine.experts, layout.edp, layout.etp * layout.ep),
    )
    summing: dict[str, float] = {}
    gathering: dict[str, float] = {}
    owned = 0.0
    for count, ranks, stride in groups:
        share = (ranks - 1) / ranks
        summing = total(summing, machine.ring(4 * count * share, ranks, stride))
        gathering = total(gathering, machine.ring(training.itemsize * count * share, ranks, stride))
        owned += count / ranks
    hidden = min(1.0, max(sum(part.values()) for part in backward) / max(1e-12, sum(summing.values())))
    on_cpu = section.optimizer_offload_fraction * owned
    parts = total(
        times(summing, 1 - hidden),
        gathering,
        {"memory": machine.memory(machine.kernels.update_bytes * (owned - on_cpu) + 4 * mine.count)},
    )
    if on_cpu:
        copies = machine.to_cpu(_CPU_COPY_BYTES * on_cpu)
        parts = total(parts, {"cpu_memory": copies + machine.cpu_memory(machine.kernels.update_bytes * on_cpu)})
    return parts


def _sent(training: Training, tokens: float) -> float:
    """Returns the bytes that a rank sends for ``tokens`` tokens in a forward pass."""
    shape, layout, size = training.shape, training.layout, training.itemsize
    layers = ceil(shape.num_layers / layout.pp)
    of_experts = len(shape.experts.layers) / shape.num_layers if shape.experts else 0.0
    shares_experts = bool(shape.experts and shape.experts.shared_ffn_size)
    pairs = 2 if shares_experts else 1 + (1 - of_experts)  # of all-gather and reduce-scatter
    tensor = 2 * pairs * (layout.tp - 1) / layout.tp * tokens / layout.cp
    experts = 2 * (shape.experts.top_k if shape.experts else 0) * of_experts
    dispatch = experts * (layout.ep - 1) / layout.ep * tokens / (layout.tp * layout.cp)
    return layers * shape.hidden_size * size * (tensor + dispatch)


def model_flops(training: Training, work: StepWorkload) -> float:
    """Returns the operations of a forward pass over a step's samples, on all ranks."""
    of_token, of_pair = training.terms
    return work.tokens * (of_token + of_pair * work.pairs)
