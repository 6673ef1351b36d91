"""Table rows that Llama-like families share; they differ in the shape (biases, query and key norms)."""

from __future__ import annotations

from rlhpc.models.shape import ModelShape
from rlhpc.models.tables import Cut, Row, Where

LAYER, LOCAL_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."


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
