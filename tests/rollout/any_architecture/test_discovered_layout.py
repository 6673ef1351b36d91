"""The layout of parameters that a loader fills, found from coded tensors; with loaders that cut, fuse and transpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.core.errors import UserError
from rlhpc.rollout.discovered_layout import DiscoveredLayout
from rlhpc.rollout.vllm_discovery import discover_layout, viewed
from rlhpc.sharding.shards import Box, Shard, TensorSpec

Parameters = dict[str, Tensor]
Place = Callable[[Parameters, str, Tensor], None]


def discover(
    parameters: Mapping[str, tuple[int, ...]],
    tensors: list[TensorSpec],
    place: Place,
    dtype: torch.dtype = torch.float32,
) -> DiscoveredLayout:
    """The layout under a loader that calls ``place`` for each tensor; fills parameters by it, and compares."""
    held = {name: torch.empty(shape, dtype=dtype) for name, shape in parameters.items()}

    def load(stream: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in stream:
            place(held, name, tensor)

    layout = discover_layout(held, load, tensors, dtype)
    whole = {tensor.name: torch.randn(tensor.shape).to(dtype) for tensor in tensors}
    for own in held.values():
        own.zero_()
    load((name, tensor.clone()) for name, tensor in whole.items())
    loaded = {name: own.clone() for name, own in held.items()}
    for own in held.values():
        own.fill_(9.0)
    layout.zero_padding(held)
    for shard in layout.shards:
        view = layout.views.get(shard.local_name)
        own = viewed(held[view.parameter if view else shard.local_name], view)
        own[shard.local_box.slices] = whole[shard.tensor.name][shard.box.slices].reshape(shard.local_box.shape)
    assert all(torch.equal(held[name], loaded[name]) for name in held)
    return layout


def shard_of(layout: DiscoveredLayout, name: str) -> Shard:
    (found,) = (shard for shard in layout.shards if shard.tensor.name == name)
    return found


def fused(held: Parameters, name: str, tensor: Tensor) -> None:
    """q, k and v rows in one parameter; columns 8 to 16 of an output; a vocabulary padded to 64 rows."""
    rows = {"q": slice(0, 12), "k": slice(12, 16), "v": slice(16, 20)}
    if name in rows:
        held["qkv"][rows[name]] = tensor
    elif name == "out":
        held["out"].copy_(tensor[:, 8:16])
    else:
        held["table"][:50] = tensor
        held["table"][50:] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_cut_and_padded_parameters(dtype):
    tensors = [TensorSpec(*each) for each in (("q", (12, 6)), ("k", (4, 6)), ("v", (4, 6)))]
    tensors += [TensorSpec("out", (6, 300)), TensorSpec("table", (50, 6))]
    layout = discover({"qkv": (20, 6), "out": (6, 8), "table": (64, 6)}, tensors, fused, dtype)
    assert shard_of(layout, "v") == Shard(tensors[2], Box((0, 0), (4, 6)), "qkv", (16, 0))
    assert shard_of(layout, "out") == Shard(tensors[3], Box((0, 8), (6, 16)), "out", (0, 0))
    assert shard_of(layout, "table").box == Box((0, 0), (50, 6))
    assert layout.padded == {"table"}


def stacked(held: Parameters, name: str, tensor: Tensor) -> None:
    """Half of each expert's gate and up rows, one above the other; a stack that the loader transposes."""
    if name == "stack":
        held["w2"].copy_(tensor[:, 2:4].permute(0, 2, 1).contiguous())
    else:
        kind, expert = name.split(".")
        held["w13"][int(expert), 0 if kind == "gate" else 4 :][:4] = tensor[4:]


def test_experts_in_stacks_some_of_them_transposed():
    tensors = [TensorSpec(f"{kind}.{e}", (8, 6), expert=e) for e in range(5) for kind in ("gate", "up")]
    tensors.append(TensorSpec("stack", (5, 8, 6)))
    layout = discover({"w13": (5, 8, 6), "w2": (5, 6, 2)}, tensors, stacked)
    assert shard_of(layout, "up.3") == Shard(tensors[7], Box((4, 0), (8, 6)), "w13", (3, 4, 0))
    stack = shard_of(layout, "stack")
    assert stack.box == Box((0, 2, 0), (5, 4, 6))
    assert layout.views[stack.local_name].axes == (0, 2, 1)
    assert layout.views[stack.local_name].shape((5, 6, 2)) == (5, 2, 6)


def by_head(held: Parameters, name: str, tensor: Tensor) -> None:
    """Rows of each head as q, k, v in the file, all q before all k in the parameter."""
    del name
    held["qkv"].copy_(tensor.view(4, 3, 5, 8).transpose(0, 1).reshape(60, 8))


def test_rows_in_the_order_of_heads():
    layout = discover({"qkv": (60, 8)}, [TensorSpec("qkv", (60, 8))], by_head)
    assert len(layout.shards) == 12
    assert sum(shard.box.volume for shard in layout.shards) == 480


def shapes_of_any_size(held: Parameters, name: str, tensor: Tensor) -> None:
    held[name].copy_(tensor.reshape(held[name].shape))


def test_vectors_scalars_and_axes_of_size_one():
    shapes = {"one": (1,), "scalar": (), "row": (1, 7), "convolution": (6, 3), "norm": (9,)}
    tensors = [TensorSpec(name, (6, 1, 3) if name == "convolution" else size) for name, size in shapes.items()]
    layout = discover(shapes, tensors, shapes_of_any_size)
    assert len(layout.shards) == 5
    assert layout.views[shard_of(layout, "convolution").local_name].axes == (0, None, 1)


def patched(held: Parameters, name: str, tensor: Tensor) -> None:
    """A block inside another tensor, between the lines that are read first."""
    if name == "whole":
        held["p"].copy_(tensor)
    else:
        held["p"][50:53, 20:22] = tensor


def test_a_block_between_the_lines_is_found_by_refinement():
    tensors = [TensorSpec("whole", (90, 70)), TensorSpec("patch", (3, 2))]
    layout = discover({"p": (90, 70)}, tensors, patched)
    assert shard_of(layout, "patch") == Shard(tensors[1], Box((0, 0), (3, 2)), "p", (50, 20))


def many(held: Parameters, name: str, tensor: Tensor) -> None:
    held["p"][int(name)] = tensor


def test_more_tensors_and_rows_than_bfloat16_counts():
    tensors = [TensorSpec(str(number), (3,)) for number in range(700)]
    layout = discover({"p": (700, 3)}, tensors, many, torch.bfloat16)
    assert shard_of(layout, "600").local_start == (600, 0)


def transforming(change: Callable[[Tensor], Any]) -> Place:
    def place(held: Parameters, name: str, tensor: Tensor) -> None:
        held[name].copy_(change(tensor))

    return place


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tensor: tensor + 0.5, id="added"),
        pytest.param(lambda tensor: -tensor.exp(), id="exponential"),
        pytest.param(lambda tensor: tensor * 2, id="doubled"),
    ],
)
def test_a_parameter_of_other_values_is_named(change):
    with pytest.raises(UserError, match="'decay' is not made up of the model's weights"):
        discover({"decay": (400, 300)}, [TensorSpec("decay", (400, 300))], transforming(change))


def test_a_parameter_that_the_loader_leaves_is_named():
    def place(held: Parameters, name: str, tensor: Tensor) -> None:
        held["a"].copy_(tensor)

    with pytest.raises(UserError, match="no tensor of the model is loaded into vLLM's parameter 'b'"):
        discover({"a": (4, 4), "b": (4,)}, [TensorSpec("a", (4, 4))], place)


def test_a_buffer_without_weights_keeps_its_value():
    parameters = {"a": torch.empty(4, 4)}
    buffers = {"scalar": torch.zeros(1), "scale": torch.full((2,), 3.0)}

    def load(stream: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in stream:
            (parameters | buffers)[name].copy_(tensor)

    tensors = [TensorSpec("a", (4, 4)), TensorSpec("scalar", (1,))]
    layout = discover_layout(parameters, load, tensors, torch.float32, buffers)
    assert {shard.local_name for shard in layout.shards} == {"a", "scalar"}
    assert buffers["scale"].tolist() == [3.0, 3.0]


def test_a_parameter_of_a_smaller_dtype_is_named():
    held = {"alpha": torch.empty(3, dtype=torch.bfloat16)}

    def load(stream: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in stream:
            held[name].copy_(tensor)

    with pytest.raises(UserError, match="'alpha' in bfloat16 in a model of float32; set it to bfloat16"):
        discover_layout(held, load, [TensorSpec("alpha", (3,))], torch.float32)


def test_what_a_loader_fails_with_is_one_line():
    def load(stream: Iterator[tuple[str, Tensor]]) -> None:
        raise KeyError("rotary")

    with pytest.raises(UserError, match=r"vLLM's loader rejects weights of the model \(KeyError: 'rotary'\)"):
        discover_layout({"a": torch.empty(3)}, load, [TensorSpec("a", (3,))], torch.float32)
