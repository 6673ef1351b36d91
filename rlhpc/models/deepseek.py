"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention, experts in groups, shared experts.

Multi-token-prediction layers (num_nextn_predict_layers), stored after the last layer, are not built: neither the
policy nor its log-probs use them.
"""

from __future__ import annotations

from rlhpc.models.config_reader import ConfigReader, UnsupportedByFamily
from rlhpc.models.description import Experts, LatentAttention
from rlhpc.models.shape import ModelShape, read_dense
from rlhpc.models.tables import Family, Row, expert_rows, frame_table, latent_rows

_NEUTRAL = (
    "auto_map",  # the same model as remote code
    "aux_loss_alpha",  # of pre-training
    "ep_size",  # of DeepSeek's own inference code
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "seq_aux",
)


def _read(reader: ConfigReader, architecture: str) -> ModelShape:
    for name in _NEUTRAL:
        reader.get(name)
    reader.expect("attention_bias", (False,))
    reader.expect("moe_layer_freq", (1,))
    latent, experts = _read_latent(reader), reader.checked_experts(_read_experts(reader))
    return read_dense(
        reader,
        "deepseek_v3",
        architecture,
        latent=latent,
        experts=experts,
        head_dim=latent.nope_dim + latent.rope_dim,
        num_kv_heads=int(reader.need("num_attention_heads")),
    )


def _read_latent(reader: ConfigReader) -> LatentAttention:
    # The reference code's norms between down and up projections always use this value, vLLM's use the field.
    reader.expect("rms_norm_eps", (1e-6,))
    rank = reader.nullable("q_lora_rank", 1536)
    nope_dim, rope_dim = map(reader.need, ("qk_nope_head_dim", "qk_rope_head_dim"))
    reader.expect("head_dim", (None, rope_dim))  # transformers' name of the rotated dimensions
    reader.expect("qk_head_dim", (None, nope_dim + rope_dim))
    return LatentAttention(
        query_rank=None if rank is None else int(rank),
        kv_rank=int(reader.need("kv_lora_rank")),
        nope_dim=int(nope_dim),
        rope_dim=int(rope_dim),
        value_dim=int(reader.need("v_head_dim")),
        interleaved_rope=bool(reader.get("rope_interleave", True)),
    )


def _read_experts(reader: ConfigReader) -> Experts:
    reader.expect("scoring_func", ("sigmoid",))
    reader.expect("topk_method", ("noaux_tc",))
    reader.expect("norm_topk_prob", (True,))
    top_k, groups = int(reader.need("num_experts_per_tok")), int(reader.nullable("n_group", 8) or 1)
    grouped = groups > 1
    kept = int(reader.nullable("topk_group", 4) or (reader.need("topk_group") if grouped else 1))
    if grouped and top_k != 2 * kept:
        # The reference code ranks groups by their two best experts, Megatron by their top_k / topk_group best.
        raise UnsupportedByFamily(
            f"num_experts_per_tok {top_k} with topk_group {kept} is not supported",
            where=reader.where,
            remedy="supported: two experts for each group kept",
        )
    ffn_size = int(reader.need("moe_intermediate_size"))
    first, layers = int(reader.nullable("first_k_dense_replace", 3) or 0), int(reader.need("num_hidden_layers"))
    return Experts(
        num_experts=int(reader.need("n_routed_experts")),
        top_k=top_k,
        ffn_size=ffn_size,
        layers=tuple(range(first, layers)),
        score="sigmoid",
        bias=True,
        shared_ffn_size=ffn_size * int(reader.nullable("n_shared_experts", 1) or 0),
        num_groups=groups if grouped else None,
        groups_kept=kept if grouped else None,
        scale=float(reader.get("routed_scaling_factor", 2.5)),
    )


def _table(shape: ModelShape) -> list[Row]:
    return frame_table(shape, latent_rows(shape), expert_rows(shape))


DEEPSEEK_V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _read, _table)
