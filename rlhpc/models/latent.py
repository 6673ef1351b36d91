"""Table rows of multi-head latent attention."""

from __future__ import annotations

from rlhpc.models.dense import LAYER, LOCAL_LAYER
from rlhpc.models.shape import ModelShape
from rlhpc.models.tables import Cut, Row


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
