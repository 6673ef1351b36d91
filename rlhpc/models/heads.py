"""Heads that guess tokens from a policy's hidden states, as their config.json describes them and vLLM builds them
(llama_eagle.py, llama_eagle3.py): EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-3 (2025, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import read_json_object

KEY = "rollout.speculative.model"
_ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
}
_COUNTS = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class EagleHead:
    """A head's sizes. ``draft_vocab_size``: tokens that it guesses, by a table from them to the policy's (d2t) if they
    are fewer than ``vocab_size``. ``states``: hidden states of the policy that it reads."""

    method: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    states: int
    bias: bool

    @property
    def maps(self) -> bool:
        """True if it guesses some of the policy's tokens alone."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that its files must have, by their names there; EAGLE-3 calls its first layer
        ``midlayer``, too."""
        eagle3, hidden = self.method == "eagle3", self.hidden_size
        inputs = self.states * self.target_hidden_size if eagle3 else 2 * hidden
        found: dict[str, tuple[int, ...]] = {}
        if self.states or not eagle3:
            found["fc.weight"] = (hidden, inputs)
        if eagle3:
            found["norm.weight"] = (hidden,)
        for layer in range(self.num_layers):
            first, own = layer == 0, f"layers.{layer}."
            found |= self._layer(own, 2 * hidden if eagle3 and first else hidden)
            if eagle3 or not first:
                found[f"{own}input_layernorm.weight"] = (hidden,)
            if eagle3 and first:
                found[f"{own}hidden_norm.weight"] = (hidden,)
        if self.maps:
            found |= {"d2t": (self.draft_vocab_size,), "lm_head.weight": (self.draft_vocab_size, hidden)}
        return found

    @property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """Names of the tables that are the policy's if the files do not have them."""
        embedding: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        if self.maps or self.method == "eagle":
            return embedding
        return {**embedding, "lm_head.weight": (self.vocab_size, self.hidden_size)}

    def numel(self, tp: int) -> int:
        """Elements of ``tensors`` on one of ``tp`` ranks; each keys and values of one head at least."""
        matrices = {name: shape for name, shape in self.tensors.items() if "_proj.weight" in name or "lm_head" in name}
        kv = sum(prod(shape) for name, shape in matrices.items() if "k_proj" in name or "v_proj" in name)
        whole = sum(prod(shape) for name, shape in self.tensors.items() if name not in matrices)
        cut = (sum(map(prod, matrices.values())) - kv) // tp
        return whole + cut + kv // self.num_kv_heads * max(1, self.num_kv_heads // tp)

    def _layer(self, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        rows = {"q": queries, "k": keys, "v": keys}
        biases = {f"{own}{name}_proj.bias": (size,) for name, size in rows.items()}
        return {
            **{f"{own}{name}_proj.weight": (size, inputs) for name, size in rows.items()},
            f"{own}o_proj.weight": (hidden, queries),
            **({**biases, f"{own}o_proj.bias": (hidden,)} if self.bias else {}),
            f"{mlp}gate_proj.weight": (self.ffn_size, hidden),
            f"{mlp}up_proj.weight": (self.ffn_size, hidden),
            f"{mlp}down_proj.weight": (hidden, self.ffn_size),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }


@lru_cache(maxsize=8)  # a search needs it per layout
def read_head(folder: Path, method: str) -> EagleHead:
    """The head of a folder. Raises UserError for one that is not of this method, or that vLLM builds otherwise."""
    fields = read_json_object(folder / "config.json", remedy="restore the file")
    named = fields.get("architectures") or ["none"]
    if not isinstance(named, list) or named[0] not in _ARCHITECTURES[method]:
        raise _refused(f"architecture {str(named)[:80]}", f"use one of {', '.join(_ARCHITECTURES[method])}")
    for name in _COUNTS:
        if not isinstance(fields.get(name), int) or fields[name] < 1:
            raise _refused(
                f"{name} is {str(fields.get(name))[:80]} in its config.json", "use a head as it was published"
            )
    if unlike := [name for name in ("norm_before_fc", "fc_norm", "mlp_bias") if fields.get(name)]:
        raise _refused(f"{unlike[0]} of its config.json", "use a head without it")
    return _head(fields, method)


def _head(fields: Mapping[str, Any], method: str) -> EagleHead:
    options = fields.get("eagle_config") or {}
    layers = fields.get("eagle_aux_hidden_state_layer_ids") or options.get("eagle_aux_hidden_state_layer_ids")
    states = fields.get("num_aux_hidden_states") or len(layers or (0, 1, 2))
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    smaller = fields.get("draft_vocab_size") if method == "eagle3" else None
    return EagleHead(
        method=method,
        hidden_size=hidden,
        target_hidden_size=fields.get("target_hidden_size") or hidden,
        vocab_size=fields["vocab_size"],
        draft_vocab_size=min(smaller or fields["vocab_size"], fields["vocab_size"]),
        ffn_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or hidden // heads,
        states=states if options.get("use_aux_hidden_state", True) else 0,
        bias=bool(fields.get("attention_bias")),
    )


def _refused(what: str, remedy: str) -> UserError:
    return UserError(f"no head that guesses: {what}", where=KEY, remedy=remedy)
