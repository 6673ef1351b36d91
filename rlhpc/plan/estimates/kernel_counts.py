"""Number of kernels that a training back end launches, and the memory traffic of those that are no matrix products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCounts:
    """Counts of a layer's forward pass without its matrix products and attention, and of the head and optimizer.

    A pass is one read or write of a token's values in 16 bits. A backward pass takes twice as many.
    """

    hidden_passes: float  # over the hidden state: norms, residuals, rotation, routing
    feed_forward_passes: float  # over the feed-forward state: activation
    expert_passes: float  # over a token's copies for its experts: permutation, and sorting by expert
    logit_bytes: float  # per logit: a third of what forward and backward passes of the head move
    head_again: float  # share of the head's forward products that the backward pass makes again
    gradient_bytes: float  # per parameter and microbatch: added to a gradient of 32 bits
    update_bytes: float  # per parameter: gradient, master and both moments read; master, moments and weight written
    dense_kernels: int  # launched in a layer
    latent_kernels: int  # more with latent attention
    expert_kernels: int  # more with experts

    def in_layer(self, *, latent: bool, experts: bool) -> int:
        """Returns the kernels launched in a layer's forward pass."""
        return self.dense_kernels + latent * self.latent_kernels + experts * self.expert_kernels


# Of rlhpc/backends/megatron; `python -m tools.kernel_counts` computes those of a layer. Logits are written in 16 bits
# and read once, and once more in the backward pass, which makes them again and overwrites them with their gradient.
# Products add their result to the gradient.
RLHPC = KernelCounts(
    hidden_passes=9.4,
    feed_forward_passes=3,
    expert_passes=1.4,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=30,
    dense_kernels=14,
    latent_kernels=14,
    expert_kernels=10,
)
# Of transformers' modules, an operation of PyTorch each: a norm moves 18 passes, as it computes in float32, a rotation
# 12 over queries and keys together, a sum of residual and output 3. Gradients are written in 16 bits, and copied in
# float32 for their reduction. No weight is stored twice: gradient, weight and moments read, weight and moments written.
TRANSFORMERS = KernelCounts(
    hidden_passes=54,
    feed_forward_passes=5,
    expert_passes=7,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=28,
    dense_kernels=38,
    latent_kernels=24,
    expert_kernels=30,
)
# The same compiled in blocks: operations between matrix products and attention are one kernel. An estimate.
COMPILED_TRANSFORMERS = KernelCounts(
    hidden_passes=14,
    feed_forward_passes=3,
    expert_passes=4,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=28,
    dense_kernels=14,
    latent_kernels=12,
    expert_kernels=24,
)
