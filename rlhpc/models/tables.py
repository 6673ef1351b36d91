"""Types of a family's table, which maps HuggingFace's tensors to Megatron's model, and rows that families share.

A ``Row`` names one HuggingFace tensor (``{layer}`` and ``{expert}`` stand for numbers), its shape, and the Megatron
parameter that holds it, with its cut over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.shape import ModelShape

LAYER, LOCAL_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."


class Cut(Enum):
    """Division of a Megatron parameter over the tensor-parallel ranks."""

    WHOLE = "whole"  # a copy on every rank
    ROWS = "rows"  # dim 0: column-parallel linear, in HF's [out, in]
    COLUMNS = "columns"  # dim 1: row-parallel linear
    VOCAB = "vocab"  # dim 0, padded at the end to a multiple of tp
    QKV = "qkv"  # dim 0 of [q heads of group 0, k 0, v 0, q heads of group 1, …]
    GATE_UP = "gate_up"  # dim 0 of each rank: its part of gate, then its part of up
    EXPERT_GATE_UP = "expert_gate_up"  # one expert's GATE_UP in [local experts, 2 x ffn / etp, hidden]
    EXPERT_DOWN = "expert_down"  # one expert's COLUMNS in [local experts, hidden, ffn / etp]


class Where(Enum):
    """Pipeline stage that holds a tensor, and the layers that have a layer's tensor."""

    FIRST = "first"
    LAYER = "layer"
    DENSE_LAYER = "dense_layer"  # layers without experts
    EXPERT_LAYER = "expert_layer"  # layers with experts
    LAST = "last"


@dataclass(frozen=True)
class Row:
    hf_name: str
    shape: tuple[int, ...]
    local_name: str
    cut: Cut
    where: Where = Where.LAYER
    part: int = 0  # in a fused parameter: 0 q or gate, 1 k or up, 2 v
    engine_name: str = ""  # the engine's parameter, where neither HuggingFace's name nor the cut implies it
    engine_start: int = 0  # first row in it
    float32: bool = False  # float32 in a model of any dtype

    @property
    def of_each_expert(self) -> bool:
        return self.cut in (Cut.EXPERT_GATE_UP, Cut.EXPERT_DOWN)


@dataclass(frozen=True)
class Family:
    """One model family: the config fields it understands and its table."""

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader, str], ModelShape]
    table: Callable[[ModelShape], list[Row]]


def dense_table(shape: ModelShape) -> list[Row]:
    """Returns the table of a family with grouped-query attention and a SwiGLU feed-forward part in every layer."""
    return frame_table(shape, attention_rows(shape), mlp_rows(shape))


def frame_table(shape: ModelShape, attention: list[Row], feed_forward: list[Row]) -> list[Row]:
    """Returns embedding, layers of the given parts with an RMS norm before each, final norm and head."""
    vocab, norm = (shape.vocab_size, shape.hidden_size), (shape.hidden_size,)
    pre_mlp = "post_attention_layernorm.weight"
    rows = [
        Row("model.embed_tokens.weight", vocab, "embedding.word_embeddings.weight", Cut.VOCAB, Where.FIRST),
        *attention,
        *feed_forward,
        Row(LAYER + "input_layernorm.weight", norm, LOCAL_LAYER + "input_layernorm.weight", Cut.WHOLE),
        Row(LAYER + pre_mlp, norm, LOCAL_LAYER + "pre_mlp_layernorm.weight", Cut.WHOLE),
        Row("model.norm.weight", norm, "decoder.final_layernorm.weight", Cut.WHOLE, Where.LAST),
    ]
    if shape.head == "value":  # HuggingFace's name in its sequence classifiers
        rows.append(Row("score.weight", (1, shape.hidden_size), "output_layer.weight", Cut.WHOLE, Where.LAST))
    elif not shape.tied_embeddings:
        rows.append(Row("lm_head.weight", vocab, "output_layer.weight", Cut.VOCAB, Where.LAST))
    return rows


def attention_rows(shape: ModelShape) -> list[Row]:
    """Returns the rows of grouped-query attention: q, k and v fused by query group in Megatron."""
    hf, local = LAYER + "self_attn.", LOCAL_LAYER + "self_attention."
    heads = (("q_proj", shape.num_heads), ("k_proj", shape.num_kv_heads), ("v_proj", shape.num_kv_heads))
    rows = []
    for part, (name, count) in enumerate(heads):
        size = count * shape.head_dim
        rows.append(
            Row(f"{hf}{name}.weight", (size, shape.hidden_size), local + "linear_qkv.weight", Cut.QKV, part=part)
        )
        if shape.qkv_bias:
            rows.append(Row(f"{hf}{name}.bias", (size,), local + "linear_qkv.bias", Cut.QKV, part=part))
    out = (shape.hidden_size, shape.num_heads * shape.head_dim)
    rows.append(Row(hf + "o_proj.weight", out, local + "linear_proj.weight", Cut.COLUMNS))
    if shape.qk_norm:
        rows.append(Row(hf + "q_norm.weight", (shape.head_dim,), local + "q_layernorm.weight", Cut.WHOLE))
        rows.append(Row(hf + "k_norm.weight", (shape.head_dim,), local + "k_layernorm.weight", Cut.WHOLE))
    return rows


def mlp_rows(
    shape: ModelShape, name: str = "mlp.", ffn_size: int | None = None, where: Where = Where.LAYER
) -> list[Row]:
    """Returns the rows of SwiGLU: gate and up fused in Megatron's first linear. ``name``: of the module in both."""
    hf, local, size = LAYER + name, LOCAL_LAYER + name, ffn_size or shape.ffn_size
    up, down = (size, shape.hidden_size), (shape.hidden_size, size)
    return [
        Row(hf + "gate_proj.weight", up, local + "linear_fc1.weight", Cut.GATE_UP, where, part=0),
        Row(hf + "up_proj.weight", up, local + "linear_fc1.weight", Cut.GATE_UP, where, part=1),
        Row(hf + "down_proj.weight", down, local + "linear_fc2.weight", Cut.COLUMNS, where),
    ]


def expert_rows(
    shape: ModelShape, name: str = "mlp.", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Row]:
    """Returns the rows of routers, experts and shared experts, and of the feed-forward part of layers without them.

    ``name`` is HuggingFace's module, ``parts`` are its names of an expert's gate, up and down projections.
    """
    experts = shape.experts
    if experts is None:
        return mlp_rows(shape)
    hf, local, where = LAYER + name, LOCAL_LAYER + "mlp.", Where.EXPERT_LAYER
    count, up, down = experts.num_experts, (experts.ffn_size, shape.hidden_size), (shape.hidden_size, experts.ffn_size)
    rows = [Row(hf + "gate.weight", (count, shape.hidden_size), local + "router.weight", Cut.WHOLE, where)]
    if experts.bias:
        bias = "router.expert_bias"
        name_of_bias = hf + "gate.e_score_correction_bias"
        rows.append(Row(name_of_bias, (count,), local + bias, Cut.WHOLE, where, float32=True))
    one = hf + "experts.{expert}."
    rows += [
        Row(f"{one}{parts[0]}.weight", up, local + "experts.w13", Cut.EXPERT_GATE_UP, where, part=0),
        Row(f"{one}{parts[1]}.weight", up, local + "experts.w13", Cut.EXPERT_GATE_UP, where, part=1),
        Row(f"{one}{parts[2]}.weight", down, local + "experts.w2", Cut.EXPERT_DOWN, where),
    ]
    if experts.shared_ffn_size:
        rows += mlp_rows(shape, "mlp.shared_experts.", experts.shared_ffn_size, where)
    if len(experts.layers) < shape.num_layers:
        rows += mlp_rows(shape, where=Where.DENSE_LAYER)
    return rows


def latent_rows(shape: ModelShape) -> list[Row]:
    """Returns the rows of the down projections (whole on every rank), norms, and up projections, cut by heads.

    The engine fuses both down projections in one parameter, queries' rows first.
    """
    latent = shape.latent
    assert latent is not None
    hf, local = LAYER + "self_attn.", LOCAL_LAYER + "self_attention."
    hidden, heads = shape.hidden_size, shape.num_heads
    queries, rank = heads * (latent.nope_dim + latent.rope_dim), latent.query_rank
    fused = "" if rank is None else hf + "fused_qkv_a_proj.weight"
    if rank is None:
        rows = [Row(hf + "q_proj.weight", (queries, hidden), local + "linear_q_proj.weight", Cut.ROWS)]
    else:
        rows = [
            Row(
                hf + "q_a_proj.weight",
                (rank, hidden),
                local + "linear_q_down_proj.weight",
                Cut.WHOLE,
                engine_name=fused,
            ),
            Row(hf + "q_a_layernorm.weight", (rank,), local + "q_layernorm.weight", Cut.WHOLE),
            Row(hf + "q_b_proj.weight", (queries, rank), local + "linear_q_up_proj.weight", Cut.ROWS),
        ]
    down = (latent.kv_rank + latent.rope_dim, hidden)
    up = (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    return [
        *rows,
        Row(
            hf + "kv_a_proj_with_mqa.weight",
            down,
            local + "linear_kv_down_proj.weight",
            Cut.WHOLE,
            engine_name=fused,
            engine_start=rank or 0,
        ),
        Row(hf + "kv_a_layernorm.weight", (latent.kv_rank,), local + "kv_layernorm.weight", Cut.WHOLE),
        Row(hf + "kv_b_proj.weight", up, local + "linear_kv_up_proj.weight", Cut.ROWS),
        Row(hf + "o_proj.weight", (hidden, heads * latent.value_dim), local + "linear_proj.weight", Cut.COLUMNS),
    ]
