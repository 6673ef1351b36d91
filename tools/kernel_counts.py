"""Counts of rlhpc's kernels (``RLHPC`` in rlhpc/plan/estimates/roofline.py) from operators and bytes of a layer.

python -m bench.layer_cost --json | python -m tools.kernel_counts                      # products add to gradients
python -m bench.layer_cost --json | python -m tools.kernel_counts --gradient-bytes 12  # written, read, added: 12

A layer's bytes without those of its matrix products and attention are passes over the hidden state, the feed-forward
state and copies for experts, three forward ones each: a backward pass counts twice. Passes over the feed-forward state
are taken as given. The head's and the optimizer's counts are not in a layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from bench.shapes import model_fields
from rlhpc.models import ModelShape, shape_of
from rlhpc.plan.estimates.roofline import RLHPC, KernelCounts

TOKENS, ITEMSIZE = 4096, 2  # of bench.layer_cost
DENSE, EXPERTS = "8b", "30b-a3b"
_PASS = 3 * ITEMSIZE * TOKENS  # bytes of a pass over one value of each token, forward and backward


def product_bytes(shape: ModelShape, gradient_bytes: float) -> float:
    """Bytes of a layer's matrix products and attention, forward and backward, each operand once."""
    heads, keys = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim

    def product(rows: int, inner: int, outer: int, matrices: int = 1) -> float:
        weights = matrices * inner * outer
        return 3 * ITEMSIZE * rows * (inner + outer) + (2 * ITEMSIZE + gradient_bytes) * weights

    hidden, experts = shape.hidden_size, shape.experts
    found = product(TOKENS, hidden, heads + keys) + product(TOKENS, heads, hidden)
    found += _PASS * (2 * heads + keys)  # attention: queries, keys, values and output
    if experts is None:
        return found + product(TOKENS, hidden, 2 * shape.ffn_size) + product(TOKENS, shape.ffn_size, hidden)
    rows, count = TOKENS * experts.top_k, experts.num_experts
    found += product(TOKENS, hidden, count)
    return found + product(rows, hidden, 2 * experts.ffn_size, count) + product(rows, experts.ffn_size, hidden, count)


def layer_counts(costs: Mapping[str, tuple[int, float]], given: KernelCounts) -> KernelCounts:
    """Counts from (operators, bytes) of the dense layer and of that with experts; the others are ``given``."""
    dense, sparse = layer_shape(DENSE), layer_shape(EXPERTS)
    assert sparse.experts is not None
    passes = {name: _passes(name, size, given) for name, (_, size) in costs.items()}
    hidden = (passes[DENSE] - given.feed_forward_passes * dense.ffn_size) / dense.hidden_size
    copies, width = sparse.experts.top_k, sparse.experts.top_k * sparse.experts.ffn_size
    left = passes[EXPERTS] - hidden * sparse.hidden_size - given.feed_forward_passes * width
    launched = {name: round(operators / 2) for name, (operators, _) in costs.items()}
    return replace(
        given,
        hidden_passes=round(hidden, 1),
        expert_passes=round(left / (copies * sparse.hidden_size), 1),
        dense_kernels=launched[DENSE],
        expert_kernels=launched[EXPERTS] - launched[DENSE],
    )


def layer_shape(name: str) -> ModelShape:
    """Shape of bench.layer_cost's layer."""
    return shape_of(model_fields(name, 1, "bfloat16"), where=name)


def _passes(name: str, size: float, given: KernelCounts) -> float:
    return (size - product_bytes(layer_shape(name), given.gradient_bytes)) / _PASS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradient-bytes", type=float, default=8)
    parser.add_argument("--feed-forward-passes", type=float, default=3, help="3 forward, 6 backward")
    options = parser.parse_args()
    given = replace(
        RLHPC, gradient_bytes=options.gradient_bytes, feed_forward_passes=round(options.feed_forward_passes, 1)
    )
    lines = [json.loads(line) for line in sys.stdin]
    costs = {line["model"]: (line["operators"], line["bytes"]) for line in lines if line["microbatch"] == "next"}
    print(layer_counts(costs, given))


if __name__ == "__main__":
    main()
