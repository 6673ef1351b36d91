"""Types of a family's table: which HuggingFace tensor is where in Megatron's model.

A ``Row`` names one HuggingFace tensor (``{layer}`` and ``{expert}`` stand for numbers), its shape, and the Megatron
parameter that holds it, with its cut over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.shape import ModelShape


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
    """Which pipeline stage holds a tensor, and of a layer's tensors, which layers have it."""

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
