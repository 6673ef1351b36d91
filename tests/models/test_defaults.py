"""A config.json that leaves fields out describes the model that transformers builds from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhpc.models import FAMILIES, ConfigReader, ModelShape

# Fields that some or all of transformers' classes have not.
_NOT_THEIRS = {
    "quantization_config",  # absent without quantisation
    "rope_scaling",  # names of transformers 4
    "rope_theta",
    "use_mrope",  # of Qwen2's vision models
    "scoring_func",  # of DeepSeek's own code
    "topk_method",
    "moe_layer_freq",
    *("auto_map", "aux_loss_alpha", "ep_size", "seq_aux"),
    "num_mtp_layers",  # names of one that the classes have under its other name
    "num_experts",
    "head_dim",
    "use_sliding_window",
}
_ALWAYS = {"model_type", "num_local_experts"}  # the second has two names


class Recorded(ConfigReader):
    """Remembers which fields must be there, and which may be absent."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields, "config.json")
        self.needed: set[str] = set()
        self.optional: set[str] = set()

    def need(self, name: str) -> Any:
        self.needed.add(name)
        return super().need(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.optional.add(name)
        return super().get(name, default)

    def expect(self, name: str, allowed: Any) -> None:
        self.optional.add(name)
        super().expect(name, allowed)


def described(family: str, fields: dict[str, Any]) -> tuple[ModelShape, Recorded]:
    reader = Recorded(fields)
    return FAMILIES[family].read(reader, FAMILIES[family].architectures[0]), reader


@pytest.fixture(scope="module")
def of_transformers() -> Callable[..., dict[str, Any]]:
    """All fields of a family's configuration, completed by transformers."""
    from transformers import AutoConfig

    def complete(family: str, **given: Any) -> dict[str, Any]:
        fields: dict[str, Any] = AutoConfig.for_model(family, **given).to_dict()
        return fields

    return complete


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_values_of_transformers(
    of_transformers: Callable[..., dict[str, Any]], family: str
) -> None:
    complete = of_transformers(family)
    shape, reader = described(family, complete)
    least = {name: complete[name] for name in reader.needed | (_ALWAYS & complete.keys())}
    assert described(family, least)[0] == shape


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_may_be_the_only_absent_one(of_transformers: Callable[..., dict[str, Any]], family: str) -> None:
    complete = of_transformers(family)
    shape, reader = described(family, complete)
    for name in reader.optional - reader.needed - _ALWAYS:
        rest = {key: value for key, value in complete.items() if key != name}
        assert described(family, rest)[0] == shape, name


@pytest.mark.parametrize("family", FAMILIES)
def test_optional_fields_are_those_of_transformers(of_transformers: Callable[..., dict[str, Any]], family: str) -> None:
    """A field under another name would be at its default forever."""
    complete = of_transformers(family)
    _, reader = described(family, complete)
    assert reader.optional - reader.needed - _NOT_THEIRS - complete.keys() == set()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "deepseek_v3"])
def test_null_is_not_absent(of_transformers: Callable[..., dict[str, Any]], family: str) -> None:
    """transformers takes a null for the number of heads of keys and values as that of all heads."""
    complete = of_transformers(family, num_key_value_heads=None)
    assert described(family, complete)[0].num_kv_heads == complete["num_attention_heads"]
    null = {**complete, "num_key_value_heads": None}
    assert described(family, null)[0].num_kv_heads == complete["num_attention_heads"]
