"""Bytes that a forward pass keeps for its backward pass, module by module, as the training back end keeps them.

What autograd holds depends on kernels. "fused" are a GPU's: flash-attention's and fused norms, which keep their inputs.
"padded" are PyTorch's on a CPU, where norms keep float32 copies and attention copies of queries, keys and values; there
the figures are compared with what real forward passes keep (tests/helpers/activation_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.optimizer_memory import ITEMSIZE
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import padded_vocab

Kernels = Literal["fused", "padded"]
_FLOAT32, _INT64 = 4, 8
_OF_WORD = 29  # bytes a token that the log-probs keep besides the logits: indices, sums (log_probs.py)


@dataclass(frozen=True)
class ActivationSetting:
    """All that activations depend on but the tokens."""

    shape: ModelShape
    layout: ParallelLayout
    parallel: ParallelSection
    memory: MemorySection
    dtype: str
    kernels: Kernels = "fused"
    float32_router: bool = False

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def sequence_cut(self) -> int:
        """Ranks that share the tokens outside of tensor-parallel regions."""
        return self.layout.tp if self.parallel.sequence_parallel else 1

    @property
    def float_copies(self) -> bool:
        """Norms compute in float32 copies of their input."""
        return self.kernels == "padded" and self.dtype != "float32"

    def recomputes(self, module: str) -> bool:
        return self.memory.recompute == "selective" and module in self.memory.recompute_modules


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one micro batch on a rank: of its layers by chunk, and of embedding and head."""

    chunks: tuple[int, ...]
    embedding: int
    head: int
    logits: int  # of these the logits, and as many again for their gradient
    shared: int  # for all layers once: rotary angles, indices
    recomputed: int  # what a group of layers, or a module, keeps while it is computed again


def stage_activations(setting: ActivationSetting, stage: int, tokens: int) -> StageActivations:
    """Of a micro batch of ``tokens``, those of one context-parallel rank, on a pipeline stage."""
    shape, layout, e = setting.shape, setting.layout, setting.itemsize
    experts = set(shape.experts.layers) if shape.experts else set()
    has = {
        kind: layer_activations(setting, tokens, has_experts=kind)
        for kind in {layer in experts for layer in range(shape.num_layers)}
    }
    whole = {kind: _layer(setting, tokens, has_experts=kind, recompute=False) for kind in has}
    chunks = [0] * (layout.vpp or 1)
    deepest = 0
    for layer, (owner, chunk, _) in enumerate(layout.layer_places(shape.num_layers)):
        if owner == stage:
            chunks[chunk] += has[layer in experts]
            deepest = max(deepest, whole[layer in experts])
    again = deepest * setting.memory.recompute_layers if setting.memory.recompute == "full" else 0
    if setting.memory.recompute == "selective" and has:
        again = max(whole[kind] - has[kind] for kind in has)
    outside = tokens // setting.sequence_cut
    embedding = head = logits = 0
    if stage == 0:
        embedding = (_INT64 + (layout.tp > 1)) * tokens
    if stage == layout.pp - 1:
        head = _norm(setting, outside, shape.hidden_size)
        if shape.head == "value":
            head += _FLOAT32 * outside * shape.hidden_size
        else:
            logits = e * tokens * padded_vocab(shape.vocab_size, layout.tp) // layout.tp
            head += e * outside * shape.hidden_size + logits + _OF_WORD * tokens
    shared = 2 * _FLOAT32 * tokens * shape.rope_dim
    return StageActivations(tuple(chunks), embedding, head, logits, shared, again)


def in_flight_activations(setting: ActivationSetting, stage: int, tokens: int, microbatches: int) -> int:
    """Of all micro batches between their forward and backward passes on a stage, when they are most.

    One forward, one backward (schedules.py, forward_backward_pipelining_without_interleaving): as many as there are
    stages from this one on. Interleaved (get_pp_rank_microbatches), chunks are taken in rounds of pp micro batches.
    """
    layout, kept = setting.layout, stage_activations(setting, stage, tokens)
    chunks, behind = len(kept.chunks), layout.pp - 1 - stage
    if layout.vpp:
        ahead = 2 * behind + (chunks - 1) * layout.pp + 1
        rounds = -(-microbatches // layout.pp) * layout.pp
        order = [(number // layout.pp) % chunks for number in range(min(ahead, chunks * rounds))]
    else:
        order = [0] * min(behind + 1, microbatches)
    batches = -(-len(order) // chunks)
    return sum(kept.chunks[chunk] for chunk in order) + batches * (kept.embedding + kept.shared) + kept.head


def layer_activations(setting: ActivationSetting, tokens: int, *, has_experts: bool) -> int:
    """Of one layer; with full recomputation its share of the one input that a group of layers keeps."""
    if setting.memory.recompute == "full":
        group_input = setting.itemsize * (tokens // setting.sequence_cut) * setting.shape.hidden_size
        return group_input // setting.memory.recompute_layers
    return _layer(setting, tokens, has_experts=has_experts, recompute=True)


def _layer(setting: ActivationSetting, tokens: int, *, has_experts: bool, recompute: bool) -> int:
    outside, width = tokens // setting.sequence_cut, setting.shape.hidden_size
    norms = 2 * _norm(setting, outside, width)
    feed_forward = _experts if has_experts else _dense
    return norms + _attention(setting, tokens, recompute=recompute) + feed_forward(setting, tokens, recompute=recompute)


def _norm(setting: ActivationSetting, rows: int, width: int, *, input_stored: bool = True) -> int:
    """``input_stored`` false: the input is kept by something else, and need not be copied."""
    if setting.kernels == "fused":
        return rows * (setting.itemsize * width * input_stored + _FLOAT32)
    copy = width if input_stored or setting.float_copies else 0
    return rows * _FLOAT32 * (copy + width + 1)


def _attention(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """From the normed input to that of the last projection, which is kept whatever is recomputed."""
    shape, e, tp = setting.shape, setting.itemsize, setting.layout.tp
    outside, heads = tokens // setting.sequence_cut, shape.num_heads // tp
    again = recompute and setting.recomputes("core_attn")
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    kept = e * (outside * shape.hidden_size + tokens * heads * value_dim)
    if shape.latent is not None:
        kept += _latent_projections(setting, outside)
        inside = 3 * e * tokens * heads * shape.head_dim  # as many of values: padded
        if again:
            return kept + e * tokens * heads * (2 * shape.head_dim + shape.latent.nope_dim + value_dim)
        return kept + _core(setting, tokens, heads, heads, inside, output_shared=False)
    groups = max(1, shape.num_kv_heads // tp)
    fused = e * tokens * (heads + 2 * groups) * shape.head_dim  # of which values are a view
    query = e * tokens * heads * shape.head_dim
    key = e * tokens * groups * shape.head_dim
    copied = query if groups > 1 else 0  # queries of one group are a view too
    kept += _head_norms(setting, tokens, heads, groups) if shape.qk_norm else 0
    holds_fused = not setting.float_copies or setting.kernels == "fused"
    before = (copied if shape.qk_norm and holds_fused else 0) + (fused if shape.qk_norm and holds_fused else 0)
    if again:
        of_norms = query + key if shape.qk_norm else 0
        own = copied if not shape.qk_norm or holds_fused else 0
        return kept + fused + own + of_norms
    if setting.kernels == "fused":
        return (
            kept
            + max(before, fused + (copied if shape.qk_norm else 0))
            + _core(setting, tokens, heads, groups, query + key)
        )
    return kept + before + _core(setting, tokens, heads, heads, 3 * query)


def _head_norms(setting: ActivationSetting, tokens: int, heads: int, groups: int) -> int:
    """Without inputs that are views of the fused projection or its queries' copy."""
    own = setting.float_copies
    return sum(_norm(setting, tokens * count, setting.shape.head_dim, input_stored=own) for count in (heads, groups))


def _latent_projections(setting: ActivationSetting, outside: int) -> int:
    latent, e = setting.shape.latent, setting.itemsize
    assert latent is not None
    kept = _norm(setting, outside, latent.kv_rank) + e * outside * latent.kv_rank
    if not setting.float_copies:
        kept += e * outside * latent.rope_dim  # the norm's input is a view of the whole projection
    if latent.query_rank is not None:
        kept += _norm(setting, outside, latent.query_rank) + e * outside * latent.query_rank
    return kept


def _core(
    setting: ActivationSetting, tokens: int, heads: int, groups: int, inputs: int, *, output_shared: bool = True
) -> int:
    """Attention's own: what its kernel takes (``inputs``, without context parallelism), its output, its sums.

    The output of a fused kernel is the last projection's input (``output_shared``) where values are as long as keys.
    """
    cp, e, width = setting.layout.cp, setting.itemsize, setting.shape.head_dim
    output = e * tokens * heads * width
    sums = _FLOAT32 * tokens * heads
    if setting.kernels == "padded":
        output *= 2  # padded, and as it is put into its place
    elif output_shared and cp == 1:
        output = 0
    if cp > 1 and setting.parallel.cp_method == "all_gather":
        # Keys and values of whole sequences, and of half a chunk twice.
        visible = tokens * (2 * cp + 1) // 2
        keys_and_values = e * visible * groups * width * 2
        if setting.kernels == "padded":
            return e * tokens * heads * width + keys_and_values + output + sums
        return inputs + keys_and_values + output + sums
    return inputs + output + sums


def _dense(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """SwiGLU: its input, gate and up, the activated gate, up once more (glu_linear_offset), their product."""
    e, size = setting.itemsize, setting.shape.ffn_size
    kept = e * (tokens // setting.sequence_cut) * setting.shape.hidden_size
    if recompute and setting.recomputes("mlp"):
        return kept
    return kept + 5 * e * tokens * size // setting.layout.tp


def _experts(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """With tokens spread evenly over experts."""
    experts, e, layout = setting.shape.experts, setting.itemsize, setting.layout
    assert experts is not None
    outside, width = tokens // setting.sequence_cut, setting.shape.hidden_size
    layer_input = e * outside * width
    if recompute and setting.recomputes("moe"):
        return layer_input
    kept = _router(setting, outside)
    taken = outside * experts.top_k * layout.etp
    ffn = experts.ffn_size // layout.etp
    kept += taken * (e * (width + 5 * ffn) + _FLOAT32)
    if layout.ep * layout.etp > 1:
        kept += 2 * _INT64 * taken
    if experts.shared_ffn_size:
        if recompute and setting.recomputes("shared_experts"):
            kept += layer_input
        else:
            kept += 5 * e * tokens * experts.shared_ffn_size // layout.tp + layer_input
        if _router_itemsize(setting) == e:
            kept -= layer_input  # the router's
    return kept


def _router(setting: ActivationSetting, outside: int) -> int:
    """Its input, float32 scores and choices; the map of who goes where, of all ranks where all get all tokens."""
    experts, layout = setting.shape.experts, setting.layout
    assert experts is not None
    scores = _FLOAT32 * experts.num_experts * (1 if experts.score == "softmax" else 2)
    chosen = (_INT64 + _FLOAT32) * experts.top_k
    grouped = (experts.num_experts + 16 * (experts.groups_kept or 0) * 2) if experts.num_groups else 0
    ranks = layout.ep * layout.etp if setting.parallel.expert_dispatch == "allgather" else layout.etp
    sent = ((1 + _FLOAT32) * experts.num_experts + _INT64 * experts.top_k) * ranks
    return outside * (_router_itemsize(setting) * setting.shape.hidden_size + scores + chosen + grouped + sent)


def _router_itemsize(setting: ActivationSetting) -> int:
    """Of the input that the router's product keeps: a float32 copy, or what the experts' norm gave."""
    return _FLOAT32 if setting.float32_router else setting.itemsize
