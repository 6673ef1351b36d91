"""Bytes that a forward pass stores for its backward pass, module by module, as in the training back end.

Those of attention depend on its kernel. "fused": on a GPU, flash-attention stores its inputs. "padded": on a CPU,
attention copies queries, keys and values; these figures are compared with real forward passes
(tests/helpers/activation_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import padded_vocab

Kernels = Literal["fused", "padded"]
_FLOAT32, _INT64 = 4, 8
LOG_PROB_BYTES = 40  # per token, stored for log-probs: indices, sums of the logits (kernels/loss_head.py)
# Of a block of logits, and elements that are computed on in float32 at once (kernels/loss_head.py).
BLOCK_BYTES, MIN_COLUMNS, CHUNK_ELEMENTS = 160 << 20, 2048, 1 << 23


@dataclass(frozen=True)
class ActivationSetting:
    """Everything but tokens that activations depend on."""

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
        """Number of ranks that split the tokens outside of tensor-parallel regions."""
        return self.layout.tp if self.parallel.sequence_parallel else 1

    def recomputes(self, module: str) -> bool:
        return self.memory.recompute == "selective" and module in self.memory.recompute_modules

    @property
    def offloads(self) -> bool:
        """True if inputs of recomputed groups wait in CPU memory."""
        return self.memory.recompute == "full" and self.memory.offload_activations


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one microbatch on a rank: of its layers by chunk, of embedding and head."""

    chunks: tuple[int, ...]
    away: tuple[int, ...]  # of chunks, in CPU memory
    moving: int  # once for all microbatches: inputs on their way to CPU memory or back
    embedding: int
    head: int
    shared: int  # once for all layers: rotary angles, indices
    recomputed: int  # of a group of layers, or a module, during its recomputation


def stage_activations(setting: ActivationSetting, stage: int, tokens: int) -> StageActivations:
    """Returns the activations of a microbatch of ``tokens``, of one context-parallel rank, on a pipeline stage."""
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
    away, moving = _offloaded(setting, stage, tokens, chunks) if setting.offloads else ([0] * len(chunks), 0)
    chunks = [stored - gone for stored, gone in zip(chunks, away, strict=True)]
    embedding = head = 0
    if stage == 0:
        embedding = (_INT64 + (layout.tp > 1)) * tokens
    if stage == layout.pp - 1:
        head = _norm(setting, outside, shape.hidden_size)
        if shape.head == "value":
            head += _FLOAT32 * outside * shape.hidden_size
        else:
            head += e * tokens * shape.hidden_size + LOG_PROB_BYTES * tokens
    shared = 2 * _FLOAT32 * tokens * shape.rope_dim
    return StageActivations(tuple(chunks), tuple(away), moving, embedding, head, shared, again)


def _offloaded(setting: ActivationSetting, stage: int, tokens: int, chunks: list[int]) -> tuple[list[int], int]:
    """Returns the bytes that each chunk has in CPU memory, and the most that are on the GPU too: two groups' inputs.
    Pipeline schedules hold what a chunk has received, the input of its first group."""
    one = _group_input(setting, tokens)
    away = [max(0, stored - (one if stage or chunk else 0)) for chunk, stored in enumerate(chunks)]
    return away, min(2 * one, sum(away))


def head_workspace(setting: ActivationSetting, stage: int, tokens: int, *, backward: bool) -> int:
    """Returns the temporary bytes of log-probs on a stage; all tokens count as trained."""
    shape, layout = setting.shape, setting.layout
    if shape.head == "value" or stage != layout.pp - 1:
        return 0
    columns = padded_vocab(shape.vocab_size, layout.tp) // layout.tp
    return head_bytes(shape.hidden_size, setting.itemsize, columns, tokens, backward=backward)


def head_bytes(hidden_size: int, itemsize: int, columns: int, tokens: int, *, backward: bool) -> int:
    """Returns the temporary bytes of log-probs of ``tokens`` tokens over ``columns`` of the vocabulary: a block of
    logits, float32 copies of a chunk of it and, backward, the gradient of hidden states and products before they are
    added in float32."""
    columns = min(columns, max(MIN_COLUMNS, BLOCK_BYTES // (itemsize * tokens)))
    chunk = 3 * _FLOAT32 * min(CHUNK_ELEMENTS, tokens * columns)
    if not backward:
        return itemsize * tokens * columns + chunk
    product = itemsize * max(tokens, columns) * hidden_size if itemsize < _FLOAT32 else 0
    return itemsize * tokens * columns + max(chunk, product) + _FLOAT32 * tokens * hidden_size


def in_flight_activations(setting: ActivationSetting, stage: int, tokens: int, microbatches: int) -> int:
    """Returns the peak bytes of all microbatches between forward and backward on a stage."""
    kept = stage_activations(setting, stage, tokens)
    order, ahead = _forward_order(setting.layout, stage, microbatches)
    in_flight = order[:ahead]
    batches, layers = -(-len(in_flight) // len(kept.chunks)), sum(kept.chunks[chunk] for chunk in in_flight)
    return layers + kept.moving + batches * (kept.embedding + kept.shared) + kept.head


def offloaded_activations(setting: ActivationSetting, stage: int, tokens: int, microbatches: int) -> int:
    """Returns the peak bytes of all microbatches in CPU memory. From the first backward pass on, one follows each
    forward pass; the last chunk's is first."""
    away = stage_activations(setting, stage, tokens).away
    order, ahead = _forward_order(setting.layout, stage, microbatches)
    held = most = 0
    for number, chunk in enumerate(order, start=1):
        held += away[chunk]
        most = max(most, held)
        if number >= ahead:
            held -= away[len(away) - 1 - order[number - ahead]]
    return most


def _forward_order(layout: ParallelLayout, stage: int, microbatches: int) -> tuple[list[int], int]:
    """Returns the chunk of each forward pass on a stage, and the number of them before the first backward pass.

    1F1B (schedules.py, forward_backward_pipelining_without_interleaving): one microbatch per stage from this one on.
    Interleaved (get_pp_rank_microbatches): chunks advance in rounds of pp microbatches.
    """
    behind, chunks = layout.pp - 1 - stage, layout.vpp
    if chunks is None:
        return [0] * microbatches, behind + 1
    ahead = 2 * behind + (chunks - 1) * layout.pp + 1
    rounds = -(-microbatches // layout.pp) * layout.pp
    return [(number // layout.pp) % chunks for number in range(chunks * rounds)], ahead


def _group_input(setting: ActivationSetting, tokens: int) -> int:
    return setting.itemsize * (tokens // setting.sequence_cut) * setting.shape.hidden_size


def layer_activations(setting: ActivationSetting, tokens: int, *, has_experts: bool) -> int:
    """Returns the bytes of one layer; with full recomputation, its share of its group's input."""
    if setting.memory.recompute == "full":
        return _group_input(setting, tokens) // setting.memory.recompute_layers
    return _layer(setting, tokens, has_experts=has_experts, recompute=True)


def _layer(setting: ActivationSetting, tokens: int, *, has_experts: bool, recompute: bool) -> int:
    outside, width = tokens // setting.sequence_cut, setting.shape.hidden_size
    norms = 2 * _norm(setting, outside, width)
    feed_forward = _experts if has_experts else _dense
    return norms + _attention(setting, tokens, recompute=recompute) + feed_forward(setting, tokens, recompute=recompute)


def _norm(setting: ActivationSetting, rows: int, width: int) -> int:
    """Returns the bytes of a norm's input, and of a number for each row."""
    return rows * (setting.itemsize * width + _FLOAT32)


def _attention(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes from the normed input to the output projection's input, which is stored in any case."""
    shape, e, tp = setting.shape, setting.itemsize, setting.layout.tp
    outside, heads = tokens // setting.sequence_cut, shape.num_heads // tp
    again = recompute and setting.recomputes("core_attn")
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    kept = e * (outside * shape.hidden_size + tokens * heads * value_dim)
    if shape.latent is not None:
        kept += _latent_projections(setting, outside)
        inside = 3 * e * tokens * heads * shape.head_dim  # values are padded to the same size
        if again:
            return kept + e * tokens * heads * (2 * shape.head_dim + shape.latent.nope_dim + value_dim)
        return kept + _core(setting, tokens, heads, heads, inside, output_shared=False)
    groups = max(1, shape.num_kv_heads // tp)
    query, key = (e * tokens * count * shape.head_dim for count in (heads, groups))
    if shape.qk_norm:  # their input is the projection's whole output
        kept += query + 2 * key + _FLOAT32 * tokens * (heads + groups)
    if again:
        return kept + query + 2 * key
    return kept + _core(setting, tokens, heads, groups, query + 2 * key)


def _latent_projections(setting: ActivationSetting, outside: int) -> int:
    """Returns the bytes of the inputs of norms, of which one is a view of a whole projection, and of their outputs."""
    latent, e = setting.shape.latent, setting.itemsize
    assert latent is not None
    kept = _norm(setting, outside, latent.kv_rank) + e * outside * (latent.kv_rank + latent.rope_dim)
    if latent.query_rank is not None:
        kept += _norm(setting, outside, latent.query_rank) + e * outside * latent.query_rank
    return kept


def _core(
    setting: ActivationSetting, tokens: int, heads: int, groups: int, inputs: int, *, output_shared: bool = True
) -> int:
    """Returns the bytes of the attention kernel: its ``inputs`` (without context parallelism), output and sums.

    A fused kernel's output is the output projection's input (``output_shared``) where values are as wide as keys.
    """
    cp, e, width = setting.layout.cp, setting.itemsize, setting.shape.head_dim
    output = e * tokens * heads * width
    sums = _FLOAT32 * tokens * heads
    if setting.kernels == "padded":
        output *= 2  # padded, and the copy in place
    elif output_shared and cp == 1:
        output = 0
    if cp > 1 and setting.parallel.cp_method != "ulysses":
        # Keys and values of whole sequences, and of half a chunk twice.
        visible = tokens * (2 * cp + 1) // 2
        keys_and_values = e * visible * groups * width * 2
        if setting.kernels == "padded" or output_shared:
            inputs = e * tokens * heads * width  # queries: keys and values of this rank alone are let go
        return inputs + keys_and_values + output + sums
    return inputs + output + sums


def _dense(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes of SwiGLU: input, gate and up."""
    e, size = setting.itemsize, setting.shape.ffn_size
    kept = e * (tokens // setting.sequence_cut) * setting.shape.hidden_size
    if recompute and setting.recomputes("mlp"):
        return kept
    return kept + 2 * e * tokens * size // setting.layout.tp


def _experts(setting: ActivationSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes of an expert layer with tokens spread evenly over experts."""
    experts, e, layout = setting.shape.experts, setting.itemsize, setting.layout
    assert experts is not None
    outside = tokens // setting.sequence_cut
    layer_input = e * outside * setting.shape.hidden_size
    if recompute and setting.recomputes("moe"):
        return layer_input
    kept = _router(setting, outside) + _rows(setting, outside)
    alone = layout.ep * layout.etp == 1
    if (alone or experts.shared_ffn_size) and _router_itemsize(setting) != e:
        kept += layer_input  # else the router's
    if experts.shared_ffn_size and not (recompute and setting.recomputes("shared_experts")):
        kept += 2 * e * tokens * experts.shared_ffn_size // layout.tp
    return kept


def _rows(setting: ActivationSetting, outside: int) -> int:
    """Returns the bytes of the experts' rows: gate and up, weights, and their order by expert in three indices.

    On one rank their input is the layer's; over several, each row is an input that has arrived, or each token of all.
    """
    experts, e, layout = setting.shape.experts, setting.itemsize, setting.layout
    assert experts is not None
    selected, width = outside * experts.top_k, setting.shape.hidden_size
    rows = selected * layout.etp
    kept = 2 * e * rows * (experts.ffn_size // layout.etp)
    own = _FLOAT32 + 3 * _INT64  # of a choice
    if layout.ep * layout.etp == 1:
        return kept + selected * own
    if setting.parallel.expert_dispatch == "allgather":
        return kept + outside * layout.ep * layout.etp * (e * width + experts.top_k * own)
    return kept + rows * (e * width + own) + 2 * _INT64 * rows


def _router(setting: ActivationSetting, outside: int) -> int:
    """Returns the bytes of the router's input, logits and selected experts."""
    experts, itemsize = setting.shape.experts, _router_itemsize(setting)
    assert experts is not None
    return outside * (itemsize * (setting.shape.hidden_size + experts.num_experts) + _INT64 * experts.top_k)


def _router_itemsize(setting: ActivationSetting) -> int:
    """Returns the item size of the router's stored input: a float32 copy, or the output of the norm."""
    return _FLOAT32 if setting.float32_router else setting.itemsize
