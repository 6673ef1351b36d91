"""Table rows that families with experts share."""

from __future__ import annotations

from rlhpc.models.dense import LAYER, LOCAL_LAYER, mlp_rows
from rlhpc.models.shape import ModelShape
from rlhpc.models.tables import Cut, Row, Where


def expert_rows(
    shape: ModelShape, name: str = "mlp.", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Row]:
    """Returns the rows of routers, experts and shared experts, and of the feed-forward part of dense layers.

    ``name`` is HuggingFace's module, ``parts`` are its names of an expert's gate, up and down projections.
    """
    experts = shape.experts
    assert experts is not None
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
