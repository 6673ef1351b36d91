"""The table that dense Llama-like families share; what differs is in the shape (biases, query and key norms)."""

from __future__ import annotations

from rlhpc.models.shape import ModelShape
from rlhpc.models.tables import Cut, Row, Where

_HF, _LOCAL = "model.layers.{layer}.", "decoder.layers.{layer}."


def dense_table(shape: ModelShape) -> list[Row]:
    """Rows of embedding, one layer, final norm and head."""
    rows = [
        Row(
            "model.embed_tokens.weight",
            (shape.vocab_size, shape.hidden_size),
            "embedding.word_embeddings.weight",
            Cut.VOCAB,
            Where.FIRST,
        ),
        *attention_rows(shape),
        *mlp_rows(shape),
        _layer_norm("input_layernorm.weight", shape),
        Row(
            _HF + "post_attention_layernorm.weight",
            (shape.hidden_size,),
            _LOCAL + "pre_mlp_layernorm.weight",
            Cut.WHOLE,
        ),
        Row("model.norm.weight", (shape.hidden_size,), "decoder.final_layernorm.weight", Cut.WHOLE, Where.LAST),
    ]
    if not shape.tied_embeddings:
        rows.append(
            Row(
                "lm_head.weight",
                (shape.vocab_size, shape.hidden_size),
                "output_layer.weight",
                Cut.VOCAB,
                Where.LAST,
            )
        )
    return rows


def attention_rows(shape: ModelShape) -> list[Row]:
    """Grouped-query attention: q, k and v fused by query group in Megatron."""
    hf, local = _HF + "self_attn.", _LOCAL + "self_attention."
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


def mlp_rows(shape: ModelShape) -> list[Row]:
    """SwiGLU: gate and up fused in Megatron's first linear."""
    hf, local = _HF + "mlp.", _LOCAL + "mlp."
    up = (shape.ffn_size, shape.hidden_size)
    return [
        Row(hf + "gate_proj.weight", up, local + "linear_fc1.weight", Cut.GATE_UP, part=0),
        Row(hf + "up_proj.weight", up, local + "linear_fc1.weight", Cut.GATE_UP, part=1),
        Row(hf + "down_proj.weight", (shape.hidden_size, shape.ffn_size), local + "linear_fc2.weight", Cut.COLUMNS),
    ]


def _layer_norm(name: str, shape: ModelShape) -> Row:
    return Row(_HF + name, (shape.hidden_size,), _LOCAL + name, Cut.WHOLE)
