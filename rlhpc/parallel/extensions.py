"""Packages that Megatron uses if they are installed."""

from __future__ import annotations

# Optional packages that Megatron imports, by the names it uses; NVIDIA's images have most of them.
EXTENSIONS = frozenset(
    {
        "amp_C",
        "apex",
        "deep_ep",
        "emerging_optimizers",
        "fast_hadamard_transform",
        "flash_attn",
        "flash_attn_3",
        "flash_mla",
        "flashattn_hopper",
        "fused_weight_gradient_mlp_cuda",
        "transformer_engine",
        "transformer_engine_torch",
    }
)
