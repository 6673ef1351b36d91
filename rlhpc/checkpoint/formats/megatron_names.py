"""Names of a layer's parameters in checkpoints of megatron-core, which are not those of our modules.

Its layers keep a norm in the linear layer after it, because Transformer Engine computes both in one operation. Its
specs without Transformer Engine rename their norms accordingly, but fewer of them (gpt_layer_specs.py,
``sharded_state_dict_keys_map``). Each can save the layers as one tensor, stacked, or one by one
(transformer_block.py, ``sharded_state_dict``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape

LAYERS = "decoder.layers."
Spec = Literal["te", "local"]
_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_EXPERTS = {
    "mlp.experts.w13": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.w2": "mlp.experts.experts.linear_fc2.weight",
}
_CONVERT_AGAIN = "convert the model again from its HuggingFace files"


@dataclass(frozen=True)
class NameForm:
    """How a checkpoint names parameters: of which spec, and whether the layers are stacked."""

    spec: Spec
    stacked: bool

    def key(self, shape: ModelShape, name: str, layer: int | None) -> str:
        """Key of our parameter ``name`` of a whole model."""
        if layer is None:
            return name
        own = name.removeprefix(f"{LAYERS}{layer}.")
        renamed = renamed_parts(shape, layer, self.spec)
        old = next((old for old in renamed if own.startswith(old)), None)
        if old is not None:
            own = renamed[old] + own.removeprefix(old)
        return LAYERS + ("" if self.stacked else f"{layer}.") + own


def written_form(shape: ModelShape) -> NameForm:
    """The form that megatron-core writes by default with Transformer Engine."""
    return NameForm("te", stacked=has_uniform_layers(shape))


def has_uniform_layers(shape: ModelShape) -> bool:
    """Whether all layers have experts, or none: only then megatron-core can stack them."""
    return shape.experts is None or len(shape.experts.layers) == shape.num_layers


def renamed_parts(shape: ModelShape, layer: int, spec: Spec = "te") -> dict[str, str]:
    """Beginnings of names inside a layer, by ours, that a checkpoint has otherwise."""
    has_experts = shape.experts is not None and layer in shape.experts.layers
    experts = _EXPERTS if has_experts else {}
    if spec == "local":
        return experts if shape.latent is not None else {**_INPUT_NORM, **_MLP_NORM, **experts}
    attention = _INPUT_NORM if shape.latent is None else _LATENT_NORMS
    return {**attention, **(experts if has_experts else _MLP_NORM)}


def found_form(shape: ModelShape, keys: Collection[str], folder: Path) -> NameForm:
    """The form of a checkpoint with these keys. Raises UserError for forms that cannot be read."""
    inside = [key.removeprefix(LAYERS) for key in keys if key.startswith(LAYERS)]
    if any(key.endswith((".experts.w13", ".experts.w2")) for key in inside) or _has_norms_of_modules(shape, inside):
        raise UserError(
            "was written by an older rlhpc, with names of parameters that megatron-core does not have",
            where=str(folder),
            remedy=_CONVERT_AGAIN,
        )
    if any(key.endswith(".weight_w") for key in inside):
        raise UserError(
            "has gate and up projections apart (singleton_local_shards), which is not supported",
            where=str(folder),
            remedy="save it without that option",
        )
    stacked = any(not key.partition(".")[0].isdigit() for key in inside)
    return NameForm("te" if _has_te_names(shape, inside) else "local", stacked)


def _has_norms_of_modules(shape: ModelShape, inside: Collection[str]) -> bool:
    """Whether a model without latent attention has norms under the names of our modules."""
    return shape.latent is None and any(key.endswith("input_layernorm.weight") for key in inside)


def _has_te_names(shape: ModelShape, inside: Collection[str]) -> bool:
    """Whether the names are those of the spec with Transformer Engine; if both have the same, yes."""
    if shape.latent is not None:
        return not any(key.endswith("self_attention.kv_layernorm.weight") for key in inside)
    if shape.experts is not None:
        return any(key.endswith("pre_mlp_layernorm.weight") for key in inside)
    return True
