"""Operators and bytes of one layer, forward and backward: Llama-3.1-8B and Qwen3-30B-A3B on 4,096 packed tokens.

    python -m bench.layer_cost                     # a minute a model; 12 GB of memory
    python -m bench.layer_cost --model 8b --top 20

The real layer runs in bfloat16 inside Megatron's data parallelism, which adds gradients to float32 buffers. A GPU's
kernels count as one operator each, although other operators replace them on a CPU: attention with its queries, keys,
values, output and sums, PyTorch's norm with its input, output and sums, products added to the float32 buffers of
gradients, an expert layer's all at once. So does a function that is compiled. ``kept``: bytes of unique storages that
autograd saves, without weights, for each token. ``least``: the layer's matrix products, attention, norms, activation
and residuals with each operand once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from bench.operators import OperatorCount, size_of

TOKENS, SEQUENCES = 4096, (1024, 1536, 512, 1024)
MODELS = ("8b", "30b-a3b")


@dataclass(frozen=True)
class LayerCost:
    operators: int
    bytes: int
    kept: float  # bytes of a token
    syncs: int  # waits of the host for values, without those of an exchange between ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--top", type=int, default=0, help="operators to list, by their bytes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _join()
    for name in options.model:
        for microbatch, (cost, count) in zip(("first", "next"), measure(name), strict=True):
            if options.json:
                print(json.dumps({"model": name, "microbatch": microbatch, **vars(cost)}))
                continue
            print(
                f"{name}, {microbatch} microbatch: {cost.operators} operators, {cost.bytes / 1e9:.2f} GB (least "
                f"{least(name) / 1e9:.2f}), {cost.kept:,.0f} bytes kept of a token, {cost.syncs} syncs"
            )
            for operator, size in count.bytes.most_common(options.top):
                print(f"  {operator:40} {count.calls[operator]:4} {size / 1e9:8.3f} GB")


def measure(name: str) -> list[tuple[LayerCost, OperatorCount]]:
    """Cost of the layer in an update's first microbatch, whose buffers of gradients are zeroed, and in its second."""
    from rlhpc.backends.kernels.compiled import choose_compilation
    from rlhpc.data.collate import pack_batch
    from rlhpc.parallel.compat import megatron_device

    choose_compilation("functions")

    counts = [OperatorCount(), OperatorCount()]
    found = []
    for number, count in enumerate(counts):
        with count.counted_compilation():
            if not number:
                actor, layer = _layer(name)
                random = torch.Generator().manual_seed(0)
                tokens = [torch.randint(0, 512, (length,), generator=random).numpy() for length in SEQUENCES]
                batch = pack_batch([(one, 1) for one in tokens], sample_ids=range(len(tokens)))
                params = _params(actor, batch)
                shared = sum(size_of(tensor) for tensor in (params.cos, params.sin))  # of all layers
            _opaque_attention(count)
            _opaque_norm(count)
            _opaque_weight_gradient(count)
            _opaque_gradients()
            x = torch.randn(TOKENS, 1, actor.shape.hidden_size, generator=random).bfloat16().requires_grad_()
            gradient = torch.randn(x.shape, generator=random).bfloat16()
            ledger = _Ledger(layer)
            with megatron_device():
                # A pass of its own: hooks on saved tensors return a copy of a weight, without buffer.
                with torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda tensor: tensor):
                    layer(x, packed_seq_params=params)
                count.clear()
                with count:
                    if not number:
                        actor._chunks[0].zero_grad_buffer()
                    output, _ = layer(x, packed_seq_params=params)
                    torch.autograd.backward((output,), grad_tensors=(gradient,))
        kept = (sum(ledger.kept.values()) - shared) / TOKENS
        found.append((LayerCost(*count.total, kept, count.syncs.total()), count))
    return found


class _Ledger:
    """Storages that autograd saves, without weights."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._weights = {param.untyped_storage()._cdata for param in layer.parameters()}
        self.kept: dict[int, int] = {}
        self._held: list[Any] = []  # so that no other gets its address

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self.kept[storage._cdata] = storage.nbytes()
            self._held.append(storage)
        return tensor


def least(name: str) -> int:
    """Bytes of the operands of the layer's operators, each once, forward and backward; gradients added in float32."""
    shape = _shape(name)
    h, t, e = shape.hidden_size, TOKENS, 2
    heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def product(rows: int, inner: int, outer: int, matrices: int = 1) -> int:
        weights = matrices * inner * outer
        ends = rows * (inner + outer)
        return 3 * e * (weights + ends) - e * weights + 8 * weights  # the weight's gradient is read and written

    attention = e * t * (heads + 2 * groups)
    found = product(t, h, heads + 2 * groups) + product(t, heads, h)
    found += (attention + e * t * heads) + 2 * (attention + e * t * heads)  # forward; backward
    found += 3 * e * t * (heads + groups)  # rotation, in place: read and written, and back
    norms, residuals = 2 * (2 + 3) * e * t * h, 2 * (3 + 2) * e * t * h
    found += norms + residuals
    if shape.experts is None:
        ffn, rows, matrices = shape.ffn_size, t, 1
    else:
        ffn, rows, matrices = shape.experts.ffn_size, t * shape.experts.top_k, shape.experts.num_experts
        found += product(t, h, matrices) + 2 * e * (2 * t + 2 * rows) * h  # router; tokens to experts and back
    found += product(rows, h, 2 * ffn, matrices) + product(rows, ffn, h, matrices)
    return found + e * rows * ffn * (3 + 5)  # activation, forward and backward


def _shape(name: str) -> Any:
    from bench.shapes import model_fields
    from rlhpc.models import shape_of

    return replace(shape_of(model_fields(name, 1, "bfloat16"), where=name), vocab_size=512)


def _join() -> None:
    from rlhpc.parallel.groups import build_groups
    from rlhpc.sharding.layout import ParallelLayout

    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    build_groups(ParallelLayout(1), seed=0)


def _layer(name: str) -> tuple[Any, torch.nn.Module]:
    """Back end of a model of one layer, with gradients but without an optimizer, and the layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection, ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.sharding.layout import ParallelLayout

    settings = ModelSettings(ParallelSection(), MemorySection(), MoeSection(), OptimizerSection(learning_rate=1e-6))
    actor = MegatronBackend(_shape(name), ParallelLayout(1), RankInfo.from_environ(), "bfloat16", settings)
    (layer,) = (module for model in actor.models for module in model.modules() if isinstance(module, TransformerLayer))
    torch.manual_seed(0)
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(1.0 if param.dim() == 1 else 0.0, 0.02)
    return actor, layer.train()


def _params(actor: Any, batch: Any) -> Any:
    from rlhpc.backends.megatron.packed import local_batch

    (split,) = actor._splits([batch])
    return local_batch(batch, split, 0, actor._rope).params


def _opaque_attention(count: OperatorCount) -> None:
    """Attention as a GPU's kernel: one operator forward and one backward."""
    from rlhpc.backends.kernels import packed_attention

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            output, sums = torch.zeros_like(query), query.new_zeros(query.shape[:2], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, sums)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value, output, sums = ctx.saved_tensors
            count._inside = True
            grads = tuple(map(torch.zeros_like, (query, key, value)))
            count._inside = False
            count.add("attention backward", [gradient, query, key, value, output, sums, *grads])
            return grads

    def attend(query: Any, key: Any, value: Any, *_: Any) -> Any:
        inside, count._inside = count._inside, True
        output = Kernel.apply(query, key, value)
        count._inside = inside
        count.add("attention", [query, key, value, output])
        return output

    packed_attention._attend_padded = attend


def _opaque_norm(count: OperatorCount) -> None:
    """PyTorch's norm as a GPU's kernel (_fused_rms_norm): it keeps its input and a number for each row."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
            scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
            ctx.save_for_backward(x, weight, scale)
            return (x.float() * scale).to(x.dtype) * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, weight, scale = ctx.saved_tensors
            count._inside = True
            grads = torch.zeros_like(x), torch.zeros_like(weight)
            count._inside = False
            count.add("rms_norm backward", [gradient, x, weight, scale, *grads])
            return *grads, None

    def rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
        inside, count._inside = count._inside, True
        output = Kernel.apply(x, weight, eps)
        count._inside = inside
        count.add("rms_norm", [x, weight, output])
        return output

    torch.nn.functional.rms_norm = rms_norm


def _opaque_weight_gradient(count: OperatorCount) -> None:
    """A weight's gradient as a GPU's product, which reads and writes the float32 buffer (torch.addmm)."""
    from rlhpc.backends.kernels import gradients

    def add(buffer: Any, output_gradient: Any, x: Any) -> None:
        if not count._inside:
            count.add("addmm", [buffer, buffer, output_gradient, x])

    gradients._add_computed = add


def _opaque_gradients() -> None:
    """Gradients of experts' weights as a GPU's kernel (grouped_kernel.py), which reads and writes their buffer."""
    from rlhpc.backends.kernels import expert_mlp

    expert_mlp.add_grouped_product = OperatorCount.region("expert gradients", expert_mlp.add_grouped_product)


if __name__ == "__main__":
    sys.exit(main())
